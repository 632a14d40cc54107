"""What a chat template does with conversations: found by `prompt.audit`, acted on by `prompt.adapt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.chat import Json
from start_llm.core.family import CallIds
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns

type OldThoughts = Literal["kept", "dropped"]
type Moving = Literal["tools", "system"]
type TextBesideCalls = Literal["kept", "set in", "parted", "moved"]
type SaidWithThoughts = Literal["answers", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A template option that turns thinking on and off.

    Attributes:
        on, off: its values; None: the option is left out.
        thinks: what the template does if it is told nothing.
    """

    option: str
    on: Json = True
    off: Json = False
    thinks: bool = True

    def options(self, *, on: bool) -> dict[str, Json]:
        return _given(self.option, self.on if on else self.off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """A template option that says how hard to think.

    Attributes:
        words: for each word of a request what the template is given; None: the option is left out.
    """

    option: str
    words: Mapping[str, Json]

    def options(self, word: str) -> dict[str, Json]:
        return _given(self.option, self.words[word])


def _given(option: str, value: Json) -> dict[str, Json]:
    return {} if value is None else {option: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """One template, as a synthetic conversation showed it. The defaults are a template that takes everything.

    Attributes:
        takes_system: a system message at the start is shown.
        takes_lone_system: a conversation may have no other message.
        takes_late_system: a system message is shown where it stands.
        takes_neighbours: two messages of one role may follow each other.
        takes_tools: schemas of tools are shown.
        tools_need_system: they are, beside a system message, even an empty one.
        takes_calls: calls and their results are shown.
        takes_parallel_calls: a message may hold several calls.
        takes_calls_without_tools: they are shown too where no tools are offered.
        text_beside_calls: it is shown in its place; else the rendering sets it in, or it stands in a message
            of its own in front of the calls, or in front of their results.
        thoughts_hide: what is not shown where a thought comes with it.
        stand_ins: for text beside calls that is set in, and for marks that a reply cannot quote without
            losing text, or being refused.
        refuses_empty: roles whose messages must say something, if only a space.
        refuses_blank_replies: a reply that says nothing is refused whatever stands in its place.
        takes_bare_tools: tools need neither a description nor parameters.
        schema_parts: of the schemas of tools those parts that are shown (`prompt.schemas`); None: all.
        refused_parts: of the schemas of tools those parts that the template refuses.
        losses: what is lost or refused all the same, in words (`prompt.losses`).
        takes_user_after_result: a user message may follow a result.
        arguments_as_text: arguments must be JSON text, not an object.
        call_ids: the form of ids that it takes.
        thought_key: member of a message that holds its thought; None if thoughts are never shown.
        old_thoughts: what becomes of thoughts before the last user message.
        preserve: an option that keeps them, if there is one.
        lead: white space in front of an answer, which the model writes itself: it is none of the answer.
        switch: how thinking is turned on and off; None if it cannot be.
        effort: how it is told how hard to think; None if it cannot be.
        tail_options: options that change what opens the reply, and nothing in front of it.
        moving: what is shown with the last question, and so in another place in each turn.
        dates: formats of the dates that the template writes itself.
        closers: texts of added tokens that end an assistant message.
        can_be_cut: pieces cut in front of added tokens tokenise to the same ids as the whole.
    """

    takes_system: bool = True
    takes_lone_system: bool = True
    takes_late_system: bool = True
    takes_neighbours: bool = True
    takes_tools: bool = True
    tools_need_system: bool = False
    takes_calls: bool = True
    takes_parallel_calls: bool = True
    takes_calls_without_tools: bool = True
    text_beside_calls: TextBesideCalls = "kept"
    thoughts_hide: frozenset[SaidWithThoughts] = frozenset()
    stand_ins: StandIns = NO_STAND_INS
    refuses_empty: frozenset[str] = frozenset()
    refuses_blank_replies: bool = False
    takes_bare_tools: bool = True
    schema_parts: frozenset[str] | None = None
    refused_parts: frozenset[str] = frozenset()
    losses: tuple[str, ...] = ()
    takes_user_after_result: bool = True
    arguments_as_text: bool = False
    call_ids: CallIds = "ordinal"
    thought_key: str | None = None
    old_thoughts: OldThoughts = "dropped"
    preserve: Mapping[str, Json] = field(default_factory=dict[str, Json])
    lead: str = ""
    switch: Switch | None = None
    effort: Effort | None = None
    tail_options: frozenset[str] = frozenset()
    moving: frozenset[Moving] = frozenset()
    dates: tuple[str, ...] = ()
    closers: frozenset[str] = frozenset()
    can_be_cut: bool = True
