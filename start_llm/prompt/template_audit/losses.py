"""Finds what a template loses or refuses even after conversations are adapted to it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.prompt.adapt import adapt
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.template_audit.call_probes import ARGUMENTS, BARE_TOOL
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.probe import TOOL, TemplateProbe, tool
from start_llm.prompt.template_audit.tool_forms import ToolForms


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request, and the words that its prompt must contain."""

    words: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...] = (TOOL,)


_ASKED = Message(role="user", content="probeasked")
_THANKED = Message(role="user", content="probethanked")
_NESTED_TOOL = tool("probetool", {"probelist": ARGUMENTS["probelist"]})


def _reply(content: str = "", *values: str, reasoning: str | None = None) -> Message:
    calls = tuple(
        ToolCall(f"id{number}", "probetool", {"probekey": value}) for number, value in enumerate(values)
    )
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def _result(number: int = 0) -> Message:
    return Message(role="tool", content=f"proberesult{number}", tool_call_id=f"id{number}")


def _samples(facts: TemplateFacts) -> Mapping[str, _Sample]:
    quote = " ".join(("probebefore", *facts.stand_ins.quoted, "probebehind"))
    system = Message(role="system", content="probesystem")
    return {
        "all that is said": _Sample("probeasked", (_ASKED,), ()),
        "system messages": _Sample("probesystem probeasked", (system, _ASKED)),
        "tools": _Sample("probetool probedescription probekey", (_ASKED,)),
        "tools without a description": _Sample("probebare", (_ASKED,), (BARE_TOOL,)),
        "nested schemas of tools": _Sample("probelist probefield probestate", (_ASKED,), (_NESTED_TOOL,)),
        "calls and results": _Sample(
            "probevalue proberesult0", (_ASKED, _reply("", "probevalue"), _result())
        ),
        "calls in one message": _Sample(
            "probeone probetwo proberesult0 proberesult1",
            (_ASKED, _reply("", "probeone", "probetwo"), _result(0), _result(1)),
        ),
        "text beside calls": _Sample(
            "probetext probevalue", (_ASKED, _reply("probetext", "probevalue", reasoning="why"), _result())
        ),
        "user text after results": _Sample(
            "proberesult0 probethanked", (_ASKED, _reply("", "probevalue"), _result(), _THANKED)
        ),
        "answers with reasoning": _Sample(
            "probeanswer probethanked", (_ASKED, _reply("probeanswer", reasoning="why"), _THANKED)
        ),
        "conversations with empty answers": _Sample("probeasked probethanked", (_ASKED, _reply(), _THANKED)),
        "marks that an answer quotes": _Sample(quote, (_ASKED, _reply(quote), _THANKED)),
    }


def losses(probe: TemplateProbe, facts: TemplateFacts) -> Iterator[str]:
    """Yield what is lost or refused, in words. Stop at a template that does not show the question."""
    probe, forms = replace(probe, stand_ins=facts.stand_ins), ToolForms(probe.tokenizer, facts)
    for kind, sample in _samples(facts).items():
        messages = in_native_form(sample.messages, facts.call_ids)
        adapted = adapt(ChatRequest(messages=messages, tools=forms.shown(sample.tools)), facts)
        prompt = probe.text(*adapted.messages, tools=adapted.tools, add_generation_prompt=True)
        if not all(word in prompt for word in sample.words.split()):
            yield kind
            if sample.words == _ASKED.content:
                return
