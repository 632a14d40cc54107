"""Which form the text of a model has is recognized by its files, the strongest evidence first."""

import json
from typing import Any

import pytest

from start_llm.formats import registry
from start_llm.formats.registry import FAMILIES, MODEL_FORMATS, NOTATIONS
from start_llm.prompt.changes import write_as_hermes
from tests.output.corpus.case import Case, outcome_of, split
from tests.prompt.fakes import family_of
from tests.templates.traits import TRAITS

CHATML = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[THINK]", "[/THINK]")
QWEN_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)

OF_TRAITS = {
    "strips_old_reasoning": ("qwen3", "</think>"),
    "opens_reasoning": ("qwen3", "</think>"),
    "stop_opens_next": ("glm4", "</think>"),
    "tools_before_last_user": ("mistral", None),
    "dates": ("llama3", None),
    "no_system": ("generic", None),
    "channels": ("gpt_oss", "<|end|>"),
    "kimi": ("kimi", None),
    "arguments_as_text": ("deepseek", "</think>"),
    "gemma4_channel": ("gemma4", "<channel|>"),
    "hoists_systems": ("qwen3", None),
    "plain": ("generic", None),
    "words_in_system": ("qwen3", "</think>"),
    "effort_words": ("qwen3", "</think>"),
    "minicpm": ("minicpm", None),
    "minimax": ("minimax", "</think>"),
    "nested_arguments": ("minimax_m3", "</mm:think>"),
    "dsml": ("deepseek_v32", "</think>"),
    "seed": ("seed_oss", "</seed:think>"),
    "python_calls": ("lfm2", None),
    "bare_python_calls": ("llama4", None),
    "python_lines": ("olmo3", None),
    "call_list": ("nemotron_h", None),
    "call_list_without_end": ("granite", None),
    "option_without_tools": ("granite", None),
    "call_lines": ("minimax_m1", None),
    "bare_call_list": ("generic", None),
    "role_of_a_call": ("gigachat", None),
    "escaped_texts": ("function_gemma", None),
    "numbered_actions": ("cohere", "<|END_THINKING|>"),
    "open_and_close": ("kimi_k3", "<|close|>think<|sep|>"),
    "strict_channels": ("gpt_oss", "<|end|>"),
    "text_after_calls": ("gemma4", "<channel|>"),
    "tool_use_form": ("qwen3", None),
    "system_with_last_word": ("mistral", None),
    "flat_schemas": ("qwen3", None),
    "reasoning_or_answer": ("qwen3", "</think>"),
    "cuts_at_closing_mark": ("qwen3", "</think>"),
    "refuses_empty_replies": ("mistral", None),
    "text_or_calls": ("qwen3", None),
    "reasoning_without_text": ("qwen3", "</think>"),
    "named_results": ("qwen3", None),
    "strict_schemas": ("qwen3", None),
    "raw_texts": ("lfm2", None),
    "separated_names": ("hunyuan", None),
    "answer_as_reasoning": ("qwen3", "</think>"),
}
"""For each trait the family, and the closing mark of its reasoning."""


@pytest.mark.parametrize("trait", TRAITS)
def test_the_family_of_a_trait_is_recognized_by_its_template_and_tokens(trait):
    family = family_of(trait)
    assert (family.name, family.reasoning and family.reasoning.closing) == OF_TRAITS[trait]


def detect(config: dict[str, Any], template: str, tokens: tuple[str, ...]) -> tuple[str, str | None]:
    family = registry.detect(config, template, tokens)
    return family.name, family.reasoning and family.reasoning.closing


EVERY_MARK = [(model_format.name, mark) for model_format in MODEL_FORMATS for mark in model_format.marks]
KNOWN_BY_TYPE_ALONE = {"xlam"}
"""Formats whose calls are bare JSON or Python: no mark tells them."""


@pytest.mark.parametrize(("name", "mark"), EVERY_MARK)
def test_each_mark_alone_tells_its_format(name, mark):
    assert detect({}, f"{CHATML}{mark}", ())[0] == name
    assert detect({}, CHATML, (mark,))[0] == name


@pytest.mark.parametrize(
    ("name", "kind"),
    [(model_format.name, kind) for model_format in MODEL_FORMATS for kind in model_format.types],
)
def test_a_type_tells_its_format_where_nothing_else_does(name, kind):
    assert detect({"model_type": kind}, CHATML, ())[0] == name


@pytest.mark.parametrize("model", MODEL_FORMATS, ids=lambda model: model.name)
def test_a_template_that_shows_a_format_and_a_call_of_it_tells_it(model):
    assert bool(model.marks) is (model.name not in KNOWN_BY_TYPE_ALONE)
    for notation in model.notations if model.marks else ():
        written = notation.text.write([("read", {"path": "a.py"})]) if notation.text else ""
        assert detect({}, "".join((CHATML, *model.marks, written)), ())[0] == model.name


@pytest.mark.parametrize(
    ("model_type", "template", "tokens", "expected"),
    [
        # Families as they come.
        ("qwen3_moe", f"{CHATML}<tool_call><think></think>", QWEN_TOKENS, ("qwen3", "</think>")),
        ("qwen2", f"{CHATML}<tool_call>", QWEN_TOKENS[:2], ("qwen3", None)),
        ("mistral3", "[INST][TOOL_CALLS][THINK][/THINK]", MISTRAL_TOKENS, ("mistral", "[/THINK]")),
        ("mistral", "[INST][TOOL_CALLS]", MISTRAL_TOKENS[:5], ("mistral", None)),
        ("llama", "<|start_header_id|><|python_tag|>", LLAMA_TOKENS, ("llama3", None)),
        ("gemma3", "<start_of_turn>", ("<start_of_turn>", "<end_of_turn>"), ("generic", None)),
        ("lfm2", f"{CHATML}<|tool_call_start|>", ("<|tool_call_start|>",), ("lfm2", None)),
        ("llama4", "<|header_start|><|python_start|>", (), ("llama4", None)),
        ("llama", "<|start_header_id|>as [func_name1(params_name1=…)]", LLAMA_TOKENS, ("llama4", None)),
        ("gemma3", "<start_of_turn>[func_name1(params_name1=…)]", ("<start_of_turn>",), ("llama4", None)),
        ("olmo3", f"{CHATML}<function_calls><think></think>", (), ("olmo3", "</think>")),
        ("nemotron_h", "<SPECIAL_10>System<TOOLCALL><think></think>", (), ("nemotron_h", "</think>")),
        ("nemotron_h", f"{CHATML}<tool_call><think></think>", (), ("qwen3", "</think>")),
        ("granite", "<|start_of_role|><|tool_call|>", ("<|tool_call|>",), ("granite", None)),
        ("granitemoehybrid", "<|start_of_role|><tool_call>", ("<|tool_call|>",), ("qwen3", None)),
        ("phi3", "<|tool_call|><|/tool_call|>", ("<|tool_call|>", "<|/tool_call|>"), ("phi4", None)),
        ("minimax_m1", "<tool_calls>", (), ("minimax_m1", None)),
        ("longcat_flash", "<longcat_tool_call> <longcat_arg_key>", (), ("longcat", None)),
        ("deepseek_v3", "function call<|role_sep|>", (), ("gigachat", None)),
        ("gemma3_text", "<start_function_call>", (), ("function_gemma", None)),
        ("cohere2", "<|START_ACTION|><|END_THINKING|>", (), ("cohere", "<|END_THINKING|>")),
        ("hunyuan_v1_moe", "<|extra_4|><tool_calls><answer></think>", (), ("hunyuan", "</think>")),
        ("qwen3", f"{CHATML}<tool_call><answer></answer></think>", QWEN_TOKENS, ("qwen3", "</think>")),
        ("hy_v3", "<tool_calls><tool_call><tool_sep><arg_key></think>", (), ("hunyuan", "</think>")),
        ("apertus", "<|tools_prefix|><|inner_suffix|>", (), ("apertus", "<|inner_suffix|>")),
        ("pixtral", "<tool_calls>[BEGIN FINAL RESPONSE]", (), ("apriel", "[BEGIN FINAL RESPONSE]")),
        ("internlm3", f"{CHATML}<|plugin|><|action_start|>", (), ("internlm", None)),
        ("step3_text", "<｜tool_calls_begin｜><steptml:invoke></think>", (), ("step3", "</think>")),
        ("ernie4_5_moe", f"{CHATML}<tool_call></think><response>\n", (), ("ernie", "</think>")),
        ("ernie4_5_moe", f"{CHATML}<tool_call></think><response>\\n", (), ("ernie", "</think>")),
        ("granite", "<|tool_call|><response></response></think>", (), ("granite", "</think>")),
        # Fine-tunes keep the architecture and the vocabulary, and write otherwise.
        ("llama", f"{CHATML}<tool_call>", LLAMA_TOKENS, ("qwen3", None)),
        ("mistral", f"{CHATML}<tool_call>", MISTRAL_TOKENS[:5], ("qwen3", None)),
        ("mistral", f"{CHATML}<tool_call></think>", MISTRAL_TOKENS, ("qwen3", "</think>")),
        ("qwen2", "<|start_header_id|>", QWEN_TOKENS, ("llama3", "</think>")),
        ("llama", "<|start_header_id|></think>", LLAMA_TOKENS, ("llama3", "</think>")),
        ("mistral", "[INST][TOOL_CALLS]</think>", MISTRAL_TOKENS, ("mistral", "</think>")),
        ("gemma3", "<|channel|>analysis<|end|>", (), ("gpt_oss", "<|end|>")),
        ("qwen2", "<｜tool▁calls▁begin｜></think>", QWEN_TOKENS, ("deepseek", "</think>")),
        ("qwen3", "<minimax:tool_call><tool_call></think>", QWEN_TOKENS, ("minimax", "</think>")),
        ("deepseek_v3", "<｜DSML｜invoke", ("<｜tool▁calls▁begin｜>",), ("deepseek_v32", None)),
        ("llama", "<seed:tool_call></seed:think></think>", (), ("seed_oss", "</seed:think>")),
        ("gemma4", f"{CHATML}<tool_call>", ("<|channel>", "<channel|>"), ("qwen3", "<channel|>")),
        ("mistral3", f"{CHATML}<tool_call>", MISTRAL_TOKENS, ("qwen3", "[/THINK]")),
        # A template that says nothing: the vocabulary counts, then the architecture.
        ("llama", CHATML, QWEN_TOKENS, ("qwen3", "</think>")),
        ("llama", CHATML, ("<|im_start|>",), ("llama3", None)),
        ("glm4_moe", "", (), ("glm4", None)),
        ("kimi_k2", "", (), ("kimi", None)),
        ("kimi_k3", "", (), ("kimi_k3", None)),
        ("kimi_k3", "<|open|>think<|sep|><|close|>think<|sep|>", (), ("kimi_k3", "<|close|>think<|sep|>")),
        ("ministral", "", (), ("mistral", None)),
        ("minicpm3", "", (), ("minicpm", None)),
        ("minimax_m2", "", (), ("minimax", None)),
        ("minimax_m3", "", (), ("minimax_m3", None)),
        ("minimax_m3_vl", "]<]minimax[>[<tool_call></mm:think>", (), ("minimax_m3", "</mm:think>")),
        ("deepseek_v32", "", (), ("deepseek_v32", None)),
        ("deepseek_v4", "", (), ("deepseek_v32", None)),
        ("deepseek_v3", "", (), ("deepseek", None)),
        ("seed_oss", "", (), ("seed_oss", None)),
        ("gpt_oss", "", (), ("gpt_oss", None)),
        ("xlam", "", (), ("xlam", None)),
        ("gemma4", "", (), ("gemma4", None)),
        ("phi3", "", ("</think>",), ("generic", "</think>")),
        ("", "", (), ("generic", None)),
    ],
)
def test_a_model_is_recognized_by_the_strongest_evidence(model_type, template, tokens, expected):
    assert detect({"model_type": model_type}, template, tokens) == expected


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 7}])
def test_a_config_without_a_type_is_no_evidence(config):
    assert detect(config, "", ()) == ("generic", None)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_that_knows_no_mark_of_reasoning_has_none(name):
    family = registry.family_by_name(name)
    kept = registry.detect({"model_type": name}, "", ())
    assert kept.reasoning is None
    assert not kept.orphan_close
    assert (kept.name, kept.formats, kept.call_ids) == (family.name, family.formats, family.call_ids)


def test_the_marks_of_the_template_count_more_than_those_of_the_vocabulary():
    both = ("[/THINK]", "</think>", "[TOOL_CALLS]")
    assert detect({}, "[TOOL_CALLS]</think>", both) == ("mistral", "</think>")
    assert detect({}, "[TOOL_CALLS][/THINK]", both) == ("mistral", "[/THINK]")
    assert detect({}, "[TOOL_CALLS]", both) == ("mistral", "[/THINK]")


def test_glm_closes_reasoning_in_its_own_way():
    family = registry.detect({}, "<arg_key></think>", ())
    assert family.orphan_close
    assert family.reasoning is not None
    assert family.reasoning.cut == "</think>"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_name_that_a_user_may_say_is_a_family(name):
    assert registry.family_by_name(name).name == name


def test_every_family_has_a_name_that_a_user_may_say():
    formats = (*registry.MODEL_FORMATS, registry.GENERIC)
    assert list(FAMILIES) == [model_format.name for model_format in formats]
    with pytest.raises(KeyError):
        registry.family_by_name("gpt5")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_format_of_a_family_exists(name):
    assert set(registry.family_by_name(name).formats) <= NOTATIONS.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_that_is_cut_is_closed(name):
    marks = registry.family_by_name(name).reasoning
    assert marks is None or marks.closing in marks.cut


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"gpt_oss"}))
def test_a_call_that_is_written_for_a_template_that_shows_none_is_read_behind_text(name):
    family = registry.family_by_name(name)
    write = family.write_calls or write_as_hermes
    case = Case(name=name, text=f"I look.\n\n{write([('read', {'path': 'a', 'limit': 2})])}", family=family)
    outcome = outcome_of(split(case, [case.text]))
    assert outcome.content == "I look."
    assert [(tool, json.loads(given)) for tool, given in outcome.closed_calls] == [
        ("read", {"path": "a", "limit": 2})
    ]


def test_the_form_that_a_template_names_is_written():
    call = [("read", {"path": "a"})]
    named = registry.detect({"model_type": "qwen3"}, f"{CHATML}<function=", ())
    usual = registry.detect({"model_type": "qwen3"}, CHATML, ())
    assert usual.write_calls is None
    assert named.write_calls
    assert "<function=read>" in named.write_calls(call)
    bare = registry.detect({"model_type": "llama"}, "<|python_tag|>", ())
    assert bare.write_calls is None
