"""Tokenises a text in pieces and caches them, so that only the new part of a conversation is tokenised."""

import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from sys import getsizeof
from types import MappingProxyType
from typing import NamedTuple

from start_llm.core.images import ImageRun
from start_llm.core.recently_used import RecentlyUsed
from start_llm.prompt.template import PromptTokenizer

_MAX_BYTES = 16 * 2**20
_ENTRY_BYTES = 260
"""Approximate size of an entry of an `OrderedDict`, with its key."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and the number of tokens before each cut."""

    ids: tuple[int, ...]
    cuts: tuple[int, ...]


class _TextPiece(NamedTuple):
    """A part of a text. `goes_on`: it follows the part before it in the middle of a word."""

    text: str
    goes_on: bool


class _KnownIds(NamedTuple):
    """The ids of a piece. For a short text, the entry itself takes the most of `nbytes`."""

    ids: array[int]
    nbytes: int


class PieceEncoder:
    """Tokenises pieces of conversations. Safe to use from any thread.

    A text may be cut before an added token: tokenizers split there first, so the pieces give the same
    ids as the whole.

    Args:
        max_bytes: size of the cached texts and ids; the least recently used are removed first.
    """

    def __init__(self, tokenizer: PromptTokenizer, max_bytes: int = _MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._known = RecentlyUsed[_TextPiece, _KnownIds](max_bytes, attrgetter("nbytes"))
        self._lock = threading.Lock()
        self.encoded_characters = 0
        """Number of characters that went through the tokenizer."""

    def encode(
        self,
        text: str,
        cuts: Sequence[int],
        breaks: Sequence[int] = (),
        images: Mapping[int, ImageRun] = MappingProxyType({}),
    ) -> Encoded:
        """Tokenise a text.

        Args:
            cuts: ascending character offsets in `text`, each before an added token.
            breaks: offsets at which the text is cut all the same (`prompt.client_marks`).
            images: the runs that take the place of placeholders, one added token each, by their offsets.
        """
        broken = frozenset(breaks)
        ends = sorted({*cuts, *images, *broken}) if images or broken else cuts
        spans = zip([0, *ends], [*ends, len(text)], strict=True)
        pieces = [_TextPiece(text[start:end], goes_on=start in broken) for start, end in spans]
        ids = array("I")
        counts: dict[int, int] = {}
        remembered = list(map(self._known.get, pieces))  # before new pieces displace some
        for start, piece, known in zip([0, *ends], pieces, remembered, strict=True):
            counts[start] = len(ids)
            read = (known or self._encoded(piece)).ids
            run = images.get(start) if piece.text else None
            ids.extend(array("I", (*run.tokens, *read[1:])) if run else read)
        return Encoded(tuple(ids), tuple(counts[cut] for cut in cuts))

    def _encoded(self, piece: _TextPiece) -> _KnownIds:
        """Tokenise one piece, unless the same text or another thread has just done so."""
        known = self._known.get(piece)
        if known is None:
            ids = array("I", self._read(piece))
            known = _KnownIds(ids, getsizeof(piece.text) + getsizeof(ids) + _ENTRY_BYTES)
            with self._lock:
                self.encoded_characters += len(piece.text)
            self._known.put(piece, known)
        return known

    def _read(self, piece: _TextPiece) -> list[int]:
        if piece.goes_on:
            return self._tokenizer.encode_continuation(piece.text)
        return self._tokenizer.encode(piece.text, as_document=False)
