"""Finds out, once at load, what a chat template does, by rendering a synthetic conversation in many ways."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from start_llm.core.chat import Json
from start_llm.core.family import Family
from start_llm.prompt.template import TemplateMessage, TemplateTokenizer
from start_llm.prompt.template_audit.answer_probes import answer_facts
from start_llm.prompt.template_audit.call_probes import (
    beside_facts,
    call_facts,
    samples_for,
    tool_facts,
    with_reasoning_facts,
)
from start_llm.prompt.template_audit.facts import Moving, TemplateFacts
from start_llm.prompt.template_audit.image_probes import image_facts
from start_llm.prompt.template_audit.losses import losses
from start_llm.prompt.template_audit.option_probes import OptionProbes
from start_llm.prompt.template_audit.probe import NEXT, REPLY, SYSTEM, TOOL, USER, TemplateProbe
from start_llm.prompt.template_audit.reasoning_probes import ReasoningFacts, options_described


def audit(tokenizer: TemplateTokenizer, family: Family, placeholder: str | None = None) -> TemplateFacts:
    """Return what the chat template of this tokenizer does.

    Args:
        placeholder: what it writes for an image; None for a model that sees none.
    """
    probe = TemplateProbe.of(tokenizer)
    facts = _role_facts(probe, call_facts(probe, family))
    reasoning_texts = _reasoning_facts(probe, facts)
    beside = beside_facts(probe, with_reasoning_facts(probe, reasoning_texts), family)
    with_tools = _with_system(probe) if facts.tools_need_system else probe
    facts = tool_facts(with_tools, answer_facts(probe, beside, family))
    facts = replace(facts, lead=_lead(probe))
    if placeholder is not None:
        facts = image_facts(probe, facts, placeholder)
    return replace(
        facts,
        losses=tuple(losses(probe, facts)),
        moving=frozenset(_moving(probe, facts)),
        dates=tuple(dict.fromkeys(probe.dates)),
        closers=_closers(probe),
        write_calls=family.write_calls,
        can_be_cut=_can_be_cut(probe),
    )


_OTHER: TemplateMessage = {"role": "assistant", "content": "probeother"}


def _role_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    needs_system = not _takes_tools(probe, facts) and _takes_tools(_with_system(probe), facts)
    facts = replace(
        facts,
        takes_tools=needs_system or _takes_tools(probe, facts),
        tools_need_system=needs_system,
        lists_no_tools=probe.lists_no_tools,
        takes_system=_takes_system(probe, facts),
    )
    return replace(
        facts,
        takes_lone_system=not facts.takes_system or _takes_lone_system(probe, facts),
        takes_reply_first=_takes_reply_first(probe, facts),
        takes_late_system=_takes_late_system(probe),
        takes_neighbours=probe.shows(("probefirst", "probesecond"), USER, NEXT)
        and probe.shows(("probereply", "probeother", "probesecond"), USER, REPLY, _OTHER, NEXT),
    )


def _talks(facts: TemplateFacts) -> tuple[tuple[TemplateMessage, ...], ...]:
    """Return conversations with one question, with two questions, and with a call and its result."""
    samples = samples_for(facts)
    loop = ((USER, samples.calling(), samples.result()),) if facts.takes_calls else ()
    return ((USER,), (USER, REPLY, NEXT), *loop)


def _takes_system(probe: TemplateProbe, facts: TemplateFacts) -> bool:
    """Return whether a leading system message is shown, also when the conversation goes on."""
    return probe.shows(("probesystem", "probefirst"), SYSTEM, USER) and all(
        probe.has(("probesystem",), SYSTEM, *talk) for talk in _talks(facts)
    )


def _takes_late_system(probe: TemplateProbe) -> bool:
    """Return whether the template shows a late system message in its place, and the tools only once."""
    talk = (USER, REPLY, SYSTEM, NEXT)
    return probe.shows(("probefirst", "probereply", "probesystem", "probesecond"), *talk) and all(
        text.count("probedescription") <= 1 for text in probe.texts(*talk)
    )


def _with_system(probe: TemplateProbe) -> TemplateProbe:
    """Return a probe whose conversations always begin with a system message, empty or not."""
    return replace(probe, leads=(({"role": "system", "content": ""},), (SYSTEM,)))


def _takes_lone_system(probe: TemplateProbe, facts: TemplateFacts) -> bool:
    """Return whether a conversation may be a system message alone, with and without tools."""
    texts = [probe.text(SYSTEM, tools=tools, add_generation_prompt=True) for tools in ((), (TOOL,))]
    return all("probesystem" in text for text in texts) and ("probetool" in texts[1] or not facts.takes_tools)


def _takes_reply_first(probe: TemplateProbe, facts: TemplateFacts) -> bool:
    """Return whether a conversation may begin with a reply, behind a system message that is shown too."""
    leads = probe.leads if facts.takes_system else ((),)
    texts = (
        probe.text(*lead, REPLY, *more, add_generation_prompt=True)
        for lead in leads
        for more in ((), (NEXT,))
    )
    return all("probereply" in text for text in texts)


def _takes_tools(probe: TemplateProbe, facts: TemplateFacts) -> bool:
    """Return whether names and parameters of tools are shown.

    Descriptions may be missing: a template that leaves them out still shows tools in the form that the model
    knows.
    """
    texts = (
        probe.text(*lead, *talk, tools=(TOOL,), add_generation_prompt=True)
        for talk in _talks(facts)
        for lead in probe.leads
    )
    return all(word in text for text in texts for word in ("probetool", "probekey"))


# -------------------------------------------------------------------------------------------------- reasoning


def _reasoning_facts(probe: TemplateProbe, facts: TemplateFacts) -> TemplateFacts:
    samples = samples_for(facts)
    reasoning = ReasoningFacts(probe, samples.calling(), samples.result())
    facts = reasoning.facts(facts)
    return OptionProbes(probe, reasoning.talks(facts)).facts(facts)


# ------------------------------------------------------------------------------------------------- boundaries


def _moving(probe: TemplateProbe, facts: TemplateFacts) -> Iterator[Moving]:
    """Yield what does not stay before the first question when the conversation goes on."""

    def front(*messages: TemplateMessage, tools: Sequence[Mapping[str, Json]]) -> str:
        return probe.text(*messages, tools=tools).partition("probefirst")[0]

    parts: tuple[tuple[Moving, bool, tuple[TemplateMessage, ...], Sequence[Mapping[str, Json]]], ...] = (
        ("tools", facts.takes_tools, (), (TOOL,)),
        ("system", facts.takes_system, (SYSTEM,), ()),
    )
    for name, is_shown, lead, tools in parts:
        if is_shown and front(*lead, USER, tools=tools) != front(*lead, USER, REPLY, NEXT, tools=tools):
            yield name


def _lead(probe: TemplateProbe) -> str:
    """Return the white space between the generation prompt and the reply in the history."""
    prompt, history = probe.text(USER, add_generation_prompt=True), probe.text(USER, REPLY)
    lead = history[len(prompt) : history.find("probereply")]
    return lead if history.startswith(prompt) and lead.isspace() else ""


def _closers(probe: TemplateProbe) -> frozenset[str]:
    """Return the eos texts; if none follows a reply in the history, also the added token that does."""
    text = probe.text(USER, REPLY, NEXT) or probe.text(USER, REPLY)
    after = probe.added.findall(text.partition("probereply")[2].partition("probesecond")[0])
    ends = probe.tokenizer.end_texts & frozenset(probe.tokenizer.added_tokens)
    return ends if ends.intersection(after) else ends.union(after[:1])


def _can_be_cut(probe: TemplateProbe) -> bool:
    """Return whether text cut before added tokens tokenises like the whole, also at awkward cuts."""
    awkward: list[TemplateMessage] = [
        {"role": "user", "content": content} for content in ("  Über \n\n", "日本 ", "a\t", " .", "\n", "1 ")
    ]
    texts = [probe.text(*awkward), *(probe.text(message, REPLY, message) for message in awkward)]
    return all(
        _pieces(probe, text, [match.start() for match in probe.added.finditer(text)]) for text in texts
    )


def _pieces(probe: TemplateProbe, text: str, cuts: Sequence[int]) -> bool:
    encode: Callable[[str], list[int]] = lambda piece: probe.tokenizer.encode(piece, as_document=False)  # noqa: E731
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return [token for piece in pieces for token in encode(piece)] == encode(text)


def described(facts: TemplateFacts) -> str:
    """Describe the facts that a user may want to know."""
    reasoning_texts = "shows no reasoning"
    if facts.reasoning_key:
        reasoning_texts = f"old reasoning {facts.old_reasoning}"
        reasoning_texts += f" unless {next(iter(facts.preserve))}" if facts.preserve else ""
    parts = [
        reasoning_texts,
        "tools" if facts.takes_tools else "no tools",
        *(["images"] if facts.image_text is not None else []),
        *options_described(facts),
        *([f"writes dates ({', '.join(facts.dates)})"] if facts.dates else []),
        *([] if facts.can_be_cut else ["cannot be cut"]),
        *([f"loses or refuses {', '.join(facts.losses)}"] if facts.losses else []),
    ]
    return ", ".join(parts)
