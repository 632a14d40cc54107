"""Parses a block of tool calls with every notation that its opener fits. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.formats.model_format import Notation
from start_llm.formats.reading.last_block import LastBlockReader
from start_llm.formats.reading.parts import CallReader, ParsedText, Part
from start_llm.formats.reading.schema import Tools


class CallFormats:
    """The notations that calls may be written in.

    Args:
        notations: the likeliest first.
        tools: the offered tools; without tools nothing is a call.
        native: names of the notations that the model has learnt. In these a call of any tool is one.
    """

    def __init__(self, notations: Sequence[Notation], tools: Tools, native: Sequence[str] = ()) -> None:
        self._native = frozenset(native)
        self._notations = tuple(notations) if tools else ()
        self._tools = tools
        self.openers = tuple(
            dict.fromkeys(opener for notation in self._notations for opener in notation.openers)
        )
        self.closers = tuple(dict.fromkeys(mark for notation in self._notations for mark in notation.closers))
        self.bare = tuple(dict.fromkeys(text for notation in self._notations for text in notation.bare))
        self._last_lists = [
            notation.last_list
            for notation in self._notations
            if notation.last_list and notation.name in native
        ]
        self.at_end = tuple(f"[{name}(" for name in tools) if self._last_lists else ()
        """Texts that begin a bare list behind the text of an answer."""

    def block(self, opener: str, after: str, *, may_be_quoted: bool = True) -> CallBlock:
        """Return the block after this opener. An empty opener means that `after` begins a bare block.

        Args:
            may_be_quoted: only offered tools are called.
        """
        fitting = [
            notation
            for notation in self._notations
            if (opener in notation.openers if opener else after.startswith(notation.bare))
        ]
        if opener in self.at_end:
            return self._last_block(opener, may_be_quoted=may_be_quoted)
        is_native = bool(opener) and not may_be_quoted
        return CallBlock(
            opener,
            [
                notation.reader(
                    self._tools.taking_any if is_native and notation.name in self._native else self._tools
                )
                for notation in fitting
            ],
        )

    def _last_block(self, opener: str, *, may_be_quoted: bool) -> CallBlock:
        """Return a bare list behind text, which ends the reply. In quotation it is text."""
        readers = [] if may_be_quoted else self._last_lists
        return CallBlock(opener, [LastBlockReader(reader(self._tools), opener) for reader in readers])


class CallBlock:
    """The text after an opener. Every matching notation parses it; the first to return parts wins."""

    def __init__(self, opener: str, readers: list[CallReader]) -> None:
        self._readers = readers
        self._is_certain = False
        self._opener = opener
        self._read = [opener]

    def feed(self, text: str) -> list[Part]:
        if not self._is_certain:
            self._read.append(text)
        for reader in list(self._readers):
            parts = reader.feed(text)
            if self._settled(reader, parts):
                return parts
        return []

    def close(self, complete: bool) -> list[Part]:
        for reader in list(self._readers):
            parts = reader.close(complete)
            if self._settled(reader, parts):
                return parts
        return []

    def _settled(self, reader: CallReader, parts: list[Part]) -> bool:
        if reader.state == "failed":
            self._readers.remove(reader)
        if parts and not self._is_certain:
            if isinstance(parts[0], ParsedText):
                parts[0] = ParsedText(self._opener + parts[0].text)
            self._readers = [reader]
            self._is_certain = True
            self._read = []
        return bool(parts)

    @property
    def text(self) -> str:
        """Everything read so far, while the block may still turn out to be text."""
        return "".join(self._read)

    @property
    def was_repaired(self) -> bool:
        """True if a call is not what the model wrote, character by character."""
        return any(reader.was_repaired for reader in self._readers)

    @property
    def is_none(self) -> bool:
        """True once every reader has failed: the block contains no calls."""
        return not self._readers

    @property
    def rest(self) -> str | None:
        """The text after the block; None until the block ends."""
        done = [reader for reader in self._readers if reader.state == "done"]
        return done[0].rest if done else None
