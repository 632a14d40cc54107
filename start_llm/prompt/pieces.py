"""Tokenises a text in pieces and caches them, so that only the new part of a conversation is tokenised."""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import NamedTuple

from start_llm.core.images import ImageRun
from start_llm.prompt.template import PromptTokenizer

_MAX_BYTES = 16 * 2**20
_ENTRY_BYTES = 260
"""Approximate size of an entry of an `OrderedDict`, with its key."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and the number of tokens before each cut."""

    ids: tuple[int, ...]
    cuts: tuple[int, ...]


class PlacedRun(NamedTuple):
    """An image in a text: its placeholder, one added token, begins at character `place`."""

    place: int
    run: ImageRun


class _TextPiece(NamedTuple):
    """A part of a text. `goes_on`: it follows the part before it in the middle of a word."""

    text: str
    goes_on: bool


class PieceEncoder:
    """Tokenises pieces of conversations. Safe to use from any thread.

    A text may be cut before an added token: tokenizers split there first, so the pieces give the same
    ids as the whole.

    Args:
        max_bytes: size of the cached texts and ids; the least recently used are removed first.
    """

    def __init__(self, tokenizer: PromptTokenizer, max_bytes: int = _MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[_TextPiece, array[int]] = OrderedDict()
        self._bytes = 0
        self.encoded_characters = 0
        """Number of characters that went through the tokenizer."""

    def encode(
        self,
        text: str,
        cuts: Sequence[int],
        images: Sequence[PlacedRun] = (),
        breaks: Sequence[int] = (),
    ) -> Encoded:
        """Tokenise a text.

        Args:
            cuts: ascending character offsets in `text`, each before an added token.
            images: the runs that take the place of placeholders.
            breaks: offsets at which the text is cut all the same (`prompt.client_marks`).
        """
        runs, broken = dict(images), frozenset(breaks)
        ends = sorted({*cuts, *runs, *broken}) if runs or broken else cuts
        spans = zip([0, *ends], [*ends, len(text)], strict=True)
        pieces = [_TextPiece(text[start:end], goes_on=start in broken) for start, end in spans]
        ids = array("I")
        counts: dict[int, int] = {}
        for start, piece, known in zip([0, *ends], pieces, self._remembered(pieces), strict=True):
            counts[start] = len(ids)
            read = self._ids_of(piece) if known is None else known
            run = runs.get(start) if piece.text else None
            ids.extend(array("I", (*run.tokens, *read[1:])) if run else read)
        return Encoded(tuple(ids), tuple(counts[cut] for cut in cuts))

    def _remembered(self, pieces: Sequence[_TextPiece]) -> list[array[int] | None]:
        with self._lock:
            known = [self._known.get(piece) for piece in pieces]
            for piece, ids in zip(pieces, known, strict=True):
                if ids is not None:
                    self._known.move_to_end(piece)
            return known

    def _ids_of(self, piece: _TextPiece) -> array[int]:
        """Tokenise one piece, unless the same text or another thread has just done so."""
        with self._lock:
            known = self._known.get(piece)
        if known is not None:
            return known
        ids = array("I", self._encoded(piece))
        with self._lock:
            self.encoded_characters += len(piece.text)
            if piece not in self._known:
                self._known[piece] = ids
                self._bytes += _weight(piece, ids)
            while self._bytes > self._max_bytes:
                self._bytes -= _weight(*self._known.popitem(last=False))
        return ids

    def _encoded(self, piece: _TextPiece) -> list[int]:
        if piece.goes_on:
            return self._tokenizer.encode_continuation(piece.text)
        return self._tokenizer.encode(piece.text, as_document=False)


def _weight(piece: _TextPiece, ids: array[int]) -> int:
    """Return the size of an entry in bytes. For a short text, the entry itself takes the most."""
    return getsizeof(piece.text) + getsizeof(ids) + _ENTRY_BYTES
