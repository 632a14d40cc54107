"""How models of several families write reasoning and calls, and scripts that do so.

Every family says the same things, so one test holds for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.core.chat import Json

type Arguments = Mapping[str, Json]
type Call = tuple[str, Arguments]


def tool(name: str, **types: str) -> dict[str, Any]:
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [*types],
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"To {name}.", "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


READ = tool("read", path="string", line="integer")
WRITE = tool("write", text="string")
TOOLS = [READ, WRITE]

REASONING = "First I ask myself 🐟: how deep, übrigens?\n\nThen I look."
ANSWER = "It is 52 m deep — 深い 🌊 — on average."
PROSE = "Let me see. 🔎"
LONG_TEXT = "".join(f"Line {number} of many, „{number * number}“ 🐠.\n" for number in range(40, 56))
PATH: Call = ("read", {"path": "all of the seas/Øresund 🐡.txt", "line": 7})
OTHER: Call = ("write", {"text": 'a "b"\n\\ c'})
LONG: Call = ("write", {"text": LONG_TEXT})
UNKNOWN: Call = ("erase", {"path": "everything"})
REASONING_OF: Call = ("read", {"path": "in reasoning", "line": 1})


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else _json(value)


def _object(arguments_name: str) -> Callable[[Call], str]:
    return lambda call: f'{{"name": {_json(call[0])}, "{arguments_name}": {_json(call[1])}}}'


def _hermes(call: Call) -> str:
    return f"<tool_call>\n{_object('arguments')(call)}\n</tool_call>"


def _qwen_xml(call: Call) -> str:
    name, arguments = call
    values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _glm(call: Call) -> str:
    name, arguments = call
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def _gemma(call: Call) -> str:
    name, arguments = call
    values = ",".join(
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}"
        for key, value in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def _kimi(call: Call) -> str:
    name, arguments = call
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"{head}{_json(arguments)}<|tool_call_end|>"


def _harmony(call: Call) -> str:
    name, arguments = call
    return f" to=functions.{name}<|channel|>commentary json<|message|>{_json(arguments)}"


def _minicpm(call: Call) -> str:
    name, arguments = call
    values = "".join(
        f'<param name="{key}"><![CDATA[{_text(value)}]]></param>' for key, value in arguments.items()
    )
    return f'<function name="{name}">{values}</function>'


def _minimax(call: Call) -> str:
    name, arguments = call
    values = "".join(
        f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items()
    )
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def _nested(call: Call) -> str:
    name, arguments = call
    mark = "]<]minimax[>["
    values = "".join(f"{mark}<{key}>{value}{mark}</{key}>" for key, value in arguments.items())
    return f'{mark}<invoke name="{name}">{values}{mark}</invoke>\n'


def _dsml(call: Call) -> str:
    name, arguments = call
    values = "".join(
        f'<｜DSML｜parameter name="{key}" string="{_json(isinstance(value, str))}">{_text(value)}'
        "</｜DSML｜parameter>\n"
        for key, value in arguments.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n'


def _seed(call: Call) -> str:
    name, arguments = call
    values = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>"


def _deepseek(call: Call) -> str:
    name, arguments = call
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"


def _python(call: Call) -> str:
    name, arguments = call
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _k3(call: Call) -> str:
    name, arguments = call
    values = "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>'
        f"{value}<|close|>argument<|sep|>"
        for key, value in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{values}<|close|>call<|sep|>'


def _action(call: Call) -> str:
    return f'{{"tool_call_id": "0", "tool_name": {_json(call[0])}, "parameters": {_json(call[1])}}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The texts of a family.

    Attributes:
        trait: the template, in `tests/templates`.
        tail: the last token of a prompt that asks for reasoning, and `tail_off` of one that does not.
        call: the text of one call.
        around: what stands around calls, and `between` them; None if a reply makes one call.
        around_after_text: the same where text stands before them, if that is another thing.
        opening: what opens reasoning, if the prompt does not; `closing` is None without reasoning.
        before_text, after: what stands around an answer.
        end: the token that ends a reply with calls.
        streams: arguments come as they are written.
        malformed: what begins as calls do, and is none.
    """

    trait: str
    tail: str
    tail_off: str = ""
    call: Callable[[Call], str]
    around: tuple[str, str] = ("", "")
    around_after_text: tuple[str, str] | None = None
    between: str | None = "\n"
    opening: str = ""
    closing: str | None = None
    before_text: str = ""
    after_text: str = ""
    end: str = ""
    streams: bool = False
    malformed: str

    @property
    def thinks(self) -> bool:
        return self.closing is not None

    def reasoning(self, text: str) -> str:
        return f"{self.opening}{text}{self.closing}"

    def answer(self, text: str) -> str:
        return self.before_text + text

    def prose(self, text: str) -> str:
        """Text before calls."""
        return self.before_text + text + self.after_text

    def calls(self, *calls: Call, after_text: bool = False) -> str:
        before, after = (self.around_after_text if after_text else None) or self.around
        return before + (self.between or "").join(map(self.call, calls)) + after + self.end


FORMS: Mapping[str, Form] = {
    "hermes": Form(
        trait="strips_old_reasoning",
        tail="\n",
        tail_off="\n\n",
        call=_hermes,
        opening="<think>\n",
        closing="\n</think>\n\n",
        malformed='<tool_call>\n{"name": "read", "arguments": {"path": }}\n</tool_call>',
    ),
    "qwen_xml": Form(
        trait="opens_reasoning",
        tail="\n",
        tail_off="</think>",
        call=_qwen_xml,
        closing="\n</think>\n\n",
        streams=True,
        malformed="<tool_call>\n<function=read it>\n</tool_call>",
    ),
    "glm": Form(
        trait="stop_opens_next",
        tail="<think>",
        tail_off="</think>",
        call=_glm,
        closing="</think>",
        end="<|observation|>",
        streams=True,
        malformed="<tool_call>read the file, please</tool_call>",
    ),
    "gemma4": Form(
        trait="gemma4_channel",
        tail="\n",
        tail_off="<channel|>",
        call=_gemma,
        between="",
        opening="<|channel>thought\n",
        closing="\n<channel|>",
        end="<|tool_response>",
        malformed="<|tool_call>call:read{path:}<tool_call|>",
    ),
    "mistral": Form(
        trait="tools_before_last_user",
        tail="[/INST]",
        call=_object("arguments"),
        around=("[TOOL_CALLS][", "]"),
        between=", ",
        malformed='[TOOL_CALLS][{"name": "read", "arguments": [}]',
    ),
    "kimi": Form(
        trait="kimi",
        tail="<|im_middle|>",
        call=_kimi,
        around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        between="",
        malformed="<|tool_calls_section_begin|>nothing<|tool_calls_section_end|>",
    ),
    "llama": Form(
        trait="dates",
        tail="\n\n",
        call=_object("parameters"),
        around_after_text=("<|python_tag|>", ""),
        between="; ",
        end="<|eom_id|>",
        malformed='{"name": "read", "parameters": 5}',
    ),
    "minicpm": Form(
        trait="minicpm",
        tail="\n",
        call=_minicpm,
        streams=True,
        malformed='<function name="read">its text</function>',
    ),
    "minimax_m3": Form(
        trait="nested_arguments",
        tail="<mm:think>",
        tail_off="</mm:think>",
        call=_nested,
        around=("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
        between="",
        closing="</mm:think>",
        streams=True,
        malformed=']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="read">it]<]minimax[>[</invoke>\n'
        "]<]minimax[>[</tool_call>",
    ),
    "dsml": Form(
        trait="dsml",
        tail="<think>",
        tail_off="</think>",
        call=_dsml,
        around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        between="",
        closing="</think>",
        streams=True,
        malformed='<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">it</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
    ),
    "seed": Form(
        trait="seed",
        tail="\n",
        tail_off="\n",
        call=_seed,
        opening="<seed:think>",
        closing="</seed:think>",
        streams=True,
        malformed="<seed:tool_call>\n<function=read>it</function>\n</seed:tool_call>",
    ),
    "deepseek": Form(
        trait="arguments_as_text",
        tail="<｜Assistant｜>",
        tail_off="<｜Assistant｜>",
        call=_deepseek,
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        between="",
        opening="<think>\n",
        closing="\n</think>\n\n",
        malformed="<｜tool▁calls▁begin｜>read<｜tool▁calls▁end｜>",
    ),
    "lfm2": Form(
        trait="python_calls",
        tail="\n",
        call=_python,
        around=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        between=", ",
        malformed="<|tool_call_start|>[read(path=)]<|tool_call_end|>",
    ),
    "nemotron": Form(
        trait="call_list",
        tail="\n",
        call=_object("arguments"),
        around=("<TOOLCALL>[", "]</TOOLCALL>"),
        between=", ",
        malformed='<TOOLCALL>[{"name": "read", "arguments": {"path": }}]</TOOLCALL>',
    ),
    "cohere": Form(
        trait="numbered_actions",
        tail="<|CHATBOT_TOKEN|>",
        call=_action,
        around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        between=",\n    ",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        malformed='<|START_ACTION|>[{"tool_name": "read", "parameters": {"path": }}]<|END_ACTION|>',
    ),
    "harmony": Form(
        trait="channels",
        tail="assistant",
        call=_harmony,
        around_after_text=("<|start|>assistant", ""),
        between=None,
        opening="<|channel|>analysis<|message|>",
        closing="<|end|><|start|>assistant",
        before_text="<|channel|>final<|message|>",
        after_text="<|end|>",
        end="<|call|>",
        malformed=" to=functions.read<|channel|>commentary json<|message|>{path}",
    ),
}
ALWAYS_THINKING: Mapping[str, Form] = {
    "minimax": Form(
        trait="minimax",
        tail="\n",
        tail_off="\n",
        call=_minimax,
        around=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        between="",
        closing="\n</think>\n\n",
        streams=True,
        malformed='<minimax:tool_call>\n<invoke name="read">it</invoke>\n</minimax:tool_call>',
    ),
    "kimi_k3": Form(
        trait="open_and_close",
        tail="<|sep|>",
        tail_off="<|sep|>",
        call=_k3,
        around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>"),
        between="",
        closing="<|close|>think<|sep|>",
        streams=True,
        malformed='<|open|>tools<|sep|><|open|>call tool="read"<|close|>call<|sep|><|close|>tools<|sep|>',
    ),
}
"""Their prompts open reasoning, whatever a request says of that: its scripts would all have to close it."""
THINKING = [name for name, form in FORMS.items() if form.thinks]


def answers(form: Form) -> dict[str, str]:
    """Scripts that a request without thinking asks for."""
    scripts = {
        "call": form.calls(PATH),
        "answer": form.answer(ANSWER),
        "prose": form.prose(PROSE) + form.calls(PATH, after_text=True),
        "unknown": form.calls(UNKNOWN),
        "malformed": form.malformed,
    }
    scripts |= {} if form.between is None else {"pair": form.calls(PATH, OTHER)}
    return scripts | ({"long": form.calls(LONG)} if form.streams else {})


def reasoning_texts(form: Form) -> dict[str, str]:
    """Scripts that begin with reasoning; none for models without reasoning."""
    if not form.thinks:
        return {}
    return {
        "reasoned": form.reasoning(REASONING) + form.answer(ANSWER),
        "reasoned_call": form.reasoning(REASONING) + form.calls(PATH),
        "call_in_reasoning": form.reasoning(reasoning_of_a_call(form)) + form.answer(ANSWER),
    }


def reasoning_of_a_call(form: Form) -> str:
    """It quotes a call. In Harmony the marks around one would end the reasoning."""
    quoted = form.call(REASONING_OF).replace("<|channel|>", " ").replace("<|message|>", " ")
    return f"I might say {quoted} here."
