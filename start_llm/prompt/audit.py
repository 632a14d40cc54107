"""Learns what a chat template does, by rendering a synthetic conversation in many ways, once, at load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import CallIds, Family
from start_llm.prompt.boundaries import Closers
from start_llm.prompt.facts import Moving, Switch, TemplateFacts
from start_llm.prompt.template import Rendering, Seen, TemplateTokenizer

_SWITCHES = (Switch(option="enable_thinking"), Switch(option="thinking"))
_PRESERVING: tuple[Mapping[str, Json], ...] = (
    {"preserve_thinking": True},
    {"clear_thinking": False},
    {"keep_all_reasoning": True},
)
_THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
_CALL_IDS: tuple[CallIds, ...] = ("ordinal", "nine", "kimi")
_SAMPLE_IDS: Mapping[CallIds, str] = {
    "ordinal": "call0",
    "nine": "000000000",
    "kimi": "functions.probetool:0",
}
_TOOL: Mapping[str, Json] = {
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
_SYSTEM: Seen = {"role": "system", "content": "probesystem"}
_USER: Seen = {"role": "user", "content": "probefirst"}
_REPLY: Seen = {"role": "assistant", "content": "probereply"}
_NEXT: Seen = {"role": "user", "content": "probesecond"}


@dataclass(slots=True)
class _Probe:
    """Renders conversations, and remembers the dates that were asked for."""

    tokenizer: TemplateTokenizer
    dates: list[str] = field(default_factory=list[str])

    def text(
        self,
        *messages: Seen,
        tools: Sequence[Mapping[str, Json]] = (),
        options: Mapping[str, Json] | None = None,
        with_tail: bool = False,
    ) -> str:
        """The rendering; nothing if the template refuses."""

        def note(form: str) -> str:
            self.dates.append(form)
            return form

        rendering = Rendering(self.tokenizer, tools, options or {}, note)
        try:
            return rendering.text(messages, with_tail=with_tail)
        except InvalidRequest:
            return ""

    def shows(self, words: Sequence[str], *messages: Seen, **how: object) -> bool:
        """Whether all words are in the rendering, in this order."""
        text, place = self.text(*messages, **how), 0  # pyright: ignore[reportArgumentType]
        for word in words:
            place = text.find(word, place) + 1
            if not place:
                return False
        return True


def audit(tokenizer: TemplateTokenizer, family: Family) -> TemplateFacts:
    """What the template of this tokenizer does."""
    probe = _Probe(tokenizer)
    facts = _call_facts(probe, family)
    alone = _role_facts(probe, facts)
    thoughts = _thought_facts(probe, alone)
    return replace(
        thoughts,
        tail_options=frozenset(_tail_options(probe, thoughts)),
        moving=frozenset(_moving(probe)),
        dates=tuple(dict.fromkeys(probe.dates)),
        lead=_lead(probe),
        closers=_closers(probe),
        can_be_cut=_can_be_cut(probe),
    )


def _role_facts(probe: _Probe, facts: TemplateFacts) -> TemplateFacts:
    return replace(
        facts,
        takes_system=probe.shows(("probesystem", "probefirst"), _SYSTEM, _USER),
        takes_late_system=probe.shows(
            ("probefirst", "probereply", "probesystem", "probesecond"), _USER, _REPLY, _SYSTEM, _NEXT
        ),
        takes_neighbours=probe.shows(("probefirst", "probesecond"), _USER, _NEXT),
        takes_tools=probe.shows(("probetool",), _USER, tools=(_TOOL,)),
    )


# ----------------------------------------------------------------------------------------------------- calls


def _call(call_id: str, arguments: Json, name: str = "probetool") -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(*calls: Json, content: str = "") -> Seen:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _result(call_id: str, content: str = "proberesult") -> Seen:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _call_facts(probe: _Probe, family: Family) -> TemplateFacts:
    """The first form of ids and arguments in which a call, its arguments and its result are shown."""
    for as_text in (False, True):
        for ids in dict.fromkeys((family.call_ids, *_CALL_IDS)):
            if _shows_call(probe, ids, as_text):
                facts = TemplateFacts(arguments_as_text=as_text, call_ids=ids)
                return _text_beside_calls(probe, _parallel_calls(probe, facts))
    return TemplateFacts(takes_calls=False, call_ids=family.call_ids)


def _arguments(as_text: bool) -> Json:
    return '{"probekey": "probevalue"}' if as_text else {"probekey": "probevalue"}


def _shows_call(probe: _Probe, ids: CallIds, as_text: bool) -> bool:
    call_id = _SAMPLE_IDS[ids]
    text = probe.text(_USER, _calling(_call(call_id, _arguments(as_text))), _result(call_id), tools=(_TOOL,))
    # A template that prints an object as Python does is one that expects text.
    return (
        all(word in text for word in ("probekey", "probevalue", "proberesult")) and "'probekey'" not in text
    )


def _parallel_calls(probe: _Probe, facts: TemplateFacts) -> TemplateFacts:
    first, second = _two_ids(facts.call_ids)
    arguments = _arguments(facts.arguments_as_text)
    both = _calling(_call(first, arguments), _call(second, arguments, "probeother"))
    results = (_result(first, "proberesultone"), _result(second, "proberesulttwo"))
    words = ("probefirst", "probetool", "probeother", "proberesultone", "proberesulttwo")
    return replace(facts, takes_parallel_calls=probe.shows(words, _USER, both, *results))


def _two_ids(style: CallIds) -> tuple[str, str]:
    first = _SAMPLE_IDS[style]
    return first, {"kimi": "functions.probeother:1"}.get(style, f"{first[:-1]}1")


def _text_beside_calls(probe: _Probe, facts: TemplateFacts) -> TemplateFacts:
    call_id = _SAMPLE_IDS[facts.call_ids]
    call = _call(call_id, _arguments(facts.arguments_as_text))
    result = _result(call_id)
    text: Seen = {"role": "assistant", "content": "probetext"}
    together = (_USER, _calling(call, content="probetext"), result, _REPLY, _NEXT)
    apart = (_USER, text, _calling(call), result, _REPLY, _NEXT)
    words = ("probetext", "proberesult", "probereply", "probesecond")
    return replace(
        facts,
        keeps_text_beside_calls=probe.shows(words, *together),
        splits_text_from_calls=probe.shows(words, *apart),
        takes_user_after_result=probe.shows(
            ("proberesult", "probesecond"), _USER, _calling(call), result, _NEXT
        ),
    )


# -------------------------------------------------------------------------------------------------- thoughts


def _thought_facts(probe: _Probe, facts: TemplateFacts) -> TemplateFacts:
    key = next((key for key in _THOUGHT_KEYS if _shows_thought(probe, facts, key)), None)
    old = (_USER, _thinking(_REPLY, key or "reasoning_content"), _NEXT)
    keeping = [
        options
        for options in _PRESERVING
        if probe.shows(("probethought", "probereply"), *old, options=options)
    ]
    is_kept = probe.shows(("probethought", "probereply"), *old)
    return replace(
        facts,
        thought_key=key,
        old_thoughts="kept" if is_kept else "dropped",
        preserve=keeping[0] if keeping and not is_kept else {},
        switch=next((switch for switch in _SWITCHES if _acts(probe, switch)), None),
        takes_effort=_differs(probe, {"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
    )


def _shows_thought(probe: _Probe, facts: TemplateFacts, key: str) -> bool:
    """Thoughts are shown at least while the call that they led to is being answered."""
    call_id = _SAMPLE_IDS[facts.call_ids]
    calling = _calling(_call(call_id, _arguments(facts.arguments_as_text)))
    running = (_USER, _thinking(calling, key), _result(call_id))
    latest = (_USER, _thinking(_REPLY, key))
    return probe.shows(("probethought",), *running) or probe.shows(("probethought",), *latest)


def _thinking(message: Seen, key: str) -> Seen:
    return message | {key: "probethought"}


def _acts(probe: _Probe, switch: Switch) -> bool:
    return _differs(probe, {switch.option: switch.on}, {switch.option: switch.off})


def _differs(probe: _Probe, one: Mapping[str, Json], other: Mapping[str, Json]) -> bool:
    first = probe.text(_USER, options=one, with_tail=True)
    second = probe.text(_USER, options=other, with_tail=True)
    return bool(first and second) and first != second


def _tail_options(probe: _Probe, facts: TemplateFacts) -> Iterator[str]:
    """Options that change no conversation, as long as nothing is asked for behind it."""
    key, call_id = facts.thought_key or "reasoning_content", _SAMPLE_IDS[facts.call_ids]
    calling = _calling(_call(call_id, _arguments(facts.arguments_as_text)))
    talks = (
        (_SYSTEM, _USER, _thinking(_REPLY, key), _NEXT),
        (_USER, _thinking(calling, key), _result(call_id)),
    )
    values: dict[str, tuple[Json, Json]] = {"reasoning_effort": ("low", "high")} if facts.takes_effort else {}
    if facts.switch:
        values[facts.switch.option] = (facts.switch.on, facts.switch.off)
    for option, settings in values.items():
        one, other = (
            [probe.text(*talk, tools=(_TOOL,), options={option: setting}) for talk in talks]
            for setting in settings
        )
        if one == other:
            yield option


# ------------------------------------------------------------------------------------------------- boundaries


def _moving(probe: _Probe) -> Iterator[Moving]:
    """What does not stay in front of the first question when the conversation goes on."""

    def front(*messages: Seen, tools: Sequence[Mapping[str, Json]]) -> str:
        return probe.text(*messages, tools=tools).partition("probefirst")[0]

    parts: tuple[tuple[Moving, tuple[Seen, ...], Sequence[Mapping[str, Json]]], ...] = (
        ("tools", (), (_TOOL,)),
        ("system", (_SYSTEM,), ()),
    )
    for name, lead, tools in parts:
        if front(*lead, _USER, tools=tools) != front(*lead, _USER, _REPLY, _NEXT, tools=tools):
            yield name


def _lead(probe: _Probe) -> str:
    """White space between the prompt for a reply and that reply in the history."""
    prompt, history = probe.text(_USER, with_tail=True), probe.text(_USER, _REPLY)
    lead = history[len(prompt) : history.find("probereply")]
    return lead if history.startswith(prompt) and lead.isspace() else ""


def _closers(probe: _Probe) -> frozenset[str]:
    """What ends a reply, and what stands behind one in the history, which need not be the same."""
    text = probe.text(_USER, _REPLY, _NEXT) or probe.text(_USER, _REPLY)
    added = Closers.of(probe.tokenizer.added_tokens, frozenset()).added
    behind = added.search(text, text.find("probereply") + 1) if "probereply" in text else None
    closer = frozenset({behind[0]}) if behind else frozenset[str]()
    return closer | (probe.tokenizer.end_texts & frozenset(probe.tokenizer.added_tokens))


def _can_be_cut(probe: _Probe) -> bool:
    """Whether pieces tokenise to what the whole does, for texts with all sorts of things next to the cuts."""
    added = Closers.of(probe.tokenizer.added_tokens, frozenset()).added
    awkward: list[Seen] = [
        {"role": "user", "content": content} for content in ("  Über \n\n", "日本 ", "a\t", " .", "\n", "1 ")
    ]
    texts = [probe.text(*awkward), *(probe.text(one, _REPLY, one) for one in awkward)]
    return all(_pieces(probe, text, [match.start() for match in added.finditer(text)]) for text in texts)


def _pieces(probe: _Probe, text: str, cuts: Sequence[int]) -> bool:
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
        f"{facts.switch.option} switches thinking" if facts.switch else "thinking cannot be switched",
        f"writes dates ({', '.join(facts.dates)})" if facts.dates else "writes no dates",
        *([] if facts.can_be_cut else ["cannot be cut"]),
    ]
    return ", ".join(parts)
