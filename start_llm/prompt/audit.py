"""Learns what a chat template does, by rendering a synthetic conversation in many ways, once, at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from start_llm.core.chat import Json
from start_llm.core.family import Family
from start_llm.prompt.answer_probes import answer_facts
from start_llm.prompt.boundaries import Closers
from start_llm.prompt.call_probes import beside_facts, call_facts, samples_for, with_thoughts_facts
from start_llm.prompt.facts import Moving, TemplateFacts
from start_llm.prompt.losses import losses
from start_llm.prompt.probe import NEXT, REPLY, SYSTEM, TOOL, USER, Probe
from start_llm.prompt.template import Seen, TemplateTokenizer
from start_llm.prompt.thinking_probes import ThinkingProbe, options_described
from start_llm.prompt.tool_probes import tool_facts


def audit(tokenizer: TemplateTokenizer, family: Family) -> TemplateFacts:
    """What the template of this tokenizer does."""
    probe = Probe.of(tokenizer)
    facts = _role_facts(probe, call_facts(probe, family))
    thoughts = _thought_facts(probe, facts)
    beside = beside_facts(probe, with_thoughts_facts(probe, thoughts), family)
    with_tools = _with_system(probe) if facts.tools_need_system else probe
    said = tool_facts(with_tools, answer_facts(probe, beside, family))
    said = replace(said, lead=_lead(probe))
    return replace(
        said,
        losses=tuple(losses(probe, said)),
        moving=frozenset(_moving(probe, said)),
        dates=tuple(dict.fromkeys(probe.dates)),
        closers=_closers(probe),
        can_be_cut=_can_be_cut(probe),
    )


_OTHER: Seen = {"role": "assistant", "content": "probeother"}


def _role_facts(probe: Probe, facts: TemplateFacts) -> TemplateFacts:
    needs_system = not _takes_tools(probe, facts) and _takes_tools(_with_system(probe), facts)
    facts = replace(
        facts,
        takes_tools=needs_system or _takes_tools(probe, facts),
        tools_need_system=needs_system,
        takes_system=_takes_system(probe, facts),
    )
    return replace(
        facts,
        takes_lone_system=not facts.takes_system or _takes_lone_system(probe, facts),
        takes_late_system=_takes_late_system(probe),
        takes_neighbours=probe.shows(("probefirst", "probesecond"), USER, NEXT)
        and probe.shows(("probereply", "probeother", "probesecond"), USER, REPLY, _OTHER, NEXT),
    )


def _talks(facts: TemplateFacts) -> tuple[tuple[Seen, ...], ...]:
    """Conversations at their beginning, in a loop of calls, and further on."""
    samples = samples_for(facts)
    loop = ((USER, samples.calling(), samples.result()),) if facts.takes_calls else ()
    return ((USER,), (USER, REPLY, NEXT), *loop)


def _takes_system(probe: Probe, facts: TemplateFacts) -> bool:
    """In front of the first question, and not only as long as the last message is one."""
    return probe.shows(("probesystem", "probefirst"), SYSTEM, USER) and all(
        probe.has(("probesystem",), SYSTEM, *talk) for talk in _talks(facts)
    )


def _takes_late_system(probe: Probe) -> bool:
    """Without the tools once more."""
    talk = (USER, REPLY, SYSTEM, NEXT)
    return probe.shows(("probefirst", "probereply", "probesystem", "probesecond"), *talk) and all(
        text.count("probedescription") <= 1 for text in probe.texts(*talk)
    )


def _with_system(probe: Probe) -> Probe:
    """One whose conversations always begin with a system message."""
    return replace(probe, leads=(({"role": "system", "content": ""},), (SYSTEM,)))


def _takes_lone_system(probe: Probe, facts: TemplateFacts) -> bool:
    """With the tools, if those are shown elsewhere."""
    texts = [probe.text(SYSTEM, tools=tools, with_tail=True) for tools in ((), (TOOL,))]
    return all("probesystem" in text for text in texts) and ("probetool" in texts[1] or not facts.takes_tools)


def _takes_tools(probe: Probe, facts: TemplateFacts) -> bool:
    """A template that keeps descriptions back shows tools in the model's own way all the same."""
    texts = (
        probe.text(*lead, *talk, tools=(TOOL,), with_tail=True)
        for talk in _talks(facts)
        for lead in probe.leads
    )
    return all(word in text for text in texts for word in ("probetool", "probekey"))


# -------------------------------------------------------------------------------------------------- thoughts


def _thought_facts(probe: Probe, facts: TemplateFacts) -> TemplateFacts:
    samples = samples_for(facts)
    return ThinkingProbe(probe, samples.calling(), samples.result(), TOOL).facts(facts)


# ------------------------------------------------------------------------------------------------- boundaries


def _moving(probe: Probe, facts: TemplateFacts) -> Iterator[Moving]:
    """What does not stay in front of the first question when the conversation goes on, if it is shown."""

    def front(*messages: Seen, tools: Sequence[Mapping[str, Json]]) -> str:
        return probe.text(*messages, tools=tools).partition("probefirst")[0]

    parts: tuple[tuple[Moving, bool, tuple[Seen, ...], Sequence[Mapping[str, Json]]], ...] = (
        ("tools", facts.takes_tools, (), (TOOL,)),
        ("system", facts.takes_system, (SYSTEM,), ()),
    )
    for name, is_shown, lead, tools in parts:
        if is_shown and front(*lead, USER, tools=tools) != front(*lead, USER, REPLY, NEXT, tools=tools):
            yield name


def _lead(probe: Probe) -> str:
    """White space between the prompt for a reply and that reply in the history."""
    prompt, history = probe.text(USER, with_tail=True), probe.text(USER, REPLY)
    lead = history[len(prompt) : history.find("probereply")]
    return lead if history.startswith(prompt) and lead.isspace() else ""


def _closers(probe: Probe) -> frozenset[str]:
    """What ends a reply; and where the history has none of that behind one, what it has there."""
    text = probe.text(USER, REPLY, NEXT) or probe.text(USER, REPLY)
    added = Closers.of(probe.tokenizer.added_tokens, frozenset()).added
    behind = added.findall(text.partition("probereply")[2].partition("probesecond")[0])
    ends = probe.tokenizer.end_texts & frozenset(probe.tokenizer.added_tokens)
    return ends if ends.intersection(behind) else ends.union(behind[:1])


def _can_be_cut(probe: Probe) -> bool:
    """Whether pieces tokenise to what the whole does, for texts with all sorts of things next to the cuts."""
    added = Closers.of(probe.tokenizer.added_tokens, frozenset()).added
    awkward: list[Seen] = [
        {"role": "user", "content": content} for content in ("  Über \n\n", "日本 ", "a\t", " .", "\n", "1 ")
    ]
    texts = [probe.text(*awkward), *(probe.text(one, REPLY, one) for one in awkward)]
    return all(_pieces(probe, text, [match.start() for match in added.finditer(text)]) for text in texts)


def _pieces(probe: Probe, text: str, cuts: Sequence[int]) -> bool:
    encode: Callable[[str], list[int]] = lambda piece: probe.tokenizer.encode(piece, as_document=False)  # noqa: E731
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token for piece in pieces for token in encode(piece)] == encode(text)


def described(facts: TemplateFacts) -> str:
    """The facts that a user may want to know, in words."""
    thoughts = "shows no thoughts"
    if facts.thought_key:
        thoughts = f"old thoughts {facts.old_thoughts}"
        thoughts += f" unless {next(iter(facts.preserve))}" if facts.preserve else ""
    parts = [
        thoughts,
        "tools" if facts.takes_tools else "no tools",
        *options_described(facts),
        f"writes dates ({', '.join(facts.dates)})" if facts.dates else "writes no dates",
        *([] if facts.can_be_cut else ["cannot be cut"]),
        *([f"loses or refuses {', '.join(facts.losses)}"] if facts.losses else []),
    ]
    return ", ".join(parts)
