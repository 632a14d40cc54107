"""Which form the text of a model has is told from its files, the strongest evidence first."""

from typing import Any

import pytest

from start_llm.core.family import FAMILY_NAMES
from start_llm.models import families
from start_llm.output.tool_calls import FORMATS
from tests.templates.traits import TRAITS, trait_tokenizer

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
    "strips_old_thoughts": ("qwen3", "</think>"),
    "opens_thought": ("qwen3", "</think>"),
    "stop_opens_next": ("glm4", "</think>"),
    "tools_before_last_user": ("mistral", None),
    "dates": ("llama3", None),
    "no_system": ("generic", None),
    "channels": ("gpt_oss", "<|end|>"),
    "kimi": ("kimi", None),
    "arguments_as_text": ("generic", "</think>"),
    "gemma4_channel": ("gemma4", "<channel|>"),
    "hoists_systems": ("qwen3", None),
    "plain": ("generic", None),
    "minicpm": ("minicpm", None),
}
"""For each trait the family, and the closing mark of its thoughts."""


@pytest.mark.parametrize("trait", TRAITS)
def test_the_family_of_a_trait_is_told_from_its_template_and_tokens(trait):
    tokenizer = trait_tokenizer(trait)
    family = families.detect({}, tokenizer.chat_template, tokenizer.added_tokens)
    assert (family.name, family.thought and family.thought.closing) == OF_TRAITS[trait]


def detect(config: dict[str, Any], template: str, tokens: tuple[str, ...]) -> tuple[str, str | None]:
    family = families.detect(config, template, tokens)
    return family.name, family.thought and family.thought.closing


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
        # Fine-tunes keep the architecture and the vocabulary, and write otherwise.
        ("llama", f"{CHATML}<tool_call>", LLAMA_TOKENS, ("qwen3", None)),
        ("mistral", f"{CHATML}<tool_call>", MISTRAL_TOKENS[:5], ("qwen3", None)),
        ("mistral", f"{CHATML}<tool_call></think>", MISTRAL_TOKENS, ("qwen3", "</think>")),
        ("qwen2", "<|start_header_id|>", QWEN_TOKENS, ("llama3", "</think>")),
        ("llama", "<|start_header_id|></think>", LLAMA_TOKENS, ("llama3", "</think>")),
        ("mistral", "[INST][TOOL_CALLS]</think>", MISTRAL_TOKENS, ("mistral", "</think>")),
        ("gemma3", "<|channel|>analysis<|end|>", (), ("gpt_oss", "<|end|>")),
        # A template that says nothing: the vocabulary counts, then the architecture.
        ("llama", CHATML, QWEN_TOKENS, ("qwen3", "</think>")),
        ("llama", CHATML, ("<|im_start|>",), ("llama3", None)),
        ("glm4_moe", "", (), ("glm4", None)),
        ("kimi_k2", "", (), ("kimi", None)),
        ("ministral", "", (), ("mistral", None)),
        ("minicpm3", "", (), ("minicpm", None)),
        ("gpt_oss", "", (), ("gpt_oss", None)),
        ("gemma4", "", (), ("gemma4", None)),
        ("phi3", "", ("</think>",), ("generic", "</think>")),
        ("", "", (), ("generic", None)),
    ],
)
def test_a_model_is_told_by_the_strongest_evidence(model_type, template, tokens, expected):
    assert detect({"model_type": model_type}, template, tokens) == expected


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 7}])
def test_a_config_without_a_type_is_no_evidence(config):
    assert detect(config, "", ()) == ("generic", None)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_model_that_knows_no_mark_of_thoughts_has_none(name):
    family = families.named(name)
    kept = families.detect({"model_type": name}, "", ())
    assert kept.thought is None
    assert not kept.orphan_close
    assert (kept.name, kept.formats, kept.call_ids) == (family.name, family.formats, family.call_ids)


def test_the_marks_of_the_template_count_more_than_those_of_the_vocabulary():
    both = ("[/THINK]", "</think>", "[TOOL_CALLS]")
    assert detect({}, "[TOOL_CALLS]</think>", both) == ("mistral", "</think>")
    assert detect({}, "[TOOL_CALLS][/THINK]", both) == ("mistral", "[/THINK]")
    assert detect({}, "[TOOL_CALLS]", both) == ("mistral", "[/THINK]")


def test_glm_closes_a_thought_in_its_own_way():
    family = families.detect({}, "<arg_key></think>", ())
    assert family.orphan_close
    assert family.thought is not None
    assert family.thought.cut == "</think>"


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_name_that_a_user_may_say_is_a_family(name):
    assert families.named(name).name == name


def test_every_family_has_a_name_that_a_user_may_say():
    assert set(families._BY_NAME) == set(FAMILY_NAMES)
    assert len(set(FAMILY_NAMES)) == len(FAMILY_NAMES)
    with pytest.raises(KeyError):
        families.named("gpt5")


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_format_of_a_family_exists(name):
    assert set(families.named(name).formats) <= FORMATS.keys()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_thought_that_is_cut_is_closed(name):
    marks = families.named(name).thought
    assert marks is None or marks.closing in marks.cut
