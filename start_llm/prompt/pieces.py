"""Tokenising a text in pieces, and remembering them: a conversation that grew is tokenised where it grew."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from sys import getsizeof

from start_llm.prompt.template import TemplateTokenizer

_MOST_BYTES = 16 * 2**20
_ENTRY_BYTES = 200
"""About what a dictionary that keeps an order takes for each entry."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of a text, and for each cut the number of tokens in front of it."""

    ids: tuple[int, ...]
    cuts: tuple[int, ...]


class PieceEncoder:
    """Tokenises pieces of conversations. Safe to use from any thread.

    A text may be cut in front of an added token: tokenizers split there before they do anything else, so the
    pieces give the same ids as the whole.

    Args:
        most_bytes: of texts and ids that are remembered; what was used least recently is forgotten first.
    """

    def __init__(self, tokenizer: TemplateTokenizer, most_bytes: int = _MOST_BYTES) -> None:
        self._tokenizer = tokenizer
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._bytes = 0
        self.encoded_characters = 0
        """Characters that really went through the tokenizer."""

    def encode(self, text: str, cuts: Sequence[int]) -> Encoded:
        """Args:
        cuts: ascending character positions in `text`, each in front of an added token.
        """
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids = array("I")
        counts: list[int] = []
        for piece, known in zip(pieces, self._remembered(pieces), strict=True):
            ids.extend(self._piece(piece) if known is None else known)
            counts.append(len(ids))
        return Encoded(tuple(ids), tuple(counts[:-1]))

    def _remembered(self, pieces: Sequence[str]) -> list[array[int] | None]:
        with self._lock:
            known = [self._known.get(piece) for piece in pieces]
            for piece, ids in zip(pieces, known, strict=True):
                if ids is not None:
                    self._known.move_to_end(piece)
            return known

    def _piece(self, piece: str) -> array[int]:
        """It may have become known: it stands in the text several times, or another thread has it too."""
        with self._lock:
            known = self._known.get(piece)
        if known is not None:
            return known
        ids = array("I", self._tokenizer.encode(piece, as_document=False))
        with self._lock:
            self.encoded_characters += len(piece)
            if piece not in self._known:
                self._known[piece] = ids
                self._bytes += _weight(piece, ids)
            while self._bytes > self._most_bytes:
                self._bytes -= _weight(*self._known.popitem(last=False))
        return ids


def _weight(piece: str, ids: array[int]) -> int:
    """Bytes. A short text weighs less than what it takes to remember it."""
    return getsizeof(piece) + getsizeof(ids) + _ENTRY_BYTES
