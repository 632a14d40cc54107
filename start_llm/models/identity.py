"""Which model computed a piece of KV: stored KV may be used again only under an equal identity.

Every parameter is read once, by MLX. Its raw bits are taken as words of 32 bits (fewer where the bytes do not
divide so), and each row of `_ROW` words gives one checksum: the sum of word times key, modulo 2**64. The keys
are random, odd and of 64 bits. One changed word always changes the sum; any other change goes unseen with a
probability of about 2**-32 or less. (With keys of 32 bits, x and -x could change places: they differ in the
top bit alone, and an odd key keeps it there.) The checksums of all rows go into one digest in order.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

if TYPE_CHECKING:
    from start_llm.models.loader import LoadedModel

PAGE_FORMAT = 1
"""How KV is cut into pages and written; to be raised with every change of it."""
IDENTITY_BYTES = 16

_ROW = 1 << 14
_PIECE = 1 << 20
_WORDS = ((4, mx.uint32), (2, mx.uint16), (1, mx.uint8))
"""Bytes of a word and its type, the widest first."""


def identity(model: LoadedModel) -> bytes:
    """16 bytes that change with the weights, the config, the tokenizer, the template or the page format.

    Runs on the thread that loaded the model.
    """
    weights = cast("list[tuple[str, mx.array]]", tree_flatten(model.network.parameters()))
    parts = (
        PAGE_FORMAT.to_bytes(4, "little"),
        weights_digest(weights),
        json.dumps(model.config, sort_keys=True).encode(),
        model.tokenizer.definition().encode(),
        model.tokenizer.chat_template.encode(),
    )
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for part in parts:
        _add(digest, part)
    return digest.digest()


def weights_digest(weights: Iterable[tuple[str, mx.array]], *, piece: int = _PIECE) -> bytes:
    """16 bytes for names, shapes, types and content of parameters, whatever order they come in.

    Args:
        weights: name and array, of any shape and type; an array need not be contiguous.
        piece: elements that are worked on at once, which take 16 bytes each of temporary memory, and for
            items of 8 bytes twice that. The digest depends on it.
    """
    keys = _keys()
    digest = hashlib.blake2b(digest_size=IDENTITY_BYTES)
    for name, values in sorted(weights, key=lambda named: named[0]):
        _add(digest, json.dumps([name, values.shape, str(values.dtype)]).encode())
        for part in _pieces(values, piece):
            _add(digest, _checksums(part, keys))
    return digest.digest()


def _add(digest: Any, part: bytes) -> None:
    """With its length in front, so that no two sequences of parts are the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _keys() -> mx.array:
    """uint64 [_ROW], odd; the same in every process and on every machine."""
    noise = array.array("Q", hashlib.shake_256(b"start_llm weights").digest(8 * _ROW))
    return mx.array(cast("Any", noise)) | mx.array(1, dtype=mx.uint64)


def _pieces(values: mx.array, most: int) -> Iterator[mx.array]:
    """An array in order, as flat arrays of 1 to `most` elements.

    It is cut along its axes and never flattened as a whole: that would copy one that is not contiguous, and
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
    """8 bytes for each row of words of a flat array; the last row may be shorter."""
    words = _as_words(values)
    whole = words.size // _ROW * _ROW
    rows, rest = words[:whole].reshape(-1, _ROW), words[whole:]
    sums = mx.concatenate([(rows * keys).sum(axis=1), (rest * keys[: rest.size]).sum(keepdims=True)])
    return memoryview(cast("Any", sums)).tobytes()


def _as_words(values: mx.array) -> mx.array:
    """The raw bits of a flat array, as the widest words that divide them."""
    return next(mx.view(values, kind) for size, kind in _WORDS if values.nbytes % size == 0)
