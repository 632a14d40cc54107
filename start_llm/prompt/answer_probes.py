"""Learns which messages a chat template cuts short or refuses: those that quote marks or say nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from start_llm.core.family import Family
from start_llm.prompt.boundaries import Closers
from start_llm.prompt.call_probes import samples_for
from start_llm.prompt.facts import TemplateFacts
from start_llm.prompt.probe import NEXT, REPLY, TOOL, USER, Probe
from start_llm.prompt.template import Seen


def answer_facts(probe: Probe, facts: TemplateFacts, family: Family) -> TemplateFacts:
    """What replies cannot quote, and which messages have to say something."""
    quoted = _unquotable(probe, facts, family)
    inline = family.thought if quoted and _reads_inline(probe, family) else None
    return replace(
        facts,
        stand_ins=replace(facts.stand_ins, quoted=quoted, inline=inline),
        refuses_empty=frozenset(_refused_roles(probe, facts)),
        refuses_blank_replies=not any(_takes(probe, REPLY, blank, facts) for blank in ("", " ")),
    )


# -------------------------------------------------------------------------------------------- quoted marks


def _unquotable(probe: Probe, facts: TemplateFacts, family: Family) -> tuple[str, ...]:
    """All marks of the model, if it cannot quote them all."""
    marks = tuple(_marks(probe, facts, family))
    quote = " ".join(("probequote", *(f"{mark} probemark{number}" for number, mark in enumerate(marks))))
    return () if all(_quotes(probe, facts, quote)) else marks


def _marks(probe: Probe, facts: TemplateFacts, family: Family) -> list[str]:
    """Those of thoughts, and the added tokens that the template writes."""
    samples, key = samples_for(facts), facts.thought_key
    thought: Seen = {key: "probethought"} if key else {}
    added = Closers.of(probe.tokenizer.added_tokens, frozenset()).added
    talks = ((USER, REPLY | thought, NEXT), (USER, samples.calling() | thought, samples.result()))
    shown = [
        mark for talk in talks for mark in added.findall(probe.text(*talk, tools=(TOOL,), with_tail=True))
    ]
    thoughts = (family.thought.opening, family.thought.closing) if family.thought else ()
    return [mark for mark in dict.fromkeys((*thoughts, *shown)) if not mark.isspace()]


def _quotes(probe: Probe, facts: TemplateFacts, quote: str) -> Iterator[bool]:
    """For each place where a reply may quote: whether the quote is shown, or at least not refused."""
    samples, key = samples_for(facts), facts.thought_key
    answer: Seen = REPLY | {"content": quote}
    yield probe.has((quote,), USER, answer, NEXT)
    yield probe.has((quote,), USER, answer)
    if key and "answers" not in facts.thoughts_hide:
        yield probe.has((quote,), USER, answer | {key: "probethought"}, NEXT)
    if facts.takes_calls and facts.text_beside_calls == "kept":
        yield probe.has((quote,), USER, samples.calling(content=quote), samples.result())
    if facts.takes_calls and key and "calls" not in facts.thoughts_hide:
        yield probe.has(("proberesult",), USER, samples.calling() | {key: quote}, samples.result())


def _reads_inline(probe: Probe, family: Family) -> bool:
    """A reply whose text begins with a thought is shown, with or without that."""
    if family.thought is None:
        return False
    told = f"{family.thought.opening}\nprobethought\n{family.thought.closing}\n\nprobereply"
    return probe.has(("probereply",), USER, REPLY | {"content": told}, NEXT)


# ------------------------------------------------------------------------------------------ empty messages


def _refused_roles(probe: Probe, facts: TemplateFacts) -> Iterator[str]:
    """Roles whose messages may be a space, but not nothing."""
    for message in (REPLY, USER, samples_for(facts).result()):
        if message["role"] == "tool" and not facts.takes_calls:
            continue
        if _takes(probe, message, " ", facts) and not _takes(probe, message, "", facts):
            yield str(message["role"])


def _takes(probe: Probe, message: Seen, content: str, facts: TemplateFacts) -> bool:
    """Whether what stands around such a message is shown."""
    blank = message | {"content": content}
    match message["role"]:
        case "assistant":
            return probe.has(("probefirst", "probesecond"), USER, blank, NEXT)
        case "user":
            return probe.has(("probereply", "probesecond"), blank, REPLY, NEXT)
        case _:
            return probe.has(("probevalue",), USER, samples_for(facts).calling(), blank)
