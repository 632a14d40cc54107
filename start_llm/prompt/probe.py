"""Renders synthetic conversations, each in the settings in which agents send theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import CallIds
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns
from start_llm.prompt.template import Rendering, Seen, TemplateTokenizer

type Tools = Sequence[Mapping[str, Json]]

SAMPLE_IDS: Mapping[CallIds, tuple[str, str]] = {
    "ordinal": ("call0", "call1"),
    "nine": ("000000000", "000000001"),
    "kimi": ("functions.probetool:0", "functions.probeother:1"),
}
TOOL: Mapping[str, Json] = {
    "type": "function",
    "function": {
        "name": "probetool",
        "description": "probedescription",
        "parameters": {
            "type": "object",
            "properties": {"probekey": {"type": "string"}},
            "required": ["probekey"],
        },
    },
}
_NUMBERS = ("one", "two")
SYSTEM: Seen = {"role": "system", "content": "probesystem"}
USER: Seen = {"role": "user", "content": "probefirst"}
REPLY: Seen = {"role": "assistant", "content": "probereply"}
NEXT: Seen = {"role": "user", "content": "probesecond"}


@dataclass(frozen=True, slots=True)
class Probe:
    """Renders for one template, and remembers the dates that were asked for.

    Attributes:
        leads: the messages that a conversation may begin with, besides its own.
    """

    tokenizer: TemplateTokenizer
    dates: list[str] = field(default_factory=list[str])
    stand_ins: StandIns = NO_STAND_INS
    leads: tuple[tuple[Seen, ...], ...] = ((),)

    @classmethod
    def of(cls, tokenizer: TemplateTokenizer) -> Probe:
        """With a system message in front, if the template takes one with and without tools."""
        probe = cls(tokenizer)
        taken = all(probe.text(SYSTEM, USER, tools=tools) for tools in ((), (TOOL,)))
        return replace(probe, leads=((), (SYSTEM,))) if taken else probe

    def text(
        self,
        *messages: Seen,
        tools: Tools = (),
        options: Mapping[str, Json] | None = None,
        with_tail: bool = False,
    ) -> str:
        """The rendering; nothing if the template refuses."""

        def note(form: str) -> str:
            self.dates.append(form)
            return form

        rendering = Rendering(self.tokenizer, tools, options or {}, note, self.stand_ins)
        try:
            return rendering.text(messages, with_tail=with_tail)
        except InvalidRequest:
            return ""

    def texts(self, *messages: Seen, options: Mapping[str, Json] | None = None) -> list[str]:
        """The prompts with these messages: bare, and with tools and a system message."""
        return [
            self.text(*lead, *messages, tools=tools, options=options, with_tail=True)
            for lead, tools in self._settings(messages)
        ]

    def shows(self, words: Sequence[str], *messages: Seen, options: Mapping[str, Json] | None = None) -> bool:
        """Every prompt has all the words, in this order."""
        return all(in_order(text, words) for text in self.texts(*messages, options=options))

    def has(self, words: Iterable[str], *messages: Seen) -> bool:
        """Every prompt has all the words, wherever."""
        wanted = list(words)
        return all(word in text for text in self.texts(*messages) for word in wanted)

    def _settings(self, messages: Sequence[Seen]) -> Iterator[tuple[tuple[Seen, ...], Tools]]:
        """Calls are made where there are tools: some templates have another form for those."""
        calls = any("tool_calls" in message for message in messages)
        has_lead = bool(messages) and messages[0]["role"] == "system"
        yield (), (TOOL,) if calls else ()
        yield () if has_lead else self.leads[-1], (TOOL,)


def in_order(text: str, words: Sequence[str]) -> bool:
    place = 0
    for word in words:
        place = text.find(word, place) + 1
        if not place:
            return False
    return True


def between(text: str, left: str, right: str) -> str:
    """What stands between the first occurrence of a word and the next one of the other; else nothing."""
    _, _, behind = text.partition(left)
    inside, found, _ = behind.partition(right)
    return inside if found else ""


@dataclass(frozen=True, slots=True)
class Samples:
    """Messages with calls, in the form that a template takes; there are two of each."""

    ids: CallIds = "ordinal"
    as_text: bool = False

    def call(self, number: int = 0) -> Json:
        key, value = "probekey", f"probevalue{_NUMBERS[number]}"
        made: Json = f'{{"{key}": "{value}"}}' if self.as_text else {key: value}
        function: Json = {"name": ("probetool", "probeother")[number], "arguments": made}
        return {"id": SAMPLE_IDS[self.ids][number], "type": "function", "function": function}

    def calling(self, number: int = 0, content: str = "") -> Seen:
        return {"role": "assistant", "content": content, "tool_calls": [self.call(number)]}

    def result(self, number: int = 0) -> Seen:
        call_id = SAMPLE_IDS[self.ids][number]
        return {"role": "tool", "content": f"proberesult{_NUMBERS[number]}", "tool_call_id": call_id}
