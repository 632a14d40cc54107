"""Computes the identity of a model: stored KV may be reused only under an equal identity.

MLX reads every parameter once. Its raw bits are taken as 32-bit words (narrower ones if the size is not a
multiple of 4 bytes). Each row of `_ROW` words gives one checksum: the sum of word times key, modulo 2**64.
The keys are random, odd 64-bit numbers. One changed word always changes the sum; any other change goes
unnoticed with a probability of about 2**-32 or less. (With 32-bit keys, x and -x could be exchanged: they
differ only in the top bit, and an odd key keeps it there.) One digest covers the checksums of all rows in
order.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from start_llm.models.loader import LoadedModel

PAGE_FORMAT = 2
"""Version of the layout of KV pages; increase it with every change of that layout."""
RENDERING = 3
"""Version of how conversations become tokens; increase it when the same request gives others."""
IDENTITY_BYTES = 16
LIBRARIES = ("mlx", "mlx-lm")
"""A corrected error in one of them may change KV."""
VISION_LIBRARIES = ("mlx-vlm", "transformers", "pillow")
"""The same for a model that reads images: these prepare the pixels and compute what is made of them."""

_ROW = 1 << 14
_PIECE = 1 << 20
_WORDS = ((4, mx.uint32), (2, mx.uint16), (1, mx.uint8))
"""Bytes and type of a word, the widest first."""


def identity(model: LoadedModel, weights: bytes) -> bytes:
    """Return 16 bytes that change with whatever KV depends on.

    That is weights, the type that they are computed with, config, tokenizer, libraries and format.

    Args:
        weights: digest of the weights; see `digest_of`.
    """
    libraries = (*LIBRARIES, *(VISION_LIBRARIES if model.vision else ()))
    return _digest(
        PAGE_FORMAT.to_bytes(4, "little"),
        weights,
        *([b"in float32"] if model.precision.is_converted else ()),
        json.dumps(model.config, sort_keys=True).encode(),
        model.tokenizer.definition().encode(),
        *(f"{name} {version(name)}".encode() for name in libraries),
    )


def computed_with() -> str:
    """Return in words what all pages depend on, whatever their model: the libraries and the format."""
    return ", ".join((*(f"{name} {version(name)}" for name in LIBRARIES), f"page format {PAGE_FORMAT}"))


def transcripts_identity(model: LoadedModel, identity: bytes) -> bytes:
    """Return 16 bytes that change with whatever recorded prompts depend on: the template too."""
    template = model.tokenizer.chat_template.encode()
    return _digest(identity, RENDERING.to_bytes(4, "little"), template)


def digest_of(model: LoadedModel) -> bytes:
    """Return the digest of a model's weights, with those of its vision tower.

    Call it on the thread that loaded the model.
    """
    parameters = cast("list[tuple[str, mx.array]]", tree_flatten(model.network.parameters()))
    return weights_digest([*parameters, *(model.vision.parameters.items() if model.vision else ())])


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for part in parts:
        _add(digest, part)
    return digest.digest()


def weights_digest(weights: Iterable[tuple[str, mx.array]], *, piece: int = _PIECE) -> bytes:
    """Return 16 bytes for names, shapes, types and contents of parameters, in any order.

    Args:
        weights: names and arrays of any shape and type; an array need not be contiguous.
        piece: elements to process at once. Each takes 16 bytes of temporary memory, or 32 if it has 8 bytes
            itself. The digest depends on this number.
    """
    keys = _keys()
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for name, values in sorted(weights, key=lambda named: named[0]):
        _add(digest, json.dumps([name, values.shape, str(values.dtype)]).encode())
        for part in _pieces(values, piece):
            _add(digest, _checksums(part, keys))
    return digest.digest()


def _add(digest: Any, part: bytes) -> None:
    """Add a part with its length in front, so that different sequences of parts give different bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _keys() -> mx.array:
    """Return the keys: uint64 [_ROW], odd, the same in every process and on every machine."""
    noise = array.array("Q", hashlib.shake_256(b"start_llm weights").digest(8 * _ROW))
    return mx.array(cast("Any", noise)) | mx.array(1, dtype=mx.uint64)


def _pieces(values: mx.array, most: int) -> Iterator[mx.array]:
    """Yield an array in order, as flat arrays of 1 to `most` elements.

    Slice along the axes instead of flattening the whole array: that would copy a non-contiguous array, and
    MLX counts an axis in 32 bits.
    """
    if values.size <= most:
        if values.size:
            yield values.flatten()
        return
    rows = max(most // (values.size // values.shape[0]), 1)
    for start in range(0, values.shape[0], rows):
        part = values[start : start + rows]
        yield from _pieces(part if part.size <= most else part[0], most)


def _checksums(values: mx.array, keys: mx.array) -> bytes:
    """Return 8 bytes for each row of words of a flat array; the last row may be shorter."""
    words = _as_words(values)
    whole = words.size // _ROW * _ROW
    rows, rest = words[:whole].reshape(-1, _ROW), words[whole:]
    sums = mx.concatenate([(rows * keys).sum(axis=1), (rest * keys[: rest.size]).sum(keepdims=True)])
    return memoryview(cast("Any", sums)).tobytes()


def _as_words(values: mx.array) -> mx.array:
    """Return the raw bits of a flat array as the widest words that divide its size."""
    return next(mx.view(values, kind) for size, kind in _WORDS if values.nbytes % size == 0)
