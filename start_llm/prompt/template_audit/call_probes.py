"""Finds out how a chat template shows tools and calls, and the text and reasoning beside them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from start_llm.core.chat import Json
from start_llm.core.common_beginning import common_length
from start_llm.core.family import CallIds, Family
from start_llm.prompt.stand_ins import StandIns
from start_llm.prompt.template import TemplateMessage
from start_llm.prompt.template_audit.facts import HiddenByReasoning, TemplateFacts, TextBesideCalls
from start_llm.prompt.template_audit.probe import (
    NEXT,
    REPLY,
    TOOL,
    USER,
    Samples,
    TemplateProbe,
    between,
    in_order,
    tool,
)
from start_llm.prompt.template_audit.tool_forms import ToolForms, is_changed

_CALL_IDS: tuple[CallIds, ...] = ("ordinal", "nine", "kimi")
_REASONING = ("probethoughtone", "probethoughttwo")
_TEXTS = ("probetextone", "probetexttwo")
_BOTH_QUOTES = "probe'single\"double"


def call_facts(probe: TemplateProbe, family: Family) -> TemplateFacts:
    """Return facts for the first form of ids and arguments in which calls and results are shown."""
    forms = product((False, True), (False, True), dict.fromkeys((family.call_ids, *_CALL_IDS)))
    for named, as_text, ids in forms:
        samples = Samples(ids, as_text, named)
        if _shows_call(probe, samples):
            return _of_calls(probe, samples)
    return TemplateFacts(takes_calls=False, call_ids=family.call_ids)


def samples_for(facts: TemplateFacts) -> Samples:
    return Samples(facts.call_ids, facts.arguments_as_text, facts.results_need_names)


def _shows_call(probe: TemplateProbe, samples: Samples) -> bool:
    talk = (USER, samples.calling(), samples.result())
    # A template that prints an object as Python does expects text. Schemas before the question have the key.
    shown = [text.partition("probefirst")[2] for text in probe.texts(*talk)]
    return all(
        "'probekey'" not in text
        and all(word in text for word in ("probekey", "probevalueone", "proberesultone"))
        for text in shown
    )


def _of_calls(probe: TemplateProbe, samples: Samples) -> TemplateFacts:
    calling, first, second = samples.calling(), samples.result(0), samples.result(1)
    both: TemplateMessage = {**calling, "tool_calls": [samples.call(0), samples.call(1)]}
    words = ("probefirst", "probetool", "probeother", "proberesultone", "proberesulttwo")
    alone = probe.text(USER, calling, first, add_generation_prompt=True)
    return TemplateFacts(
        arguments_as_text=samples.as_text,
        call_ids=samples.ids,
        results_need_names=samples.named,
        quotes_texts=_quote_around_texts(probe, samples),
        takes_calls_without_tools=all(word in alone for word in ("probevalueone", "proberesultone")),
        takes_parallel_calls=probe.shows(words, USER, both, first, second),
        takes_user_after_result=probe.shows(("proberesultone", "probesecond"), USER, calling, first, NEXT),
    )


def _quote_around_texts(probe: TemplateProbe, samples: Samples) -> str | None:
    """Return the quote around a text that contains both quotes, if the rendering escapes neither."""
    call = samples.call(value=_BOTH_QUOTES)
    text = probe.text(USER, {**samples.calling(), "tool_calls": [call]}, samples.result(), tools=(TOOL,))
    return next((quote for quote in "'\"" if f"probekey={quote}{_BOTH_QUOTES}{quote}" in text), None)


# --------------------------------------------------------------------------------- reasoning beside the rest


def with_reasoning_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    """Add what the template hides in messages that have reasoning."""
    return replace(facts, reasoning_hide=frozenset(_hidden_by_reasoning(probe, facts)))


def _hidden_by_reasoning(probe: TemplateProbe, facts: TemplateFacts) -> Iterator[HiddenByReasoning]:
    key, samples = facts.reasoning_key, samples_for(facts)
    if key is None:
        return
    reply, calling = ({**message, key: _REASONING[0]} for message in (REPLY, samples.calling()))
    if not probe.has(("probereply", "probesecond"), USER, reply, NEXT) or _takes_answer_for_reasoning(
        probe, reply, facts
    ):
        yield "answers"
    if facts.takes_calls and not probe.has(("probevalueone",), USER, calling, samples.result()):
        yield "calls"


def _takes_answer_for_reasoning(probe: TemplateProbe, reply: TemplateMessage, facts: TemplateFacts) -> bool:
    """Return whether reasoning beside an answer is not shown, but changes how the answer is."""
    beside, alone = (probe.texts(USER, message, NEXT) for message in (reply, REPLY))
    return not facts.preserve and beside != alone and not any(_REASONING[0] in text for text in beside)


# ------------------------------------------------------------------------------------- text beside calls


@dataclass(frozen=True, slots=True)
class _Beside:
    """One way to show the text of a reply that has calls.

    Attributes:
        parted: the text becomes a message of its own.
        needs_marker: a token must stand between the text and the calls.
    """

    probe: TemplateProbe
    samples: Samples
    reasoning_key: str | None
    parted: bool = False
    needs_marker: bool = False

    def shows_all(self) -> bool:
        """Return whether texts, calls and results are shown in order.

        All reasoning that is shown without the texts must be shown with them too.
        """
        return (not self.needs_marker or self._has_marker()) and all(
            self._shows(count, ending, reasoning_texts=reasoning_texts)
            for count in (1, 2)
            for ending in ((), (REPLY, NEXT))
            for reasoning_texts in ((False, True) if self.reasoning_key else (False,))
        )

    def _shows(self, count: int, ending: Sequence[TemplateMessage], *, reasoning_texts: bool) -> bool:
        with_texts, without = (
            self.probe.texts(USER, *self._steps(count, texts=texts, reasoning_texts=reasoning_texts), *ending)
            for texts in (True, False)
        )
        return all(
            in_order(shown, self._words(count, ending))
            and all(reasoning in shown for reasoning in _REASONING if reasoning in other)
            for shown, other in zip(with_texts, without, strict=True)
        )

    def _has_marker(self) -> bool:
        text = self.probe.text(
            USER, self.samples.calling(content=_TEXTS[0]), self.samples.result(), tools=(TOOL,)
        )
        inside = between(text, _TEXTS[0], "probetool")
        return any(token in inside for token in self.probe.tokenizer.added_tokens)

    @staticmethod
    def _words(count: int, ending: Sequence[TemplateMessage]) -> list[str]:
        steps = [("probetext", "probevalue", "proberesult")] * count
        words = [word + number for step, number in zip(steps, ("one", "two"), strict=False) for word in step]
        return ["probefirst", *words, *(str(message["content"]) for message in ending)]

    def _steps(self, count: int, *, texts: bool, reasoning_texts: bool) -> Iterator[TemplateMessage]:
        for number in range(count):
            reasoning: TemplateMessage = (
                {self.reasoning_key: _REASONING[number]} if reasoning_texts and self.reasoning_key else {}
            )
            text = _TEXTS[number] if texts else ""
            if self.parted and texts:
                yield {"role": "assistant", "content": text} | reasoning
                yield self.samples.calling(number)
            else:
                yield self.samples.calling(number, text) | reasoning
            yield self.samples.result(number)


def beside_facts(probe: TemplateProbe, facts: TemplateFacts, family: Family) -> TemplateFacts:
    """Add how to show the text of a reply that has calls without losing anything else."""
    if not facts.takes_calls:
        return facts
    samples = samples_for(facts)
    key = None if "calls" in facts.reasoning_hide else facts.reasoning_key
    stand_ins = StandIns(call_head=_call_head(probe, samples), around_text=family.around_text)
    set_in = replace(probe, stand_ins=stand_ins)
    ways: tuple[tuple[TextBesideCalls, _Beside], ...] = (
        ("kept", _Beside(probe, samples, key, needs_marker=family.calls_begin_answers)),
        ("set in", _Beside(set_in, samples, key)),
        ("parted", _Beside(probe, samples, key, parted=True)),
    )
    way = next((name for name, beside in ways if _fits(name, beside)), "moved")
    return replace(facts, text_beside_calls=way, stand_ins=stand_ins if way == "set in" else facts.stand_ins)


def _fits(name: TextBesideCalls, beside: _Beside) -> bool:
    match name:
        case "set in":
            return _is_marked(beside.probe) and beside.shows_all()
        case "parted":
            return beside.shows_all() and _stays_in_its_turn(beside.probe, beside.samples)
        case _:
            return beside.shows_all()


def _is_marked(probe: TemplateProbe) -> bool:
    """Return whether a token marks the beginning of calls: without one they look like text."""
    text = "".join((probe.stand_ins.call_head or "", *probe.stand_ins.around_text))
    return any(token in text for token in probe.tokenizer.added_tokens)


def _call_head(probe: TemplateProbe, samples: Samples) -> str:
    """Return the text that stands before a call's name, but not before an answer."""
    answer = between(probe.text(USER, REPLY, NEXT, tools=(TOOL,)), "probefirst", "probereply")
    calls = between(
        probe.text(USER, samples.calling(), samples.result(), tools=(TOOL,)), "probefirst", "probetool"
    )
    return calls[common_length(answer, calls) :]


def _stays_in_its_turn(probe: TemplateProbe, samples: Samples) -> bool:
    """Return whether a call after a text begins with the same marks as a second text would."""
    text: TemplateMessage = {"role": "assistant", "content": "probetext"}
    second = between(probe.text(USER, text, REPLY, NEXT, tools=(TOOL,)), "probetext", "probereply")
    calls = between(
        probe.text(USER, text, samples.calling(), samples.result(), tools=(TOOL,)), "probetext", "probetool"
    )
    usual, marks = probe.added.findall(second)[:2], probe.added.findall(calls)
    return marks[: len(usual)] == usual


ARGUMENTS: Mapping[str, Json] = {
    "probeplain": {"type": "string"},
    "probetold": {"type": "string", "description": "probeabout", "default": "probedefault"},
    "probechoice": {"type": "string", "enum": ["probechoiceone", "probechoicetwo"]},
    "probelist": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "probefield": {"type": "string", "description": "probewhatfield", "enum": ["probestate"]}
            },
        },
    },
    "probeeither": {"anyOf": [{"type": "string", "const": "probeconst"}, {"type": "null"}]},
}
BARE_TOOL: Mapping[str, Json] = {"type": "function", "function": {"name": "probebare"}}
_HALF_BARE: tuple[Mapping[str, Json], ...] = (
    {"description": "probeabout"},
    {"parameters": {"type": "object", "properties": {"probekey": {"type": "string"}}}},
    {"description": "probeabout", "parameters": {}},
)
_TOOLS: tuple[Mapping[str, Json], ...] = (
    BARE_TOOL,
    *({"type": "function", "function": {"name": "probebare", **more}} for more in _HALF_BARE),
    *(tool("probetool", {name: schema}) for name, schema in ARGUMENTS.items()),
)


def tool_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    """Add what must be done for tools, if the template shows tools."""
    forms = ToolForms(probe.tokenizer, facts).shown(_TOOLS)
    changes = [is_changed(*pair) for pair in zip(_TOOLS, forms, strict=True)]
    return replace(
        facts,
        takes_bare_tools=not any(is_filled for is_filled, _ in changes),
        shows_schemas=not any(tells for _, tells in changes),
    )
