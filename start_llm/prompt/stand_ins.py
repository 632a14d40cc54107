"""Hides text from a template that would cut, hide or refuse it: stand-ins take its place while it renders.

A template that cuts an answer at a mark of reasoning does so even if the answer only quotes the mark. A
template that shows no text beside calls still shows the calls: the text is inserted where the model wrote it.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from start_llm.core.chat import Json
from start_llm.core.family import ReasoningMarks
from start_llm.core.markers import any_of

_WORD = f"standin{secrets.token_hex(16)}"
"""Random in each process and in no prompt, so no text can contain it."""

_NO_TEXT = frozenset({"role", "tool_call_id", "name"})


@dataclass(frozen=True, slots=True)
class StandIns:
    """The texts to hide from one template.

    Attributes:
        quoted: marks that a reply may quote.
        inline: marks of reasoning at the start of a reply's text, where the template can read them.
        call_head: what the template puts between the start of a reply and the name of its first call; None
            for templates that show text beside calls.
        around_text: what the model writes around a text before a call.
    """

    quoted: tuple[str, ...] = ()
    inline: ReasoningMarks | None = None
    call_head: str | None = None
    around_text: tuple[str, str] = ("", "")

    def put_into(
        self, messages: Sequence[dict[str, Json]]
    ) -> tuple[list[dict[str, Json]], Callable[[str], str]]:
        """Return messages with stand-ins, and a function that restores a rendering."""
        if self == NO_STAND_INS:
            return list(messages), lambda rendering: rendering
        texts: dict[int, str] = {}
        put = [self._put(seen, index, texts) for index, seen in enumerate(messages)]
        return put, lambda rendering: self._restored(rendering, texts)

    def _put(self, seen: dict[str, Json], index: int, texts: dict[int, str]) -> dict[str, Json]:
        if seen["role"] != "assistant":
            return seen
        content, calls = str(seen["content"]), seen.get("tool_calls")
        if self.call_head is not None and calls and content.strip():
            texts[index] = content
            named = _named_first(cast("list[Json]", calls), f"{_WORD}t{index}x")
            seen = {**seen, "content": "", "tool_calls": named}
        return self._without_quotes(seen)

    def _without_quotes(self, seen: dict[str, Json]) -> dict[str, Json]:
        quoting = {
            key: self._hidden(value)
            for key, value in seen.items()
            if isinstance(value, str) and key not in _NO_TEXT and any(mark in value for mark in self.quoted)
        }
        return {**seen, **quoting} if quoting else seen

    def _hidden(self, text: str) -> str:
        """Replace quoted marks by stand-ins, except in reasoning at the start."""
        start = 0
        if self.inline and text.lstrip().startswith(self.inline.opening) and self.inline.closing in text:
            start = text.find(self.inline.closing) + len(self.inline.closing)
        words = {mark: f"{_WORD}q{number}x" for number, mark in enumerate(self.quoted)}
        return text[:start] + any_of(self.quoted).sub(lambda mark: words[mark[0]], text[start:])

    def _restored(self, rendering: str, texts: Mapping[int, str]) -> str:
        """Restore the originals.

        A text is restored once: a template may repeat a call's name with its result.
        """
        left, (before, after) = dict(texts), self.around_text
        pieces = rendering.split(_WORD)
        for place, piece in enumerate(pieces[1:], start=1):
            kind, (number, _, rest) = piece[:1], piece[1:].partition("x")
            pieces[place] = rest
            if kind == "q":
                pieces[place] = self.quoted[int(number)] + rest
            elif (
                self.call_head is not None
                and int(number) in left
                and pieces[place - 1].endswith(self.call_head)
            ):
                pieces[place - 1] = pieces[place - 1].removesuffix(self.call_head)
                pieces[place] = f"{before}{left.pop(int(number))}{after}{self.call_head}{rest}"
        return "".join(pieces)


NO_STAND_INS = StandIns()


def _named_first(calls: Sequence[Json], word: str) -> list[Json]:
    """Return the calls with the word before the first call's name."""
    first = cast("dict[str, Json]", calls[0])
    function = cast("dict[str, Json]", first["function"])
    return [{**first, "function": {**function, "name": f"{word}{function['name']}"}}, *calls[1:]]
