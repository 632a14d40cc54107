"""What readers of blocks share: steps over a buffer, calls that are not certain yet, the end of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import regex

from start_llm.formats.reading.parts import Part, Plain, State
from start_llm.formats.reading.schema import Tools

type Step = Callable[[list[Part]], bool]
"""Consumes what it can of the buffer, and tells whether another step may go on."""


@cache
def compiled(pattern: str) -> regex.Pattern[str]:
    """The library's own cache costs more than most matches here."""
    return regex.compile(pattern)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What stands around the calls of a block, as regular expressions.

    Attributes:
        head: up to where the arguments begin; the tool's name in group `name`, if it stands here.
        unescape: makes a name of what stands for it in the markup.
        next_call: what tells that another call follows; looked for behind a call, not consumed.
        block_end: what ends the block behind its last call; nothing by default.
    """

    head: str
    unescape: Callable[[str], str] = str
    next_call: str = r"(?!)"
    block_end: str = r"(?!)"


class BlockReader:
    """Head and tail of a reader; what is between them is the subclass's.

    A call that is whole but none, because of its tool or its form, is told as text, and reading goes on
    behind it: good calls beside it survive, and what stands in its arguments is never taken for a call.
    """

    def __init__(self, block: Block, tools: Tools) -> None:
        self.state: State = "reading"
        self.rest = ""
        self._block = block
        self._tools = tools
        self._buffer = ""
        self._step: Step = self._read_head
        self._has_given = False
        # Text behind the last call, while it is not certain what it is.
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
            self._finish(self._beyond_cut_end() if self._is_settled else self._buffer)
            return []
        parts = self._close_call() if complete else []
        if not self._is_settled:
            self._give_up()
        return parts

    def _close_call(self) -> list[Part]:
        """The model ended its reply inside a call. What is given settles it."""
        return []

    def _begin_arguments(self, name: str | None) -> Step:
        """The step behind the head."""
        raise NotImplementedError

    def _read_head(self, parts: list[Part]) -> bool:  # noqa: ARG002 - the signature of a step
        match = self._match(compiled(self._block.head))
        if match is None:
            return False
        name = match.groupdict().get("name")
        self._step = self._begin_arguments(name and self._block.unescape(name))
        return True

    def _settle(self) -> None:
        """From here on this is a call."""
        self._is_settled = self._has_given = True
        self._unsettled = []

    def _end_call(self) -> None:
        self._step = self._read_tail

    def _refuse(self, parts: list[Part]) -> None:
        """The buffer is behind a call that is whole but none."""
        text = "".join(self._unsettled)
        parts.append(Plain(text[: len(text) - len(self._buffer)]))
        self._unsettled, self._has_given = [self._buffer], True
        self._step = self._read_tail

    def _read_tail(self, parts: list[Part]) -> bool:
        """Behind a call: another one, the end of the block, or something else, which is not ours."""
        following = compiled(self._block.next_call).match(self._buffer, partial=True)
        ending = compiled(self._block.block_end).match(self._buffer, partial=True)
        if following is not None and not following.partial:
            self._unsettled, self._is_settled = [self._buffer], False
            self._step = self._read_head
            return True
        if ending is not None and not ending.partial:
            if not self._is_settled:
                parts.append(Plain(ending[0]))
            self._finish(self._buffer[ending.end() :])
        elif following is None and ending is None:
            self._finish(self._buffer)
        return False

    def _match(self, pattern: regex.Pattern[str]) -> regex.Match[str] | None:
        """Consume a match at the start of the buffer; None if there is none yet, or never will be."""
        match = pattern.match(self._buffer, partial=True)
        if match is None:
            self._give_up()
            return None
        if match.partial:
            return None
        self._buffer = self._buffer[match.end() :]
        return match

    def _give_up(self) -> None:
        """This is no call, and where it ends is unknown. The calls before it stay, and its text goes back."""
        if self._has_given:
            self._finish("".join(self._unsettled))
        else:
            self.state = "failed"

    def _finish(self, rest: str) -> None:
        self.state = "done"
        self.rest = rest

    def _beyond_cut_end(self) -> str:
        """What is left behind a call when the reply stops there: half of the block's end is no text."""
        match = compiled(self._block.block_end).match(self._buffer, partial=True)
        return self._buffer if match is None else ""
