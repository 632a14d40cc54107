"""What a chat template does with conversations: found by `prompt.audit`, acted on by `prompt.adapt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.chat import Json
from start_llm.core.family import CallIds

type OldThoughts = Literal["kept", "dropped"]
type Moving = Literal["tools", "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A template option that turns thinking on and off."""

    option: str
    on: Json = True
    off: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """One template, as a synthetic conversation showed it. The defaults are a template that takes everything.

    Attributes:
        takes_system: a system message at the start is shown.
        takes_late_system: a system message is shown where it stands.
        takes_neighbours: two messages of one role may follow each other.
        takes_tools: schemas of tools are shown.
        takes_calls: calls and their results are shown.
        takes_parallel_calls: a message may hold several calls.
        keeps_text_beside_calls: text in a message with calls is shown.
        splits_text_from_calls: text in a message of its own in front of the calls is shown.
        takes_user_after_result: a user message may follow a result.
        arguments_as_text: arguments must be JSON text, not an object.
        call_ids: the form of ids that it takes.
        thought_key: member of a message that holds its thought; None if thoughts are never shown.
        old_thoughts: what becomes of thoughts before the last user message.
        preserve: an option that keeps them, if there is one.
        lead: white space in front of an answer, which the model writes itself: it is none of the answer.
        switch: how thinking is turned on and off; None if it cannot be.
        takes_effort: `reasoning_effort` changes the prompt.
        tail_options: options that change what opens the reply, and nothing in front of it.
        moving: what is shown with the last question, and so in another place in each turn.
        dates: formats of the dates that the template writes itself.
        closers: texts of added tokens that end an assistant message.
        can_be_cut: pieces cut in front of added tokens tokenise to the same ids as the whole.
    """

    takes_system: bool = True
    takes_late_system: bool = True
    takes_neighbours: bool = True
    takes_tools: bool = True
    takes_calls: bool = True
    takes_parallel_calls: bool = True
    keeps_text_beside_calls: bool = True
    splits_text_from_calls: bool = True
    takes_user_after_result: bool = True
    arguments_as_text: bool = False
    call_ids: CallIds = "ordinal"
    thought_key: str | None = None
    old_thoughts: OldThoughts = "dropped"
    preserve: Mapping[str, Json] = field(default_factory=dict[str, Json])
    lead: str = ""
    switch: Switch | None = None
    takes_effort: bool = False
    tail_options: frozenset[str] = frozenset()
    moving: frozenset[Moving] = frozenset()
    dates: tuple[str, ...] = ()
    closers: frozenset[str] = frozenset()
    can_be_cut: bool = True
