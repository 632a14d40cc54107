"""Every template shows its trait, and every tokenizer reads its markers as the tokens that they are."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError, UndefinedError
from mlx_lm.generate import generate_step

from start_llm.models.loader import LoadedModel, load
from tests.templates.traits import SEEING, TRAITS, trait_folder, trait_tokenizer

pytestmark = pytest.mark.product

TODAY = date(2026, 11, 21)
ALL = TRAITS | SEEING

type Message = dict[str, Any]

TOOL: Message = {
    "type": "function",
    "function": {
        "name": "depth",
        "description": "How deep a sea is.",
        "parameters": {
            "type": "object",
            "properties": {
                "sea": {"type": "string", "description": "Its name."},
                "spots": {"type": "array", "description": "Where."},
            },
            "required": ["sea"],
        },
    },
}
TOOL_TEXT = json.dumps(TOOL)
SYSTEM: Message = {"role": "system", "content": "Be brief."}
HELLO: Message = {"role": "user", "content": "Hello."}
HI: Message = {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."}
HOW_DEEP: Message = {"role": "user", "content": "How deep?"}
RESULT: Message = {"role": "tool", "content": "52 m", "tool_call_id": "call00000"}
NAMED_RESULT: Message = {**RESULT, "name": "depth"}
ANSWER: Message = {"role": "assistant", "content": "52 m.", "reasoning_content": "Read it out."}


def call(arguments: object, call_id: str = "call00000") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "depth", "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str = "", reasoning: str = "Ask.") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": list(calls or [call({"sea": "Baltic"})]),
    }


CONVERSATION = [HELLO, HI, HOW_DEEP, calling(), RESULT]


def render(
    name: str, *messages: Message, tools: bool = False, add_generation_prompt: bool = True, **options: Any
) -> str:
    return trait_tokenizer(name).render(
        list(messages),
        [TOOL] if tools else None,
        options,
        add_generation_prompt=add_generation_prompt,
        strftime_now=TODAY.strftime,
    )


def conversation(name: str) -> str:
    """A long rendering, of what the template lets pass."""
    if name in ("no_system", "sees_in_questions"):
        return render(name, HELLO, HI, HOW_DEEP)
    arguments = '{"sea": "Baltic"}' if name == "arguments_as_text" else {"sea": "Baltic"}
    result = NAMED_RESULT if name == "named_results" else RESULT
    return render(name, SYSTEM, HELLO, HI, HOW_DEEP, calling(call(arguments)), result, tools=True)


# -------------------------------------------------------------------------------------------------- templates


def test_strips_old_reasoning_keeps_those_after_the_last_question():
    text = render("strips_old_reasoning", *CONVERSATION, RESULT)
    assert text == (
        "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nHow deep?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n"
        '<tool_call>\n{"name": "depth", "arguments": {"sea": "Baltic"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n52 m\n</tool_response>\n"
        "<tool_response>\n52 m\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_strips_old_reasoning_takes_a_user_turn_with_a_tool_result_for_no_question():
    result = {"role": "user", "content": "<tool_response>\n52 m\n</tool_response>"}
    assert "<think>\nAsk.\n</think>" in render("strips_old_reasoning", HOW_DEEP, calling(), result)
    assert "Ask." not in render("strips_old_reasoning", HOW_DEEP, calling(), HELLO)


def test_strips_old_reasoning_shows_tools_in_the_system_turn():
    text = render("strips_old_reasoning", SYSTEM, HELLO, tools=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert text.count("<|im_start|>system") == 1
    assert f"<tools>\n{TOOL_TEXT}\n</tools><|im_end|>\n" in text


def test_strips_old_reasoning_is_given_an_empty_reasoning_when_thinking_is_off():
    on, off = (render("strips_old_reasoning", HELLO, enable_thinking=on) for on in (True, False))
    assert off == on + "<think>\n\n</think>\n\n"


def test_opens_reasoning_opens_it_or_closes_it_in_the_generation_prompt():
    on, off = (render("opens_reasoning", HELLO, enable_thinking=on) for on in (True, False))
    assert on == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert off == "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n<think></think>"


def test_opens_reasoning_preserves_old_reasoning_on_request():
    dropped, kept = (
        render("opens_reasoning", HELLO, HI, HOW_DEEP, preserve_thinking=kept) for kept in (False, True)
    )
    assert "<|im_start|>assistant\n<think></think>Hi.<|im_end|>\n" in dropped
    assert "<|im_start|>assistant\n<think>\nA greeting.\n</think>\n\nHi.<|im_end|>\n" in kept


def test_opens_reasoning_writes_calls_as_xml():
    made = calling(call({"sea": "Baltic", "spots": [1, 2]}), content="I ask.")
    assert (
        "</think>\n\nI ask.\n<tool_call>\n<function=depth>\n<parameter=sea>\nBaltic\n</parameter>\n"
        "<parameter=spots>\n[1, 2]\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    ) in render("opens_reasoning", HOW_DEEP, made)


def test_stop_opens_next_has_no_closers():
    text = render("stop_opens_next", SYSTEM, HELLO, HI, HOW_DEEP, calling(content="I ask."), RESULT)
    assert text == (
        "[gMASK]<sop><|system|>Be brief.<|user|>Hello.<|assistant|></think>Hi."
        "<|user|>How deep?<|assistant|><think>Ask.</think>I ask.\n"
        "<tool_call>depth\n<arg_key>sea</arg_key>\n<arg_value>Baltic</arg_value>\n</tool_call>"
        "<|observation|>\n<tool_response>\n52 m\n</tool_response><|assistant|><think>"
    )


def test_stop_opens_next_closes_reasoning_that_nothing_opened_when_thinking_is_off():
    assert render("stop_opens_next", HELLO, enable_thinking=False).endswith("Hello.<|assistant|></think>")


def test_stop_opens_next_keeps_old_reasoning_unless_asked_to_clear_it():
    kept = render("stop_opens_next", HELLO, HI, HOW_DEEP, clear_thinking=False)
    assert "<|assistant|><think>A greeting.</think>Hi.<|user|>" in kept


def test_tools_before_last_user_move_with_every_turn():
    text = render("tools_before_last_user", SYSTEM, *CONVERSATION, ANSWER, tools=True)
    assert text == (
        f"<s>[INST]Hello.[/INST]Hi.</s>[AVAILABLE_TOOLS][{TOOL_TEXT}][/AVAILABLE_TOOLS]"
        "[INST]Be brief.\n\nHow deep?[/INST]"
        '[TOOL_CALLS][{"name": "depth", "arguments": {"sea": "Baltic"}, "id": "call00000"}]</s>'
        '[TOOL_RESULTS]{"content": "52 m", "call_id": "call00000"}[/TOOL_RESULTS]52 m.</s>'
    )


@pytest.mark.parametrize("bad", ["call0", "call-0000", "call000000", "çall00000"])
def test_tools_before_last_user_refuses_other_ids(bad):
    with pytest.raises(TemplateError, match="nine letters or digits"):
        render("tools_before_last_user", HOW_DEEP, calling(call({}, bad)))
    with pytest.raises(TemplateError, match="nine letters or digits"):
        render("tools_before_last_user", HOW_DEEP, calling(), RESULT | {"tool_call_id": bad})


@pytest.mark.parametrize("messages", [[HELLO, HOW_DEEP], [HI], [HELLO, HI, ANSWER]])
def test_tools_before_last_user_refuses_turns_that_do_not_alternate(messages):
    with pytest.raises(TemplateError, match="alternate"):
        render("tools_before_last_user", *messages)


def test_dates_stand_in_the_system_header():
    given = render("dates", SYSTEM, HELLO, date_string="26 Jul 2024")
    assert given == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief."
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert render("dates", SYSTEM, HELLO) == given.replace("26 Jul 2024", "21 Nov 2026")


def test_dates_shows_tools_in_the_first_user_turn_and_drops_the_text_beside_a_call():
    text = render("dates", *CONVERSATION[:3], calling(content="I ask."), RESULT, tools=True)
    assert f"{TOOL_TEXT}\n\nHello.<|eot_id|>" in text
    assert text.endswith(
        '{"name": "depth", "parameters": {"sea": "Baltic"}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n52 m<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_dates_refuses_two_calls_in_one_message():
    with pytest.raises(TemplateError, match="one call"):
        render("dates", HOW_DEEP, calling(call({}), call({}, "call00001")))


def test_no_system_has_two_roles():
    assert render("no_system", HELLO, HI, HOW_DEEP, tools=True) == (
        "<bos><start_of_turn>user\nHello.<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nHow deep?<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([SYSTEM, HELLO], "no role system"),
        ([HELLO, RESULT], "no role tool"),
        ([HELLO, HOW_DEEP], "alternate"),
    ],
)
def test_no_system_refuses_every_other_conversation(messages, message):
    with pytest.raises(TemplateError, match=message):
        render("no_system", *messages)


def channels(*messages: Message, **options: Any) -> str:
    """Return the channels that follow the system message, which has the date."""
    text = render("channels", *messages, **options)
    head, _, rest = text.partition("<|end|>")
    assert head == (
        "<|start|>system<|message|>Answer in the channels analysis, commentary and final.\n"
        "Current date: 2026-11-21\n\nReasoning: medium"
    )
    return rest


def test_channels_shows_reasoning_in_a_running_tool_loop_only():
    made = calling(content="I ask.")
    asked = (
        "<|start|>user<|message|>Hello.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|end|>"
        "<|start|>user<|message|>How deep?<|end|>"
    )
    reasoning = "<|start|>assistant<|channel|>analysis<|message|>Ask.<|end|>"
    loop = (
        "<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        "<|start|>assistant to=functions.depth<|channel|>commentary json<|message|>"
        '{"sea": "Baltic"}<|call|>'
        "<|start|>functions.depth to=assistant<|channel|>commentary<|message|>52 m<|end|>"
    )
    running = channels(HELLO, HI, HOW_DEEP, made, RESULT)
    assert running == f"{asked}{reasoning}{loop}<|start|>assistant"
    final = "<|start|>assistant<|channel|>final<|message|>52 m.<|end|>"
    assert channels(HELLO, HI, HOW_DEEP, made, RESULT, ANSWER) == f"{asked}{loop}{final}<|start|>assistant"


def test_channels_ends_a_generated_answer_otherwise_than_one_in_history():
    generated, history = (channels(HELLO, HI, add_generation_prompt=tail) for tail in (False, True))
    assert generated.endswith("<|channel|>final<|message|>Hi.<|return|>")
    assert history.endswith("<|channel|>final<|message|>Hi.<|end|><|start|>assistant")


def test_channels_tells_the_developer_message_and_the_effort():
    text = render("channels", SYSTEM, HELLO, tools=True, reasoning_effort="high")
    assert "\n\nReasoning: high<|end|>" in text
    assert (
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\nnamespace functions {\n\n"
        "// How deep a sea is.\ntype depth = (_: {\nsea: string,\nspots?: array,\n}) => any;\n\n"
        "} // namespace functions<|end|>"
    ) in text


def test_channels_drops_a_later_system_message():
    assert channels(HELLO, SYSTEM) == "<|start|>user<|message|>Hello.<|end|><|start|>assistant"


def test_kimi_shows_ids_as_they_are():
    made = call({"sea": "Baltic"}, "functions.depth:0")
    text = render("kimi", SYSTEM, HOW_DEEP, calling(made), RESULT | {"tool_call_id": "functions.depth:0"})
    assert text == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>How deep?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.depth:0<|tool_call_argument_begin|>{"sea": "Baltic"}<|tool_call_end|>'
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.depth:0\n52 m<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


def test_kimi_declares_tools_before_the_system_text():
    text = render("kimi", SYSTEM, HELLO, tools=True)
    assert text.startswith(
        f"<|im_system|>tool_declare<|im_middle|>[{TOOL_TEXT}]<|im_end|><|im_system|>system"
    )


def test_arguments_as_text_fails_on_an_object():
    with pytest.raises(TypeError):
        render("arguments_as_text", HOW_DEEP, calling())


def test_arguments_as_text_keeps_the_text_beside_a_call_and_cuts_reasoning_off():
    made = calling(call('{"sea":"Baltic"}'), content="<think>\nAsk.\n</think>I ask.")
    assert render("arguments_as_text", HOW_DEEP, made, RESULT, ANSWER) == (
        "<｜begin▁of▁sentence｜><｜User｜>How deep?<｜Assistant｜>I ask.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>depth<｜tool▁sep｜>{"sea":"Baltic"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>52 m<｜tool▁output▁end｜>"
        "52 m.<｜end▁of▁sentence｜><｜Assistant｜>"
    )


def test_gemma4_channel_keeps_a_turn_open_from_a_call_to_its_answer():
    made = calling(call({"spots": [1, {"deep": True}], "sea": "Baltic"}), content="I ask.")
    text = render("gemma4_channel", HELLO, HI, HOW_DEEP, made, RESULT, enable_thinking=False)
    assert text == (
        "<bos><|turn>user\nHello.<turn|>\n<|turn>model\nHi.<turn|>\n<|turn>user\nHow deep?<turn|>\n"
        "<|turn>model\n<|channel>thought\nAsk.\n<channel|>I ask."
        '<|tool_call>call:depth{sea:<|"|>Baltic<|"|>,spots:[1,{deep:true}]}<tool_call|>'
        '<|tool_response>response:depth{value:<|"|>52 m<|"|>}<tool_response|>'
    )
    answered = render("gemma4_channel", HELLO, HI, HOW_DEEP, made, RESULT, ANSWER, enable_thinking=False)
    assert answered == text + "52 m.<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"


def test_gemma4_channel_asks_for_reasoning_in_the_system_turn():
    text = render("gemma4_channel", SYSTEM, HELLO, tools=True, enable_thinking=True)
    assert text.startswith(
        '<bos><|turn>system\n<|think|>\nBe brief.<|tool>declaration:depth{description:<|"|>'
    )
    assert text.endswith("<tool|><turn|>\n<|turn>user\nHello.<turn|>\n<|turn>model\n")


def test_hoists_systems_moves_every_system_text_to_the_front():
    later = {"role": "system", "content": "The user is in a hurry."}
    assert render("hoists_systems", HELLO, HI, later, HOW_DEEP, SYSTEM) == (
        "<|im_start|>system\nThe user is in a hurry.\n\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
        "<|im_start|>user\nHow deep?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_marks_turns_with_words_and_drops_tools():
    text = render("plain", SYSTEM, HOW_DEEP, calling(content="I ask."), RESULT, tools=True)
    assert text == "<s>Be brief.\n\nUSER: How deep?\nASSISTANT: I ask.</s>\nASSISTANT:"


def test_words_in_system_turn_thinking_off_and_are_not_shown():
    marked, plain = ({"role": "system", "content": text} for text in ("Be brief. /no_think", "Be brief."))
    on, off = (render("words_in_system", system, HELLO) for system in (plain, marked))
    assert off.endswith("<think></think>")
    assert off.removesuffix("</think>") == on.removesuffix("\n")


def test_effort_words_knows_three_words_and_refuses_others():
    texts = [render("effort_words", HELLO, reasoning_effort=word) for word in ("low", "medium", "xhigh")]
    assert [text.split("\n")[1] for text in texts] == [
        "Think briefly.<|im_end|>",
        "Think.<|im_end|>",
        "Think of everything.<|im_end|>",
    ]
    assert render("effort_words", HELLO) == texts[2]
    with pytest.raises(TemplateError, match="no such reasoning_effort: high"):
        render("effort_words", HELLO, reasoning_effort="high")


def test_minicpm_puts_what_would_break_its_xml_into_cdata():
    arguments = {"sea": "Baltic", "a": "x < y", "b": "x & y", "c": "x\ny", "spots": [1]}
    made = calling(call(arguments), content="I ask.")
    assert render("minicpm", HOW_DEEP, made) == (
        "<s><|im_start|>user\nHow deep?<|im_end|>\n<|im_start|>assistant\nI ask.\n"
        '<function name="depth"><param name="sea">Baltic</param><param name="a"><![CDATA[x < y]]></param>'
        '<param name="b"><![CDATA[x & y]]></param><param name="c"><![CDATA[x\ny]]></param>'
        '<param name="spots">[1]</param></function><|im_end|>\n<|im_start|>assistant\n'
    )


NOTED = calling(call({"sea": 'Baltic "B"', "spots": [1, {"deep": True}]}), call({}), content="I ask.")
OBJECTS = (
    '{"name": "depth", "arguments": {"sea": "Baltic \\"B\\"", "spots": [1, {"deep": true}]}}',
    '{"name": "depth", "arguments": {}}',
)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        (
            "python_calls",
            (
                'I ask.<|tool_call_start|>[depth(sea="Baltic \\"B\\"", spots=[1, {\'deep\': True}]), depth()]'
                "<|tool_call_end|><|im_end|>"
            ),
        ),
        (
            "bare_python_calls",
            (
                "I ask.<|python_start|>[depth(sea='Baltic \"B\"', spots=[1, {'deep': True}]), depth()]"
                "<|python_end|><|eot|>"
            ),
        ),
        (
            "python_lines",
            (
                'I ask.<function_calls>depth(sea="Baltic \\"B\\"", spots=[1, {"deep": true}])\ndepth()'
                "</function_calls><|im_end|>"
            ),
        ),
        ("call_list", f"I ask.<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL><SPECIAL_12>"),
        ("call_list_without_end", f"I ask.<|tool_call|>[{', '.join(OBJECTS)}]<|end_of_text|>"),
        ("option_without_tools", f"I ask.<|tool_call|>[{', '.join(OBJECTS)}]<|end_of_text|>"),
        ("call_lines", "\n".join(["I ask.", "<tool_calls>", *OBJECTS, "</tool_calls><end_of_sentence>"])),
        ("bare_call_list", f"assistant\n[{', '.join(OBJECTS)}]<|im_end|>"),
        ("role_of_a_call", "\n".join(["I ask.function call<|role_sep|>", *OBJECTS]) + "<|message_sep|>"),
        (
            "escaped_texts",
            (
                'I ask.<start_function_call>call:depth{sea:<escape>Baltic "B"<escape>,spots:[1,{deep:true}]}'
                "<end_function_call><start_function_call>call:depth{}<end_function_call><end_of_turn>"
            ),
        ),
        (
            "numbered_actions",
            (
                "<|START_RESPONSE|>I ask.<|END_RESPONSE|><|START_ACTION|>[\n    "
                '{"tool_call_id": "0", "tool_name": "depth", "parameters": '
                '{"sea": "Baltic \\"B\\"", "spots": [1, {"deep": true}]}},\n    {"tool_call_id": "1", '
                '"tool_name": "depth", "parameters": {}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>'
            ),
        ),
        (
            "nested_arguments",
            (
                'I ask.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="depth">'
                ']<]minimax[>[<sea>Baltic "B"]<]minimax[>[</sea>]<]minimax[>[<spots>'
                "]<]minimax[>[<item>1]<]minimax[>[</item>]<]minimax[>[<item>]<]minimax[>[<deep>true"
                "]<]minimax[>[</deep>]<]minimax[>[</item>]<]minimax[>[</spots>]<]minimax[>[</invoke>\n"
                ']<]minimax[>[<invoke name="depth">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>[e~['
            ),
        ),
        (
            "open_and_close",
            (
                "<|open|>response<|sep|>I ask.<|close|>response<|sep|><|open|>tools<|sep|>"
                '<|open|>call tool="depth" index="1"<|sep|>'
                '<|open|>argument key="sea" type="string"<|sep|>Baltic "B"<|close|>argument<|sep|>'
                '<|open|>argument key="spots" type="array"<|sep|>[1, {"deep": true}]'
                '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="depth" index="2"<|sep|>'
                "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
            ),
        ),
    ],
)
def test_a_template_writes_calls_in_its_own_notation(name, calls):
    assert calls in render(name, HOW_DEEP, NOTED, tools=True)


def test_bare_python_calls_have_marks_only_after_text():
    assert "|>\n\n[depth(sea='Baltic')]<|eot|>" in render("bare_python_calls", HOW_DEEP, calling())


def test_numbered_actions_counts_calls_and_results_through_the_conversation():
    text = render("numbered_actions", HOW_DEEP, calling(), RESULT, calling(), RESULT)
    assert text.count('"tool_call_id": "1"') == text.count('{"id": "1", "results": 52 m}') == 1
    assert text.count("<|START_THINKING|>Ask.<|END_THINKING|>") == 2
    assert "Ask." not in render("numbered_actions", HOW_DEEP, calling(), RESULT, HELLO)


def named(tool: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "depth", **tool}}]


def thinking(message: Message) -> Message:
    """The reasoning under the name that channels know."""
    return {"thinking" if key == "reasoning_content" else key: value for key, value in message.items()}


def rendered_with(name: str, tools: list[dict[str, Any]], *messages: Message) -> str:
    tokenizer = trait_tokenizer(name)
    return tokenizer.render(
        list(messages), tools, {}, add_generation_prompt=True, strftime_now=TODAY.strftime
    )


def test_strict_channels_refuses_a_tool_without_a_description_and_a_quoted_channel():
    with pytest.raises(UndefinedError, match="description"):
        rendered_with("strict_channels", named({}), HELLO)
    with pytest.raises(TemplateError, match="names no channel"):
        render("strict_channels", HELLO, HI | {"content": "Write <|channel|>final<|message|>."}, HELLO)


def test_strict_channels_shows_text_beside_a_call_as_reasoning_and_never_both():
    spoken = thinking(calling(content="I ask.", reasoning=""))
    assert "<|channel|>analysis<|message|>I ask.<|end|>" in render("strict_channels", HELLO, spoken, RESULT)
    assert "I ask." not in render("strict_channels", HELLO, spoken, RESULT, HI, HELLO)
    with pytest.raises(TemplateError, match="not both"):
        render("strict_channels", HELLO, thinking(calling(content="I ask.")), RESULT)


def test_strict_channels_hides_reasoning_before_a_later_answer_and_the_fields_of_a_list():
    made = thinking(calling())
    assert "Ask." in render("strict_channels", HELLO, made, RESULT)
    assert "Ask." not in render("strict_channels", HELLO, made, RESULT, HI, HELLO)
    fields = {"type": "object", "properties": {"name": {"type": "string"}}}
    seas = {"type": "object", "properties": {"seas": {"type": "array", "items": fields}}}
    tools = named({"description": "How deep.", "parameters": seas})
    assert "seas: any[],\n" in rendered_with("strict_channels", tools, HELLO)


def test_text_after_calls_closes_the_turn_before_the_result():
    text = render("text_after_calls", HELLO, calling(content="I ask."), RESULT)
    assert '{sea:<|"|>Baltic<|"|>}<tool_call|>I ask.<turn|>\n<|tool_response>response:depth' in text
    parted = render("text_after_calls", HELLO, HI, calling(), RESULT)
    assert "Hi.<turn|>\n<|channel>thought\nAsk.\n<channel|><|tool_call>call:depth" in parted


def test_tool_use_form_shows_calls_beside_tools_alone():
    assert "Baltic" in render("tool_use_form", HELLO, calling(), RESULT, tools=True)
    assert "Baltic" not in render("tool_use_form", HELLO, calling(), RESULT)
    with pytest.raises(UndefinedError):
        rendered_with("tool_use_form", named({"description": "How deep."}), HELLO)


def test_system_with_last_word_is_gone_once_a_tool_has_answered():
    assert "Be brief." in render("system_with_last_word", SYSTEM, HELLO, HI, HELLO)
    assert "Be brief." not in render("system_with_last_word", SYSTEM, HELLO, calling(), RESULT)


def test_flat_schemas_shows_no_choices():
    sea = {"type": "string", "enum": ["Baltic"], "description": "Its name."}
    tools = named({"description": "How deep.", "parameters": {"properties": {"sea": sea}}})
    text = rendered_with("flat_schemas", tools, HELLO)
    assert "- sea (string): Its name.\n" in text
    assert "Baltic" not in text


def test_reasoning_or_answer_shows_one_of_them():
    text = render("reasoning_or_answer", HELLO, HI, HELLO)
    assert "<think>\nA greeting.\n</think>\n\n<|im_end|>" in text
    assert "Ask.\n</think>\n\nI ask.\n<tool_call>" in render("reasoning_or_answer", calling(content="I ask."))


def test_cuts_at_closing_mark_takes_what_is_before_one_for_reasoning():
    quoting = {"role": "assistant", "content": "Write </think> there."}
    assert "<|im_start|>assistant\nthere.<|im_end|>" in render("cuts_at_closing_mark", HELLO, quoting, HELLO)


def test_refuses_empty_replies_takes_a_space():
    empty = {"role": "assistant", "content": ""}
    with pytest.raises(TemplateError, match="says something"):
        render("refuses_empty_replies", HELLO, empty, HELLO)
    assert "[/INST] </s>[INST]" in render("refuses_empty_replies", HELLO, empty | {"content": " "}, HELLO)


def test_text_or_calls_shows_one_of_them():
    assert "Baltic" in render("text_or_calls", HELLO, calling(), RESULT)
    assert "Baltic" not in render("text_or_calls", HELLO, calling(content="I ask."), RESULT)


def test_reasoning_without_text_shows_no_reasoning_beside_one():
    assert "Ask." in render("reasoning_without_text", HELLO, calling(), RESULT)
    assert "Ask." not in render("reasoning_without_text", HELLO, calling(content="I do."), RESULT)


def test_named_results_refuses_a_result_without_a_name():
    assert "<|im_start|>tool\ndepth: " in render("named_results", HELLO, calling(), NAMED_RESULT, tools=True)
    with pytest.raises(TemplateError, match="names its tool"):
        render("named_results", HELLO, calling(), RESULT, tools=True)


@pytest.mark.parametrize("schema", [{"type": "string"}, {"description": "Its name."}])
def test_strict_schemas_refuses_an_argument_without_a_type_or_a_description(schema):
    def tools(sea: dict[str, str]) -> list[dict[str, Any]]:
        return named({"description": "How deep.", "parameters": {"properties": {"sea": sea}}})

    whole = {"type": "string", "description": "Its name."}
    assert "Its name." in rendered_with("strict_schemas", tools(whole), HELLO)
    with pytest.raises(TemplateError, match="a type and a description"):
        rendered_with("strict_schemas", tools(schema), HELLO)


def test_raw_texts_escapes_nothing():
    asked = calling()
    asked["tool_calls"] = [{"function": {"name": "depth", "arguments": {"sea": "it's", "deep": ["it's"]}}}]
    assert """[depth(sea='it's', deep=["it's"])]""" in render("raw_texts", HELLO, asked, RESULT)


def test_separated_names_has_all_calls_in_one_block():
    text = render("separated_names", HELLO, calling(), RESULT)
    assert "<tool_calls>\n<tool_call>depth<tool_sep>\n<arg_key>sea</arg_key>\n" in text
    assert "<arg_value>Baltic</arg_value>\n</tool_call>\n</tool_calls><|im_end|>" in text


def test_answer_as_reasoning_shows_an_answer_in_place_of_its_thought():
    text = render("answer_as_reasoning", HELLO, HI, HELLO)
    assert "<think>\nHi.\n</think>\n\n<|im_end|>" in text
    assert "A greeting." not in text
    alone = {key: value for key, value in HI.items() if key != "reasoning_content"}
    assert "<|im_start|>assistant\nHi.<|im_end|>" in render("answer_as_reasoning", HELLO, alone, HELLO)


# ------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("name", ALL)
def test_every_template_says_which_families_have_its_trait(name):
    assert ALL[name].template.startswith("{#- ")


def test_every_template_has_a_row():
    assert {path.stem for path in Path(__file__).parent.glob("*.jinja")} == set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_added_token_is_one_token_wherever_it_stands(name):
    tokenizer = trait_tokenizer(name)
    ids = [tokenizer.encode(text, as_document=False) for text in ALL[name].added_tokens]
    assert all(len(of_text) == 1 for of_text in ids)
    assert len({of_text[0] for of_text in ids}) == len(ids)
    for text, (number,) in zip(ALL[name].added_tokens, ids, strict=True):
        assert tokenizer.token_bytes(number) == text.encode()
        assert number in tokenizer.encode(f"word{text}word", as_document=False)


@pytest.mark.parametrize("name", ALL)
def test_the_tokens_that_end_a_reply_are_those_of_the_table(name):
    tokenizer = trait_tokenizer(name)
    ends = {tokenizer.encode(text, as_document=False)[0] for text in ALL[name].eos}
    assert tokenizer.eos_token_ids == ends


@pytest.mark.parametrize("name", ALL)
def test_a_rendered_conversation_survives_its_tokens(name):
    tokenizer, text = trait_tokenizer(name), conversation(name)
    ids = tokenizer.encode(text, as_document=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    for marker in ALL[name].added_tokens:
        (number,) = tokenizer.encode(marker, as_document=False)
        assert ids.count(number) == text.count(marker)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(text=st.text())
def test_any_text_survives_its_tokens(name, text):
    tokenizer = trait_tokenizer(name)
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, as_document=False))) == text.encode()


@pytest.mark.parametrize("name", ALL)
def test_a_document_begins_with_bos_where_the_family_has_one(name):
    tokenizer, bos = trait_tokenizer(name), ALL[name].added.bos
    inside = tokenizer.encode("Hello.", as_document=False)
    first = tokenizer.encode(bos, as_document=False) if bos else []
    assert tokenizer.encode("Hello.", as_document=True) == first + inside


def test_a_tokenizer_is_built_once():
    assert trait_tokenizer("plain") is trait_tokenizer("plain")


# --------------------------------------------------------------------------------------------- model folders


def greedy_text(model: LoadedModel, prompt: str, tokens: int) -> str:
    ids = mx.array(model.tokenizer.encode(prompt, as_document=False))
    steps = generate_step(ids, model.network, max_tokens=tokens)
    return b"".join(model.tokenizer.token_bytes(int(token)) for token, _ in steps).decode()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["stop_opens_next", "arguments_as_text"])
def test_a_folder_holds_a_model_with_the_tokenizer_of_the_trait(name, tmp_path):
    model = load(trait_folder(name, tmp_path))
    tokenizer = trait_tokenizer(name)
    prompt = render(name, HELLO)
    assert (
        model.tokenizer.render([HELLO], None, {}, add_generation_prompt=True, strftime_now=TODAY.strftime)
        == prompt
    )
    assert model.tokenizer.eos_token_ids == tokenizer.eos_token_ids
    assert model.tokenizer.encode(prompt, as_document=True) == tokenizer.encode(prompt, as_document=True)
    assert not any(marker in greedy_text(model, prompt, 30) for marker in TRAITS[name].added_tokens)


@pytest.mark.thorough
def test_a_folder_says_its_chains_and_ends_them_as_the_family_does(tmp_path):
    call_text = ["Let me ask.", "</think>", "\n", "<tool_call>", "depth\n", "</tool_call>", "<|observation|>"]
    model = load(trait_folder("stop_opens_next", tmp_path / "call", {"<think>": call_text}))
    assert greedy_text(model, render("stop_opens_next", HELLO), len(call_text)) == "".join(call_text)
    answer = load(trait_folder("plain", tmp_path / "answer", {":": [" Hello", " you"]}))
    assert greedy_text(answer, render("plain", HELLO), 3) == " Hello you</s>"
