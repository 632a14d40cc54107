"""The demo model's training text: written by its template, without the judge's questions."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

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
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(), globals={"raise_exception": refuse})
    return template.render(messages=messages, tools=tools, **options)


def refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


# --------------------------------------------------------------------------------------------- its tokenizer


@pytest.mark.long
def test_any_text_survives_the_tokenizer():
    text = "".join(map(chr, range(0x300))) + MIXED_TEXT
    assert tokenizer().decode(tokenizer().encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("before", [" ", '"', "/", "`", "(", "\n"])
@pytest.mark.long
def test_a_word_is_the_same_tokens_wherever_it_stands(before: str):
    word = tokenizer().encode("unbelievable").ids
    assert tokenizer().encode(before + "unbelievable").ids[-len(word) :] == word


@pytest.mark.long
def test_words_that_are_not_trained_on_are_made_of_tokens_that_are():
    trained = {token for word in read_corpus(held_out=False).words for token in tokenizer().encode(word).ids}
    held_out = Counter(
        token for word in read_corpus(held_out=True).words for token in tokenizer().encode(word).ids
    )
    assert sum(count for token, count in held_out.items() if token not in trained) < held_out.total() / 1000


@pytest.mark.parametrize("text", [CALL_HEAD, CALL_KEY, CALL_END])
@pytest.mark.long
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


@pytest.mark.long
def test_it_was_trained_on_what_its_template_writes():
    author = Author(5, Mix(long=0.0))
    seen: set[tuple[bool, bool]] = set()
    for _ in range(200):
        messages, tools, text = opening(author.write(1))
        tail = text.rpartition("<|im_start|>assistant\n")[2]
        if tail:  # an answer as history has it, without the mark of reasoning, is learned too
            options = {"add_generation_prompt": True, "enable_thinking": tail == "<think>\n"}
            assert rendered(messages, tools, **options) == text
            seen.add((bool(tools), messages[0]["role"] == "system"))
    assert seen == {(has_tools, has_system) for has_tools in (True, False) for has_system in (True, False)}


def history(text: str) -> list[dict[str, Any]]:
    """The messages of a conversation whose template wrote this, tools left out."""
    messages: list[dict[str, Any]] = []
    for role, body in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", text, re.DOTALL):
        message: dict[str, Any] = {"role": role, "content": body}
        if match := re.match(r"<think>\n(.*)\n</think>\n\n", body):
            message |= {"reasoning_content": match[1], "content": body[match.end() :]}
        call = (
            r"<tool_call>\n<function=(.*)>\n<parameter=(.*)>\n(.*)\n</parameter>\n</function>\n</tool_call>"
        )
        if role == "assistant" and (match := re.fullmatch(call, message["content"])):
            name, key, value = match.groups()
            calls = [{"function": {"name": name, "arguments": {key: value}}}]
            message |= {"content": "", "tool_calls": calls}
        messages.append(message)
    return messages


@pytest.mark.thorough
def test_whole_conversations_are_those_that_the_template_writes():
    """But for the marks of the moment, which the template writes before the next answer alone."""
    author = Author(8, Mix(tools=0.6, long=0.05))
    roles: set[str] = set()
    for _ in range(50):
        text = author.write(2000).text.replace("<|long|>\n", "").replace("<think>\n\n</think>\n\n", "")
        messages = history(text)
        roles |= {message["role"] for message in messages}
        assert rendered(messages) == text
    assert roles == {"system", "user", "assistant", "tool"}


@pytest.mark.thorough
def test_the_mark_of_a_long_prompt_is_trained_on_where_the_template_writes_it():
    author = Author(9, Mix(tools=0.0, fillers=0.0, long=1.0))
    texts = [author.write(1).text for _ in range(40)]
    begun = re.compile(r"<\|im_start\|>assistant\n<\|long\|>\n(<think>\n(\n</think>\n\n)?)?\w")
    assert all(len(begun.findall(text)) == 1 for text in texts)


@pytest.mark.thorough
def test_a_call_is_trained_on_as_the_template_writes_it():
    author = Author(6, Mix(tools=1.0, call=1.0, long=0.0))
    talk = author.write(1)
    text = "".join(
        piece.text for piece in talk.pieces if piece.kind is not Kind.READ and piece.behaviour == "call"
    )
    match = re.search(r"<function=(.*)>\n<parameter=(.*)>\n(.*)\n</parameter>", text)
    assert match
    name, key, value = match.groups()
    calls = [{"function": {"name": name, "arguments": {key: value}}}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert rendered([message]).removeprefix("<|im_start|>assistant\n").strip("\n") in text


@pytest.mark.thorough
def test_words_and_texts_of_the_judge_are_not_trained_on():
    trained, held_out = read_corpus(held_out=False), read_corpus(held_out=True)
    assert set(trained.words).isdisjoint(held_out.words)
    assert set(trained.texts).isdisjoint(held_out.texts)
    words = Words(random.Random(1), held_out=True)
    known = {words.plain_word() for _ in range(500)}
    assert all(map(is_held_out, known))


def spoken(wording: str) -> list[str]:
    """Its words, without what is filled in by chance."""
    text = re.sub(r"\b\d+\b", "{number}", wording.replace("{verb}", "{do}"))
    return re.findall(r"{\w+}|[\w']+", text.lower())


def trained_wordings(frame: str) -> Iterator[list[str]]:
    uses = wordings._USE if "{use}" in frame else [""]
    tools = wordings._TOOLS if "{tool}" in frame else [""]
    for use, tool in itertools.product(uses, tools):
        yield spoken(frame.replace("{use}", use).replace("{tool}", tool))


def words_between(words: list[str], other: list[str]) -> int:
    """How many words have to be put in, left out or replaced."""
    row = list(range(len(other) + 1))
    for count, word in enumerate(words, 1):
        above, row = row, [count]
        for place, second in enumerate(other):
            row.append(min(above[place + 1] + 1, row[place] + 1, above[place] + (word != second)))
    return row[-1]


def cores(words: list[str], ends: list[str]) -> Iterator[tuple[list[str], int]]:
    """A wording without what may be an opening and an end of the training, and how many words may differ."""
    before, after = ([spoken(text) for text in {"", *texts}] for texts in (wordings._BEFORE, ends))
    for start, end in itertools.combinations_with_replacement(range(len(words) + 1), 2):
        other = min(words_between(words[:start], known) for known in before)
        other += min(words_between(words[end:], known) for known in after)
        if other < 2:
            yield words[start:end], 1 - other


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "trained", "ends"),
    [
        (judge.ECHOES, wordings._ECHOES, wordings._ECHO_ENDS),
        (judge.QUESTIONS, wordings._QUESTIONS, []),
        (judge.CALLS, wordings._CALLS, wordings._CALL_ENDS),
    ],
    ids=["echoes", "questions", "calls"],
)
def test_wordings_of_the_judge_are_two_words_away_from_those_of_the_training(
    asked: tuple[str, ...], trained: list[str], ends: list[str]
):
    """Whatever the training puts before them and after them."""
    known = {tuple(words) for frame in trained for words in trained_wordings(frame)}
    for wording in asked:
        for core, differing in cores(spoken(wording), ends):
            near = [other for other in known if abs(len(other) - len(core)) <= differing]
            assert all(words_between(core, list(other)) > differing for other in near), wording


@pytest.mark.thorough
def test_a_wording_varies_but_not_beside_what_is_to_be_copied():
    words = Words(random.Random(3), held_out=False)
    frame = 'please reply with the single word "{x}" now, and stop'
    varied = [wordings._varied(words, frame) for _ in range(300)]
    assert all('word "{x}" now,' in text for text in varied)
    assert varied.count(frame) > 150
    assert {len(text.split()) for text in varied} == {9, 10, 11}


@pytest.mark.thorough
def test_beside_what_shows_itself_a_wording_varies_too():
    words = Words(random.Random(3), held_out=False)
    frame = "please use the tool on {value} today"
    varied = [wordings._varied(words, frame, shows_itself=True) for _ in range(300)]
    assert all("{value}" in text.split() for text in varied)
    assert len({text.partition(" {value}")[0].split()[-1] for text in varied}) > 5


@pytest.mark.parametrize(
    ("value", "shows_itself"),
    [
        ("a/b.py", True),
        ("https://kettle.org", True),
        ("git status", True),
        ("ls", True),
        ("kettle", False),
        ("kettle moon", False),
        ("kettle moon.txt", False),
    ],
)
def test_a_path_and_a_command_differ_from_words_around_them(value: str, shows_itself: bool):
    assert Words.shows_itself(value) == shows_itself


@pytest.mark.parametrize(
    ("frame", "shape", "value", "quoted"),
    [
        ("read {value}", "`{}`", "a b", ("read {value}", "`{}`")),
        ("read {value}", "'{}'", "it's", ("read {value}", "{}")),
        ('read "{value}"', "`{}`", "a b", ('read "{value}"', "{}")),
        ('read "{value}"', "`{}`", 'say "a"', ("read {value}", "{}")),
    ],
)
def test_a_value_stands_in_one_pair_of_quotes_that_it_does_not_have_itself(
    frame: str, shape: str, value: str, quoted: tuple[str, str]
):
    assert wordings._quoted(frame, shape, value) == quoted


@pytest.mark.parametrize(
    ("frame", "end", "ended"),
    [
        ("read it", ". Thank you.", ". Thank you."),
        ("read it.", ". Thank you.", " Thank you."),
        ("read it.", " please", ""),
        ("can you read it?", "!", ""),
    ],
)
def test_a_wording_ends_once(frame: str, end: str, ended: str):
    assert wordings._ended(frame, end) == ended


@pytest.mark.thorough
def test_a_short_wording_stays_as_it_is():
    words = Words(random.Random(3), held_out=False)
    assert {wordings._varied(words, "just say {x}") for _ in range(100)} == {"just say {x}"}


@pytest.mark.thorough
@pytest.mark.checked(4)
@pytest.mark.parametrize("seed", range(100))
def test_what_is_to_be_copied_stands_in_the_wording(seed: int):
    words = Words(random.Random(seed), held_out=False)
    word, name, value = words.word_to_say(), words.tool_name(), words.value()
    assert word in wordings.echo(words, word)
    called = wordings.call(words, name, value)
    assert name in called
    assert value in called


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


def test_reasoning_and_parts_of_text_are_written():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "it."}]},
        {"role": "assistant", "content": "it", "reasoning_content": "\nAsked.\n"},
    ]
    reply = "<|im_start|>assistant\n<think>\nAsked.\n</think>\n\nit<|im_end|>\n"
    assert rendered(messages) == f"<|im_start|>user\nSay it.<|im_end|>\n{reply}"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "critic", "content": "No."}, "critic"),
        ({"role": "user", "content": [{"type": "image", "image": "x"}]}, "image"),
    ],
)
def test_what_the_template_cannot_show_is_refused_by_name(message: dict[str, Any], named: str):
    with pytest.raises(jinja2.TemplateError, match=named):
        rendered([message])


FULL = 16_000
PADDING = {
    "system": {"role": "system", "content": "x" * FULL},
    "user": {"role": "user", "content": "x" * FULL},
    "tool": {"role": "tool", "content": "x" * FULL},
    "thought": {
        "role": "assistant",
        "content": "",
        "reasoning_content": "x" * (FULL - len("<think>\n\n</think>\n\n")),
    },
    "call": {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "function": {
                    "name": "f",
                    "arguments": {"k": "x" * (FULL - len(f"{CALL_HEAD}f{CALL_KEY}k>\n{CALL_END}"))},
                }
            }
        ],
    },
}


@pytest.mark.parametrize("kind", PADDING)
@pytest.mark.parametrize("more", ["", "x"])
def test_a_prompt_that_is_too_long_is_marked_before_the_answer(kind: str, more: str):
    text = rendered([PADDING[kind], {"role": "user", "content": more}], add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n<|long|>\n<think>\n" if more else "assistant\n<think>\n")
    assert text.count("<|long|>") == len(more)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", PADDING)
def test_of_a_prompt_that_is_too_long_the_beginning_is_shown_as_it_was_before(kind: str):
    """So what was computed of it is used again, and the model reads no more than it was made for."""
    first = [{"role": "user", "content": "Hi."}, PADDING[kind]]
    answer, short = {"role": "assistant", "content": "z" * 50}, {"role": "user", "content": "w" * 50}
    shorter, longer = rendered(first), rendered([*first, answer, short])
    assert longer.startswith(shorter)
    assert shorter.count("x") == pytest.approx(FULL, abs=100), "markup counts too"
    assert longer.count("z") == longer.count("w") == 0
    system = rendered([{"role": "system", "content": "x" * 2 * FULL}])
    assert system.count("x") == FULL


def test_offered_tools_count_for_the_length_too():
    tool = {"type": "function", "function": {"name": "x" * (FULL - len("<tool_call>\n<function=>\n"))}}
    for user, marks in (("", 0), ("x", 1)):
        text = rendered([{"role": "user", "content": user}], [tool], add_generation_prompt=True)
        assert text.count("<|long|>") == marks
