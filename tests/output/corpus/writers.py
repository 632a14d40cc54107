"""Calls in the native form of each format, as a chat template or a well-behaved model writes them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from start_llm.core.family import Family
from tests.output.corpus.case import TAGS, Call

type Write = Callable[[Sequence[Call]], str]


@dataclass(frozen=True)
class Writer:
    """How calls are written.

    Attributes:
        write: calls as one block where the format has blocks of several, else as blocks side by side.
        opener: what begins a call; "" where a bare object does.
        streams: arguments go out before the call is whole.
        starts_reply: only the very first text of an answer can be a call.
    """

    name: str
    family: Family
    write: Write
    opener: str
    streams: bool = False
    starts_reply: bool = False

    def call(self, name: str, **arguments: Any) -> str:
        return self.write([Call(name, arguments)])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else _json(value)


def _named(call: Call, key: str = "arguments") -> str:
    return _json({"name": call.name, key: call.arguments})


def _hermes(calls: Sequence[Call]) -> str:
    return "<tool_call>\n" + "\n".join(map(_named, calls)) + "\n</tool_call>"


def _qwen_xml(calls: Sequence[Call]) -> str:
    def function(call: Call) -> str:
        values = [f"<parameter={k}>\n{_as_text(v)}\n</parameter>\n" for k, v in call.arguments.items()]
        return f"<function={call.name}>\n{''.join(values)}</function>\n"

    return f"<tool_call>\n{''.join(map(function, calls))}</tool_call>"


def _glm(calls: Sequence[Call]) -> str:
    def block(call: Call) -> str:
        values = [
            f"<arg_key>{k}</arg_key>\n<arg_value>{_as_text(v)}</arg_value>\n"
            for k, v in call.arguments.items()
        ]
        return f"<tool_call>{call.name}\n{''.join(values)}</tool_call>"

    return "\n".join(map(block, calls))


def _minicpm(calls: Sequence[Call]) -> str:
    def value(raw: str) -> str:
        return f"<![CDATA[{raw}]]>" if any(mark in raw for mark in "<&\n") else raw

    def block(call: Call) -> str:
        values = [f'<param name="{k}">{value(_as_text(v))}</param>' for k, v in call.arguments.items()]
        return f'<function name="{call.name}">{"".join(values)}</function>'

    return "\n".join(map(block, calls))


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _json(value)


def _gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{call.name}{_gemma_value(call.arguments)}<tool_call|>" for call in calls
    )


def _mistral_list(calls: Sequence[Call]) -> str:
    return f"[TOOL_CALLS][{', '.join(map(_named, calls))}]"


def _mistral_headed(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{_json(call.arguments)}" for call in calls)


def _kimi(calls: Sequence[Call]) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>"
        f"{_json(call.arguments)}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def _llama_bare(calls: Sequence[Call]) -> str:
    return "; ".join(_named(call, "parameters") for call in calls)


def _llama_python(calls: Sequence[Call]) -> str:
    return "<|python_tag|>" + _llama_bare(calls)


def _llama_tagged(calls: Sequence[Call]) -> str:
    return "\n".join(f"<function={call.name}>{_json(call.arguments)}</function>" for call in calls)


def _harmony(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{_json(call.arguments)}<|call|>"
        for call in calls
    )


def _family(*formats: str, thinks: bool = True) -> Family:
    return Family(name="+".join(formats) or "generic", thought=TAGS if thinks else None, formats=formats)


HARMONY = Family(name="gpt_oss", channels=True)
_ALL = (
    Writer("hermes", _family("qwen_xml", "hermes"), _hermes, "<tool_call>"),
    Writer("qwen_xml", _family("qwen_xml", "hermes"), _qwen_xml, "<tool_call>", streams=True),
    Writer("glm", _family("glm"), _glm, "<tool_call>", streams=True),
    Writer("minicpm", _family("minicpm"), _minicpm, "<function ", streams=True),
    Writer("gemma4", _family("gemma4"), _gemma4, "<|tool_call>"),
    Writer("mistral_list", _family("mistral_headed", "mistral_list"), _mistral_list, "[TOOL_CALLS]"),
    Writer("mistral_headed", _family("mistral_headed", "mistral_list"), _mistral_headed, "[TOOL_CALLS]"),
    Writer("kimi", _family("kimi"), _kimi, "<|tool_calls_section_begin|>"),
    Writer("llama_bare", _family("llama_bare", "llama_tagged"), _llama_bare, "", starts_reply=True),
    Writer("llama_python", _family("llama_bare", "llama_tagged"), _llama_python, "<|python_tag|>"),
    Writer("llama_tagged", _family("llama_bare", "llama_tagged"), _llama_tagged, "<function="),
    Writer("harmony", HARMONY, _harmony, "<|start|>"),
)
WRITERS: Mapping[str, Writer] = {one.name: one for one in _ALL}
