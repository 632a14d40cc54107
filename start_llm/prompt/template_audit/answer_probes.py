"""Finds out which messages a chat template cuts or refuses: replies that quote marks, and empty messages."""

from collections.abc import Iterator
from dataclasses import replace

from start_llm.core.family import Family
from start_llm.prompt.template import TemplateMessage
from start_llm.prompt.template_audit.call_probes import samples_for
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.probe import NEXT, REPLY, TOOL, USER, TemplateProbe


def answer_facts(probe: TemplateProbe, facts: TemplateFacts, family: Family) -> TemplateFacts:
    """Add which marks a reply cannot quote, and which messages must not be empty."""
    quoted = _unquotable(probe, facts, family)
    inline = family.reasoning if quoted and _reads_inline(probe, family) else None
    return replace(
        facts,
        stand_ins=replace(facts.stand_ins, quoted=quoted, inline=inline),
        refuses_empty=frozenset(_refused_roles(probe, facts)),
        refuses_blank_replies=not any(_takes(probe, REPLY, blank, facts) for blank in ("", " ")),
    )


# -------------------------------------------------------------------------------------------- quoted marks


def _unquotable(probe: TemplateProbe, facts: TemplateFacts, family: Family) -> tuple[str, ...]:
    """Return all marks of the model if a reply cannot quote every one of them, else none."""
    marks = tuple(_marks(probe, facts, family))
    quote = " ".join(("probequote", *(f"{mark} probemark{number}" for number, mark in enumerate(marks))))
    return () if all(_quotes(probe, facts, quote)) else marks


def _marks(probe: TemplateProbe, facts: TemplateFacts, family: Family) -> list[str]:
    """Return the marks of reasoning and the added tokens that the template writes."""
    samples, key = samples_for(facts), facts.reasoning_key
    reasoning: TemplateMessage = {key: "probethought"} if key else {}
    talks = ((USER, REPLY | reasoning, NEXT), (USER, samples.calling() | reasoning, samples.result()))
    shown = [
        mark
        for talk in talks
        for mark in probe.added.findall(probe.text(*talk, tools=(TOOL,), add_generation_prompt=True))
    ]
    reasoning_texts = (family.reasoning.opening, family.reasoning.closing) if family.reasoning else ()
    return [mark for mark in dict.fromkeys((*reasoning_texts, *shown)) if not mark.isspace()]


def _quotes(probe: TemplateProbe, facts: TemplateFacts, quote: str) -> Iterator[bool]:
    """Yield for each place where a reply may quote a mark whether the template shows the quote.

    For reasoning beside a call only the result has to be shown: the template may hide the reasoning but not
    refuse it.
    """
    samples, key = samples_for(facts), facts.reasoning_key
    answer: TemplateMessage = REPLY | {"content": quote}
    yield probe.has((quote,), USER, answer, NEXT)
    yield probe.has((quote,), USER, answer)
    if key and "answers" not in facts.reasoning_hide:
        yield probe.has((quote,), USER, answer | {key: "probethought"}, NEXT)
    if facts.takes_calls and facts.text_beside_calls == "kept":
        yield probe.has((quote,), USER, samples.calling(content=quote), samples.result())
    if facts.takes_calls and key and "calls" not in facts.reasoning_hide:
        yield probe.has(("proberesult",), USER, samples.calling() | {key: quote}, samples.result())


def _reads_inline(probe: TemplateProbe, family: Family) -> bool:
    """Return whether a reply whose text begins with reasoning is shown, with or without that."""
    if family.reasoning is None:
        return False
    text = f"{family.reasoning.opening}\nprobethought\n{family.reasoning.closing}\n\nprobereply"
    return probe.has(("probereply",), USER, REPLY | {"content": text}, NEXT)


# ------------------------------------------------------------------------------------------ empty messages


def _refused_roles(probe: TemplateProbe, facts: TemplateFacts) -> Iterator[str]:
    """Yield the roles whose messages may be a space but not empty."""
    for message in (REPLY, USER, samples_for(facts).result()):
        if message["role"] == "tool" and not facts.takes_calls:
            continue
        if _takes(probe, message, " ", facts) and not _takes(probe, message, "", facts):
            yield str(message["role"])


def _takes(probe: TemplateProbe, message: TemplateMessage, content: str, facts: TemplateFacts) -> bool:
    """Return whether the template shows the texts around a message with this content."""
    blank = message | {"content": content}
    match message["role"]:
        case "assistant":
            return probe.has(("probefirst", "probesecond"), USER, blank, NEXT)
        case "user":
            return probe.has(("probereply", "probesecond"), blank, REPLY, NEXT)
        case _:
            return probe.has(("probevalue",), USER, samples_for(facts).calling(), blank)
