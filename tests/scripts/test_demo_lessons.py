"""What the demo model is trained on: text that its template writes, without what the judge asks with."""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer

from benchmarks import demo_model as judge
from scripts.demo_model import wordings
from scripts.demo_model.conversations import (
    CALL_END,
    CALL_HEAD,
    CALL_KEY,
    Author,
    Conversation,
    Kind,
    Mix,
)
from scripts.demo_model.corpus import is_held_out, read_corpus
from scripts.demo_model.tokenizer import make_tokenizer
from scripts.demo_model.words import Words

TEMPLATE = Path(__file__).resolve().parents[2] / "scripts" / "demo_model" / "chat_template.jinja"
MIXED_TEXT = "Sei kurz. 短く。\x00\x01 naïve 🐟\r\n\n\n<think> \t</tool_call>>\n<parameter="


@cache
def tokenizer() -> Tokenizer:
    return make_tokenizer(1000)


def rendered(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
) -> str:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE.read_text())
    return template.render(messages=messages, tools=tools, **options)


# --------------------------------------------------------------------------------------------- its tokenizer


def test_any_text_survives_the_tokenizer():
    text = "".join(map(chr, range(0x300))) + MIXED_TEXT
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("before", [" ", '"', "/", "`", "(", "\n"])
def test_a_word_is_the_same_tokens_wherever_it_stands(before: str):
    word = tokenizer().encode("unbelievable").ids
    assert tokenizer().encode(before + "unbelievable").ids[-len(word) :] == word


@pytest.mark.parametrize("text", [CALL_HEAD, CALL_KEY, CALL_END])
def test_what_a_call_is_made_of_is_one_token(text: str):
    assert len(tokenizer().encode(text).ids) == 1


# --------------------------------------------------------------------------------------------- its lessons


def opening(talk: Conversation) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Messages and tools of a conversation up to what makes the model answer first, and that as text."""
    answer = next(index for index, piece in enumerate(talk.pieces) if piece.kind is not Kind.READ)
    text = "".join(piece.text for piece in talk.pieces[:answer])
    turns = re.findall(r"<\|im_start\|>(system|user)\n(.*?)<\|im_end\|>\n", text, re.DOTALL)
    messages = [{"role": role, "content": content} for role, content in turns]
    tools: list[dict[str, Any]] = []
    if messages[0]["role"] == "system" and "# Tools\n" in messages[0]["content"]:
        system, _, shown = messages[0]["content"].rpartition("# Tools\n")
        for name, key in re.findall(r"<function=(.*)>\n<parameter=(.*)>\n", shown):
            schema = {"properties": {"other": {}, key: {}}, "required": [key]}
            tools.append({"type": "function", "function": {"name": name, "parameters": schema}})
        messages[0]["content"] = system.removesuffix("\n\n")
        if not messages[0]["content"]:
            del messages[0]
    return messages, tools, text


def test_it_was_trained_on_what_its_template_writes():
    author = Author(5, Mix(long=0.0))
    seen: set[tuple[bool, bool]] = set()
    for _ in range(200):
        messages, tools, text = opening(author.write(1))
        tail = text.rpartition("<|im_start|>assistant\n")[2]
        if tail:  # an answer as history has it, without the mark of a thought, is learned too
            options = {"add_generation_prompt": True, "enable_thinking": tail == "<think>\n"}
            assert rendered(messages, tools, **options) == text
            seen.add((bool(tools), messages[0]["role"] == "system"))
    assert seen == {(has_tools, has_system) for has_tools in (True, False) for has_system in (True, False)}


def test_a_call_is_trained_on_as_the_template_writes_it():
    author = Author(6, Mix(tools=1.0, call=1.0, long=0.0))
    talk = author.write(1)
    said = "".join(
        piece.text for piece in talk.pieces if piece.kind is not Kind.READ and piece.behaviour == "call"
    )
    found = re.search(r"<function=(.*)>\n<parameter=(.*)>\n(.*)\n</parameter>", said)
    assert found
    name, key, value = found.groups()
    calls = [{"function": {"name": name, "arguments": {key: value}}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert rendered([message]).removeprefix("<|im_start|>assistant\n").strip("\n") in said


def test_words_and_texts_of_the_judge_are_not_trained_on():
    trained, held_out = read_corpus(held_out=False), read_corpus(held_out=True)
    assert set(trained.words).isdisjoint(held_out.words)
    assert set(trained.texts).isdisjoint(held_out.texts)
    words = Words(random.Random(1), held_out=True)
    known = {words.plain_word() for _ in range(500)}
    assert all(map(is_held_out, known))


@pytest.mark.parametrize(
    ("asked", "trained"),
    [
        (judge.ECHOES, wordings._ECHOES),
        (judge.QUESTIONS, wordings._QUESTIONS),
        (judge.CALLS, wordings._CALLS),
    ],
)
def test_wordings_of_the_judge_are_not_trained_on(asked: tuple[str, ...], trained: list[str]):
    def plain(text: str) -> str:
        return re.sub(r"\W+", " ", text.lower()).strip()

    spoken = {plain(text.replace("{tool}", "the {name} tool").replace("{do}", "{verb}")) for text in trained}
    assert not {text for text in asked if plain(text) in spoken}


# ------------------------------------------------------------------------------------------- its template


def test_parameters_that_are_not_text_and_tools_without_any_are_written():
    bare = {
        "type": "function",
        "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
    }
    optional = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"limit": {}}}}}
    calls = [{"function": {"name": "find", "arguments": {"limit": 3, "names": ["a"]}}}]
    text = rendered([{"role": "assistant", "content": "Wait.", "tool_calls": calls}], [bare, optional])
    assert "<function=now>\n<tool_call>\n<function=find>\n<parameter=limit>\n<|im_end|>" in text
    assert "Wait.\n<tool_call>\n<function=find>\n<parameter=limit>\n3\n</parameter>\n" in text
    assert '<parameter=names>\n["a"]\n</parameter>\n</function>\n</tool_call><|im_end|>' in text


@pytest.mark.parametrize("characters", [16_000, 16_001])
def test_a_prompt_that_is_too_long_is_marked(characters: int):
    messages = [
        {"role": "system", "content": "x" * 1000},
        {"role": "user", "content": "x" * (characters - 1000)},
    ]
    text = rendered(messages, add_generation_prompt=True)
    assert ("<|long|>" in text) == (characters > 16_000)
