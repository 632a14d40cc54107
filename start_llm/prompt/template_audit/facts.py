"""Describes what a chat template does. `prompt.template_audit.audit` fills it in, `prompt.adapt` uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.chat import Json
from start_llm.core.family import CallIds, WriteCalls
from start_llm.prompt.stand_ins import NO_STAND_INS, StandIns

type OldReasoning = Literal["kept", "dropped"]
type Moving = Literal["tools", "system"]
type TextBesideCalls = Literal["kept", "set in", "parted", "moved"]
BUDGET_OPTION = "thinking_budget"
"""The template option for a number of tokens of reasoning."""

type HiddenByReasoning = Literal["answers", "calls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A template option that turns reasoning on and off.

    Attributes:
        on, off: its values; None: the option is left out.
        thinks: whether the model reasons if the option is left out.
    """

    option: str
    on: Json = True
    off: Json = False
    thinks: bool = True

    def options(self, *, on: bool) -> dict[str, Json]:
        return _given(self.option, self.on if on else self.off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """A template option for the reasoning effort.

    Attributes:
        words: for each effort of a request the option's value; None: the option is left out.
    """

    option: str
    words: Mapping[str, Json]

    def options(self, word: str) -> dict[str, Json]:
        return _given(self.option, self.words[word])


def _given(option: str, value: Json) -> dict[str, Json]:
    return {} if value is None else {option: value}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Behaviour of one template. The defaults describe a template that takes everything.

    Attributes:
        takes_system: a system message at the start is shown.
        takes_lone_system: a conversation may have no other message.
        takes_reply_first: a conversation may begin with a reply.
        takes_late_system: a later system message is shown in its place.
        takes_neighbours: two messages of one role may follow each other.
        takes_tools: schemas of tools are shown.
        lists_no_tools: a request without tools must have an empty list of them.
        tools_need_system: they are shown only beside a system message, which may be empty.
        takes_calls: calls and their results are shown.
        takes_parallel_calls: a message may hold several calls.
        takes_calls_without_tools: calls are shown even if no tools are offered.
        text_beside_calls: `kept`: text beside calls is shown in its place; `set in`: the rendering inserts
            it; `parted`: it becomes a message before the calls; `moved`: it moves to the first result.
        reasoning_hide: what is not shown in messages that have reasoning.
        stand_ins: placeholders for text beside calls that is set in, and for marks that a reply cannot quote
            without being cut or refused.
        refuses_empty: roles whose messages must not be empty, but may be a space.
        refuses_blank_replies: a reply without text is refused whatever placeholder it has.
        takes_bare_tools: tools need no parameters, and neither they nor their arguments a description.
        shows_schemas: all parts of tool schemas are shown (`prompt.template_audit.tool_forms`).
        results_need_names: a result must name its tool.
        losses: what is lost or refused in spite of adaptations, in words (`prompt.template_audit.losses`).
        takes_user_after_result: a user message may follow a result.
        arguments_as_text: arguments must be JSON text, not an object.
        quotes_texts: the quote around texts in calls in Python's notation, if the template escapes nothing in
            them; None for all other templates.
        call_ids: form of call ids that the template takes.
        reasoning_key: key of a message's reasoning; None if reasoning is never shown.
        old_reasoning: whether reasoning before the last user message is shown.
        preserve: an option that keeps such reasoning, if there is one.
        lead: white space before an answer that the model writes itself and that is not part of the
            answer.
        switch: the option that turns reasoning on and off; None if there is none.
        effort: the option for the reasoning effort; None if there is none.
        tells_budget: the template tells the model how many tokens of reasoning a request allows.
        generation_prompt_options: options that change only the generation prompt, in all combinations of the
            tried values.
        tried_options: values that were tried of each option that a request can set; None: it is left out.
        moving: what is shown with the last question, and so in another place in each turn.
        dates: formats of the dates that the template itself writes.
        closers: texts of added tokens that end an assistant message.
        image_text: what is written before and after the placeholder of an image; None for models that see
            none.
        images_in_results: an image in a tool result is shown in its place.
        write_calls: writes calls as text where the template shows none; None: in the form of Hermes.
        can_be_cut: pieces cut before added tokens tokenise to the same ids as the whole.
    """

    takes_system: bool = True
    takes_lone_system: bool = True
    takes_reply_first: bool = True
    takes_late_system: bool = True
    takes_neighbours: bool = True
    takes_tools: bool = True
    lists_no_tools: bool = False
    tools_need_system: bool = False
    takes_calls: bool = True
    takes_parallel_calls: bool = True
    takes_calls_without_tools: bool = True
    text_beside_calls: TextBesideCalls = "kept"
    reasoning_hide: frozenset[HiddenByReasoning] = frozenset()
    stand_ins: StandIns = NO_STAND_INS
    refuses_empty: frozenset[str] = frozenset()
    refuses_blank_replies: bool = False
    takes_bare_tools: bool = True
    shows_schemas: bool = True
    results_need_names: bool = False
    losses: tuple[str, ...] = ()
    takes_user_after_result: bool = True
    arguments_as_text: bool = False
    quotes_texts: str | None = None
    call_ids: CallIds = "ordinal"
    reasoning_key: str | None = None
    old_reasoning: OldReasoning = "dropped"
    preserve: Mapping[str, Json] = field(default_factory=dict[str, Json])
    lead: str = ""
    switch: Switch | None = None
    effort: Effort | None = None
    tells_budget: bool = False
    generation_prompt_options: frozenset[str] = frozenset()
    tried_options: Mapping[str, tuple[Json, ...]] = field(
        default_factory=dict[str, tuple[Json, ...]], compare=False
    )
    moving: frozenset[Moving] = frozenset()
    dates: tuple[str, ...] = ()
    closers: frozenset[str] = frozenset()
    image_text: tuple[str, str] | None = None
    images_in_results: bool = True
    write_calls: WriteCalls | None = field(default=None, compare=False)
    can_be_cut: bool = True

    def options_in_front(self, options: Mapping[str, Json]) -> dict[str, Json]:
        """Return the options that may change what stands in front of the generation prompt.

        These are all of them if one has a value that was not tried, or is unknown: it may act on the others.
        """
        is_known = all(self._is_tried(name, value) for name, value in options.items())
        behind = self.generation_prompt_options if is_known else frozenset[str]()
        return {name: value for name, value in options.items() if name not in behind}

    def _is_tried(self, name: str, value: Json) -> bool:
        tried = self.tried_options.get(name, ())
        is_budget = name == BUDGET_OPTION and type(value) is int and value > 0
        return (is_budget and bool(tried)) or any(
            type(other) is type(value) and other == value for other in tried
        )
