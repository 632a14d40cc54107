"""The tiny models load and speak through mlx_lm, in every family."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

from scripts import tiny_models

QUESTION = [{"role": "user", "content": "Which fish live in the Baltic Sea, and how deep do they swim?"}]
THINKING = ["<think>", "\nLet me", " look", " at the map.\n", "</think>", "\n\n"]
CALL = [
    "I will ask",
    ".\n",
    "<tool_call>",
    '\n{"name": "depth", "arguments": {"sea": "Baltic"}}\n',
    "</tool_call>",
]
SYSTEM_WITH_TOOLS = """<|im_start|>system
Be brief.

Functions that you may call, one JSON object a line:
<tools>
{"name": "depth"}
</tools>
A call is one JSON object with "name" and "arguments" inside tool_call tags."""
CHAINS = {"\n": THINKING + CALL, "\n\n": CALL}


def load(folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer."""
    model, tokenizer, *_ = mlx_lm.load(str(folder))
    return model, tokenizer


def greedy(folder: Path, tokens: int) -> list[int]:
    model, tokenizer = load(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def reply(folder: Path, *, thinking: bool = True, temperature: float = 0.0) -> str:
    model, tokenizer = load(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, enable_thinking=thinking)
    return mlx_lm.generate(model, tokenizer, prompt, max_tokens=100, sampler=make_sampler(temp=temperature))


def render(folder: Path, messages: list[dict], **options) -> str:
    return load(folder)[1].apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_loads_and_writes_varied_text(tiny_model, family):
    tokens = greedy(tiny_model(family), 40)
    assert len(tokens) == 40
    assert len(set(tokens)) > 20


@pytest.mark.thorough
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.product
def test_a_chain_is_said_word_for_word(chain_model, family, temperature):
    folder = chain_model(CHAINS, family=family, layers=2)
    assert reply(folder, temperature=temperature) == "".join(THINKING + CALL)
    assert reply(folder, temperature=temperature, thinking=False) == "".join(CALL)


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_files_and_another_seed_another_text(tmp_path):
    first, second, other = (tiny_models.build("qwen3", tmp_path / str(i), seed=i // 2) for i in range(3))
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
    assert greedy(first, 8) != greedy(other, 8)


def test_the_answer_depends_on_the_whole_prompt(tiny_model):
    model, tokenizer = load(tiny_model("qwen3"))
    prompts = [
        tokenizer.encode(word + " and the same long ending of both prompts") for word in ("Sea", "Sky")
    ]
    texts = [[token for token, _ in generate_step(mx.array(p), model, max_tokens=8)] for p in prompts]
    assert texts[0] != texts[1]


@pytest.mark.thorough
def test_sampled_text_has_no_markup_and_no_broken_characters(tiny_model):
    mx.random.seed(7)
    text = reply(tiny_model("qwen3"), temperature=1.0)
    assert "\ufffd" not in text
    assert not any(token in text for token in tiny_models.CHATML_TOKENS)


@pytest.mark.thorough
def test_overrides_reach_the_config_of_nested_families_too(tmp_path):
    plain = tiny_models.build("qwen3", tmp_path / "plain", tie_word_embeddings=True)
    nested = tiny_models.build("qwen3_5", tmp_path / "nested", linear_num_value_heads=8)
    assert len(greedy(plain, 4)) == len(greedy(nested, 4)) == 4
    assert json.loads((nested / "config.json").read_text())["text_config"]["linear_num_value_heads"] == 8


def test_generation_config_says_nothing_but_the_end_of_turn(tiny_model):
    folder = tiny_model("qwen3")
    tokenizer = load(folder)[1]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.eos_token_ids == {generation["eos_token_id"]}
    assert tokenizer.bos_token is None


@pytest.mark.thorough
def test_a_model_may_have_other_added_tokens_and_ends(tmp_path):
    added = tiny_models.AddedTokens(
        special=("<bos>", "<turn>", "<end>"), markup=("<call>",), ends=("<turn>", "<end>"), bos="<bos>"
    )
    template = "{{ bos_token }}<turn>{{ messages[0].content }}<turn>"
    chains = {"<turn>": ["Cod", "<call>", " and eel"]}
    folder = tiny_models.build_chain(tmp_path, chains, chat_template=template, added=added)
    tokenizer = load(folder)[1]
    ends = [tokenizer.convert_tokens_to_ids(text) for text in added.ends]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == ends
    assert tokenizer.eos_token_ids == set(ends)
    assert tokenizer.decode(greedy(folder, 4)) == "Cod<call> and eel<turn>"
    document, inside = (tokenizer.encode("Cod", add_special_tokens=special) for special in (True, False))
    assert document == [tokenizer.bos_token_id, *inside]
    assert "<|im_end|>" not in tokenizer.get_vocab()


def test_bytes_may_cut_characters_and_differ_from_their_echo(chain_model):
    pieces = ["A fish ", b"\xf0\x9f", b"\x90\x9f", " in the caf", "é".encode(), b" is open"]
    folder = chain_model({"\n": pieces})
    text = "A fish 🐟 in the café is open"
    assert reply(folder) == text
    tokenizer = load(folder)[1]
    tokens = greedy(folder, len(pieces))
    assert tokenizer.decode(tokens) == tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text) != tokens


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ({"\n": ["a fish", " and", " a bird", " and", " a cat"]}, "two successors"),
        ({"\n": ["hello", " you"], "\n\n": ["hello", " there"]}, "two successors"),
        ({"\n": ["déjà"]}, "give phrase.encode"),
        ({"\n": [f"{n} sheep" for n in range(300)]}, "too long for 32 hidden"),
    ],
)
def test_a_chain_that_cannot_be_said_is_refused(tmp_path, chains, message):
    with pytest.raises(ValueError, match=message):
        tiny_models.build_chain(tmp_path, chains, hidden=32)


def test_prompt_and_reply_are_the_tokens_of_their_history(chain_model):
    folder = chain_model(CHAINS)
    tokenizer = load(folder)[1]
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    call = {"type": "function", "function": {"name": "depth", "arguments": {"sea": "Baltic"}}}
    turn = {"reasoning_content": "Let me look at the map.", "content": "I will ask.", "tool_calls": [call]}
    history = tokenizer.apply_chat_template([*QUESTION, {"role": "assistant"} | turn])
    tokens = greedy(folder, len(THINKING + CALL) + 1)
    assert history == prompt + tokens + tokenizer.encode("\n")


def test_the_template_renders_every_role(tiny_model):
    call = {"type": "function", "function": {"name": "depth", "arguments": {"sea": "Ostsee"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "reasoning_content": "old", "content": "Cod."},
        {"role": "user", "content": [{"type": "text", "text": "How deep?"}, {"type": "image"}]},
        {"role": "assistant", "reasoning_content": "Ask.", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "9 m"},
        {"role": "tool", "content": "8 m"},
    ]
    call_text = '<tool_call>\n{"name": "depth", "arguments": {"sea": "Ostsee"}}\n</tool_call>'
    expected = [
        SYSTEM_WITH_TOOLS,
        f"<|im_start|>user\n{QUESTION[0]['content']}",
        "<|im_start|>assistant\nCod.",
        "<|im_start|>user\nHow deep?<|vision_start|><|image_pad|><|vision_end|>",
        f"<|im_start|>assistant\n<think>\nAsk.\n</think>\n\n{call_text}\n{call_text}",
        "<|im_start|>user\n<tool_response>\n9 m\n</tool_response>\n<tool_response>\n8 m\n</tool_response>",
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ]
    text = render(
        tiny_model("qwen3"),
        messages,
        tools=[{"name": "depth"}],
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert text == "<|im_end|>\n".join(expected)


def test_the_template_refuses_an_unknown_role(tiny_model):
    with pytest.raises(Exception, match="no role wizard"):
        render(tiny_model("qwen3"), [{"role": "wizard", "content": "Abracadabra"}])
