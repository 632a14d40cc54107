"""The fewest tokens that a text can possibly have, computed without encoding it.

No token spells more bytes than the longest one of the vocabulary. So a text has at least its bytes divided by
that, if the tokenizer drops nothing on its way and spells everything: then the length of a text alone can
prove that it does not fit into a context window. About tokenizers that drop something, or have one token
for any number of unknown characters, there is no bound.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_SHRINKING: Mapping[str, int] = {"NFC": 9, "NFD": 3, "NFKC": 12, "NFKD": 4}
"""By how much a normal form of Unicode can shorten a text at most, in bytes of UTF-8. ASCII stays."""
_SPACES = (
    *map(chr, range(0x09, 0x0E)),
    *(" ", "\x85", "\xa0", "\u1680"),
    *map(chr, range(0x2000, 0x200B)),
    *("\u2028", "\u2029", "\u202f", "\u205f", "\u3000"),
)
"""White space, which some added tokens absorb in any number."""
_WRITES_SPACES = {"pattern": {"String": " "}, "content": "\u2581"}
_READS_MARKS = 3
"""A text may hold SentencePiece's mark for a space itself, three bytes that are read as one."""
_OF_UTF_8 = frozenset(bytes([byte]) for byte in range(256)) - {
    bytes([byte]) for byte in (0xC0, 0xC1, *range(0xF5, 256))
}
"""The bytes that a text can hold."""


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """What bounds the number of tokens of a text.

    Attributes:
        longest: bytes of the longest token; None if there is no bound.
        shrinks: the factor by which a text that is not ASCII may be shortened before it is cut into tokens.
        absorbs_space: a token may stand for any number of white space beside it.
    """

    longest: int | None
    shrinks: int = 1
    absorbs_space: bool = False

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least; 0 if there is no bound."""
        if self.longest is None:
            return 0
        length = _bytes(text)
        if self.absorbs_space:
            length -= sum(text.count(space) * _bytes(space) for space in _SPACES)
        if self.shrinks > 1 and not text.isascii():
            length //= self.shrinks
        return max(-(-length // self.longest), 0)


def token_lengths(backend: Any, pieces: Collection[bytes], *, absorbs_space: bool) -> TokenLengths:
    """Return what bounds the number of tokens.

    Args:
        backend: the tokenizers library's tokenizer; None for one of another kind.
        pieces: the bytes of all tokens.
    """
    if backend is None or not _OF_UTF_8.issubset(pieces):
        return TokenLengths(None)
    normalizers = _steps(_as_json(backend.normalizer), "normalizers")
    pre_tokenizers = _steps(_as_json(backend.pre_tokenizer), "pretokenizers")
    factors = [*map(_normalizing, normalizers), *map(_cutting, pre_tokenizers)]
    if not _spells_in_bytes(backend.model, [*normalizers, *pre_tokenizers]) or None in factors:
        return TokenLengths(None)
    shrinks = math.prod(factor or 1 for factor in factors)
    return TokenLengths(max(map(len, pieces)), shrinks, absorbs_space)


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _as_json(step: Any) -> Mapping[str, Any] | None:
    """Return a step of a tokenizer as tokenizer.json has it."""
    return None if step is None else json.loads(step.__getstate__())


def _steps(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return a step, or those of a sequence of steps."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for part in step[inner] for each in _steps(part, inner)]
    return [step]


def _spells_in_bytes(model: Any, steps: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether what has no token of its own is spelled in bytes."""
    kind = type(model).__name__
    is_byte_level = kind == "BPE" and any(step["type"] == "ByteLevel" for step in steps)
    return is_byte_level or (kind in ("BPE", "Unigram") and bool(getattr(model, "byte_fallback", False)))


def _normalizing(step: Mapping[str, Any]) -> int | None:
    """Return by how much a normalizer can shorten a text that is not ASCII; None if nobody knows."""
    kind = step["type"]
    if kind in ("Prepend", "ByteLevel"):
        return 1
    if kind == "Replace":
        return _READS_MARKS if _WRITES_SPACES.items() <= step.items() else None
    return _SHRINKING.get(kind)


def _cutting(step: Mapping[str, Any]) -> int | None:
    """Return by how much cutting a text can shorten it, as `_normalizing` does."""
    kind = step["type"]
    if kind in ("Split", "Punctuation"):
        return None if step.get("behavior") == "Removed" else 1
    if kind == "Metaspace":
        return _READS_MARKS
    return 1 if kind in ("ByteLevel", "Digits") else None
