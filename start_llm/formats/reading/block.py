"""Base class of call parsers: steps over a buffer, calls that may still be text, the end of a block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import regex

from start_llm.formats.reading.parts import ParsedText, Part, State
from start_llm.formats.reading.schema import Tools

type Step = Callable[[list[Part]], bool]
"""Consumes what it can of the buffer. Returns True if another step may go on."""


@lru_cache(1024)
def compiled(pattern: str) -> regex.Pattern[str]:
    """Return the compiled pattern. The regex library's own cache costs more than most matches here.

    Some patterns hold a name that the model wrote, so there is no end of them.
    """
    return regex.compile(pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Regular expressions of the text around the calls of a block.

    Attributes:
        head: everything before the arguments; group `name` is the tool's name, if it is part of the head.
        unescape: converts a name from its form in the markup.
        next_call: matches after a call if another call follows; not consumed.
        block_end: the end of the block after its last call; matches nothing by default. A group `junk` is
            what is dropped before it.
    """

    head: str
    unescape: Callable[[str], str] = str
    next_call: str = r"(?!)"
    block_end: str = r"(?!)"


class BlockReader:
    """Parses the head and the tail of each call; subclasses parse the arguments.

    A complete call with an unknown tool or the wrong shape is emitted as text. Parsing continues after it.
    Valid calls beside it survive, and nothing in its arguments is treated as a call.
    """

    def __init__(self, block: Block, tools: Tools) -> None:
        self.state: State = "reading"
        self.rest = ""
        self.was_repaired = False
        self._block = block
        self._tools = tools
        self._buffer = ""
        self._step: Step = self._read_head
        self._has_given = False
        # Text after the last call, until it is known to be a call or text.
        self._unsettled: list[str] = []
        self._is_settled = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        if not self._is_settled:
            self._unsettled.append(text)
        parts: list[Part] = []
        while self.state == "reading" and self._step(parts):
            pass
        return parts

    def close(self, complete: bool) -> list[Part]:
        if self.state != "reading":
            return []
        if self._step == self._read_tail:
            self._finish(self._beyond_end(complete) if self._is_settled else self._buffer)
            return []
        parts = self._close_call() if complete else self._cut_call()
        if self.state == "reading" and not self._is_settled:
            self._give_up()
        return parts

    def _close_call(self) -> list[Part]:
        """Close a call in which the model ended its reply. An override that returns parts settles it."""
        return []

    def _cut_call(self) -> list[Part]:
        """Return the parts that were held back from a call that the limit cut."""
        return []

    def _begin_arguments(self, name: str | None) -> Step:
        """Return the step that follows the head."""
        raise NotImplementedError

    def _read_head(self, parts: list[Part]) -> bool:  # noqa: ARG002 - the signature of a step
        match = self._match(compiled(self._block.head))
        if match is None:
            return False
        name = match.groupdict().get("name")
        self._step = self._begin_arguments(name and self._block.unescape(name))
        return True

    def _settle(self) -> None:
        """Mark the text as a call. It can no longer become text."""
        self._is_settled = self._has_given = True
        self._unsettled = []

    def _meant(self, name: str) -> str | None:
        """Return the tool that the model means, or None if there is none."""
        meant = self._tools.meant(name)
        self.was_repaired |= meant is not None and meant != name
        return meant

    def _end_call(self) -> None:
        self._step = self._read_tail

    def _refuse(self, parts: list[Part]) -> None:
        """Emit a complete call as text. The buffer begins after it."""
        text = "".join(self._unsettled)
        parts.append(ParsedText(text[: len(text) - len(self._buffer)]))
        self._unsettled, self._has_given = [self._buffer], True
        self._step = self._read_tail

    def _read_tail(self, parts: list[Part]) -> bool:
        """Read the text after a call: another call, the end of the block, or text after the block."""
        following = compiled(self._block.next_call).match(self._buffer, partial=True)
        ending = compiled(self._block.block_end).match(self._buffer, partial=True)
        if following is not None and not following.partial:
            self._unsettled, self._is_settled = [self._buffer], False
            self._step = self._read_head
            return True
        if ending is not None and not ending.partial:
            if not self._is_settled:
                parts.append(ParsedText(ending[0]))
            self._note_junk(ending)
            self._finish(self._buffer[ending.end() :])
        elif following is None and ending is None:
            self._finish(self._buffer)
        return False

    def _match(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Consume a match at the start of the buffer. None: no match yet, or never, and then give up."""
        match = pattern.match(self._buffer, partial=True)
        if match is None:
            self._give_up()
            return None
        if match.partial:
            return None
        self._buffer = self._buffer[match.end() :]
        return match

    def _give_up(self) -> None:
        """Stop in text that is not a call and has no known end. Keep earlier calls, give back the text."""
        if self._has_given:
            self._finish("".join(self._unsettled))
        else:
            self.state = "failed"

    def _finish(self, rest: str) -> None:
        self.state = "done"
        self.rest = rest

    def _beyond_end(self, complete: bool) -> str:
        """Return the text after a call when the reply stops there. Half of a block's end is not text.

        What the limit has cut behind a comma was another call, most likely.
        """
        match = compiled(self._block.block_end).match(self._buffer, partial=True)
        if match is None or (not complete and _has_begun_junk(match)):
            return self._buffer
        self._note_junk(match)
        return ""

    def _note_junk(self, end: regex.Match[str]) -> None:
        self.was_repaired |= end.groupdict().get("junk") is not None


def _has_begun_junk(end: regex.Match[str]) -> bool:
    """Return whether something that may be junk was begun before a block's end, and is not whole."""
    return "junk" in end.re.groupindex and end["junk"] is None and bool(end[0].strip(" \t\r\n]"))
