"""Renders synthetic conversations in the settings in which agents send theirs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import CallIds
from start_llm.core.markers import any_of
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns
from start_llm.prompt.template import Rendering, TemplateMessage, TemplateTokenizer

type Tools = Sequence[Mapping[str, Json]]

SAMPLE_IDS: Mapping[CallIds, tuple[str, str]] = {
    "ordinal": ("call0", "call1"),
    "nine": ("000000000", "000000001"),
    "kimi": ("functions.probetool:0", "functions.probeother:1"),
}


def tool(name: str, properties: Mapping[str, Json], description: str = "probedescription") -> dict[str, Json]:
    """Return a tool definition in which every parameter is required."""
    parameters: Json = {"type": "object", "properties": dict(properties), "required": list[Json](properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOL: Mapping[str, Json] = tool("probetool", {"probekey": {"type": "string", "description": "probewhat"}})
_NUMBERS = ("one", "two")
_NAMES = ("probetool", "probeother")
SYSTEM: TemplateMessage = {"role": "system", "content": "probesystem"}
USER: TemplateMessage = {"role": "user", "content": "probefirst"}
REPLY: TemplateMessage = {"role": "assistant", "content": "probereply"}
NEXT: TemplateMessage = {"role": "user", "content": "probesecond"}


@dataclass(frozen=True, slots=True)
class TemplateProbe:
    """Renders for one template and collects the date formats that it asks for.

    Attributes:
        leads: the alternatives for the messages before a conversation.
        lists_no_tools: the template takes an empty list of tools, but not None.
    """

    tokenizer: TemplateTokenizer
    dates: list[str] = field(default_factory=list[str])
    stand_ins: StandIns = NO_STAND_INS
    leads: tuple[tuple[TemplateMessage, ...], ...] = ((),)
    lists_no_tools: bool = False

    @classmethod
    def of(cls, tokenizer: TemplateTokenizer) -> TemplateProbe:
        """Return a probe that also tries a leading system message, if the template takes one."""
        probe = cls(tokenizer)
        if not probe.text(USER):
            listing = replace(probe, lists_no_tools=True)
            probe = listing if listing.text(USER) else probe
        taken = all(probe.text(SYSTEM, USER, tools=tools) for tools in ((), (TOOL,)))
        return replace(probe, leads=((), (SYSTEM,))) if taken else probe

    @property
    def added(self) -> re.Pattern[str]:
        """Matches the added tokens."""
        return any_of(tuple(self.tokenizer.added_tokens))

    def text(
        self,
        *messages: TemplateMessage,
        tools: Tools = (),
        options: Mapping[str, Json] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the rendering; empty if the template refuses."""

        def note(form: str) -> str:
            self.dates.append(form)
            return form

        rendering = Rendering(
            self.tokenizer, tools, options or {}, note, self.stand_ins, lists_no_tools=self.lists_no_tools
        )
        try:
            return rendering.text(messages, add_generation_prompt=add_generation_prompt)
        except InvalidRequest:
            return ""

    def texts(self, *messages: TemplateMessage) -> list[str]:
        """Return the prompts with these messages: plain, and with tools and a system message."""
        return [
            self.text(*lead, *messages, tools=tools, add_generation_prompt=True)
            for lead, tools in self._settings(messages)
        ]

    def shows(self, words: Sequence[str], *messages: TemplateMessage) -> bool:
        """Return whether every prompt contains all the words in this order."""
        return all(in_order(text, words) for text in self.texts(*messages))

    def has(self, words: Iterable[str], *messages: TemplateMessage) -> bool:
        """Return whether every prompt contains all the words in any order."""
        wanted = list(words)
        return all(word in text for text in self.texts(*messages) for word in wanted)

    def _settings(
        self, messages: Sequence[TemplateMessage]
    ) -> Iterator[tuple[tuple[TemplateMessage, ...], Tools]]:
        """Yield leads and tools.

        Conversations with calls always have tools: without tools some templates show calls in another form.
        """
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
    """Return the text between the first `left` and the next `right`; empty if one is missing."""
    _, _, after = text.partition(left)
    inside, separator, _ = after.partition(right)
    return inside if separator else ""


@dataclass(frozen=True, slots=True)
class Samples:
    """Messages with calls in the form that a template takes, two of each kind."""

    ids: CallIds = "ordinal"
    as_text: bool = False
    named: bool = False

    def call(self, number: int = 0, value: str | None = None) -> Json:
        arguments: Json = {"probekey": value or f"probevalue{_NUMBERS[number]}"}
        made: Json = json.dumps(arguments) if self.as_text else arguments
        function: Json = {"name": _NAMES[number], "arguments": made}
        return {"id": SAMPLE_IDS[self.ids][number], "type": "function", "function": function}

    def calling(self, number: int = 0, content: str = "") -> TemplateMessage:
        return {"role": "assistant", "content": content, "tool_calls": [self.call(number)]}

    def result(self, number: int = 0) -> TemplateMessage:
        call_id = SAMPLE_IDS[self.ids][number]
        name: TemplateMessage = {"name": _NAMES[number]} if self.named else {}
        content = f"proberesult{_NUMBERS[number]}"
        return {"role": "tool", "content": content, "tool_call_id": call_id} | name
