"""The ends of messages: exact for every template and every text, or not given at all."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from start_llm.core.chat import ChatRequest, Json, Message, Thinking
from start_llm.core.family import Family
from start_llm.core.prompt import Prompt
from start_llm.formats.reasoning_marks import THINK
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.client_marks import Broken
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.render import RenderedText
from tests.prompt.fakes import (
    NOON,
    FakeTokenizer,
    WatchedTokenizer,
    call,
    family_of,
    fresh_preparer,
    function,
    prepared,
    preparer_of,
    reply,
    result,
    system,
    text_of,
    user,
)
from tests.slices import examples
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = [pytest.mark.product, pytest.mark.sample(3)]

TOOLS = (function("write", path={"type": "string"}), function("now"))
EVERY_RARE_CHARACTER = "".join(map(chr, range(0x10600, 0x10737)))

# ----------------------------------------------------------------------------------------- one conversation

TALK = (
    system("sysfirst"),
    user("askone"),
    reply("", call("x", path="pathone"), reasoning="thoughtone"),
    result("resultone", "x"),
    reply("textone", reasoning="thoughttwo"),
    user("asktwo"),
    system("syslate"),
    reply("texttwo", call("y", path="pathtwo"), call("z", "now")),
    result("resulttwo", "y"),
    result("resultthree", "z"),
    reply("", call("a", "now")),
    result("", "a"),
    reply("textthree"),
    user("askthree"),
)
WITHOUT_AN_END = {
    # The system text moves to the last user message, which the late one is merged into.
    "tools_before_last_user": {0, 5},
    # The calls of one message stand in two, so its end is that of the second result.
    "dates": {7, 8},
    "strict_channels": {7, 8},
    # Neighbours are merged into one turn, which ends with the last of them.
    "no_system": {0, 5, 8},
    # No token stands between a user message and a system message.
    "arguments_as_text": {5},
    # Nothing but replies ends with a token.
    "plain": {0, 1, 3, 5, 6, 8, 9, 11, 13},
    # No token stands between the two results.
    "minicpm": {8},
    "minimax": {8},
    "dsml": {8},
    "call_list": {8},
}
"""The messages of the conversation that have no boundary; in the other traits each of them has one."""


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("trait", TRAITS)
def test_every_message_with_a_token_after_it_has_an_end(trait, thinking):
    prompt = prepared(trait, *TALK, tools=TOOLS, thinking=Thinking(on=thinking))
    without = set(range(len(TALK))) - {boundary.message for boundary in prompt.boundaries}
    assert without == WITHOUT_AN_END.get(trait, set())


CLOSERS = {
    "strips_old_reasoning": ("<|im_end|>", "</tool_response>", "<|im_end|>", "<|im_end|>"),
    "opens_reasoning": ("<|im_end|>", "</tool_response>", "<|im_end|>", "<|im_end|>"),
    "stop_opens_next": ("<|observation|>", "</tool_response>", "<|user|>", "<|assistant|>"),
    "tools_before_last_user": ("</s>", "[/TOOL_RESULTS]", "</s>", "[/INST]"),
    "dates": ("<|eot_id|>",) * 4,
    "no_system": ("<end_of_turn>",) * 4,
    "channels": ("<|call|>", "<|end|>", "<|end|>", "<|end|>"),
    "kimi": ("<|im_end|>",) * 4,
    "arguments_as_text": (
        "<｜end▁of▁sentence｜>",
        "<｜tool▁output▁end｜>",
        "<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    "gemma4_channel": ("<|tool_response>", '<|"|>', "<turn|>", "<turn|>"),
    "hoists_systems": ("<|im_end|>",) * 4,
    "plain": ("</s>", None, "</s>", None),
    "words_in_system": ("<|im_end|>", "</tool_response>", "<|im_end|>", "<|im_end|>"),
    "effort_words": ("<|im_end|>", "</tool_response>", "<|im_end|>", "<|im_end|>"),
    "minicpm": ("<|im_end|>",) * 4,
    "minimax": ("[e~[",) * 4,
    "nested_arguments": ("[e~[",) * 4,
    "dsml": ("<｜end▁of▁sentence｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜Assistant｜>"),
    "seed": ("<seed:eos>",) * 4,
    "python_calls": ("<|im_end|>",) * 4,
    "bare_python_calls": ("<|eot|>",) * 4,
    "python_lines": ("<|im_end|>",) * 4,
    "call_list": ("<SPECIAL_12>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_11>"),
    "call_list_without_end": ("<|end_of_text|>",) * 4,
    "option_without_tools": ("<|end_of_text|>",) * 4,
    "call_lines": ("<end_of_sentence>",) * 4,
    "bare_call_list": ("<|im_end|>",) * 4,
    "role_of_a_call": ("<|message_sep|>",) * 4,
    "escaped_texts": ("<end_of_turn>", "<escape>", "<end_of_turn>", "<end_of_turn>"),
    "numbered_actions": (
        "<|END_OF_TURN_TOKEN|>",
        "<|END_TOOL_RESULT|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "open_and_close": ("<|end_of_msg|>", "<|close|>", "<|end_of_msg|>", "<|close|>"),
    "strict_channels": ("<|call|>", "<|end|>", "<|end|>", "<|end|>"),
    "text_after_calls": ("<|tool_response>", '<|"|>', "<turn|>", "<turn|>"),
    "tool_use_form": ("<|im_end|>", "</tool_response>", "<|im_end|>", "<|im_end|>"),
    "system_with_last_word": ("</s>", "[/TOOL_RESULTS]", "</s>", "[/INST]"),
    "refuses_empty_replies": ("</s>", "[/TOOL_RESULTS]", "</s>", "[/INST]"),
    "flat_schemas": ("<|im_end|>",) * 4,
    "reasoning_or_answer": ("<|im_end|>",) * 4,
    "cuts_at_closing_mark": ("<|im_end|>",) * 4,
    "text_or_calls": ("<|im_end|>",) * 4,
    "reasoning_without_text": ("<|im_end|>",) * 4,
    "named_results": ("<|im_end|>",) * 4,
    "strict_schemas": ("<|im_end|>",) * 4,
    "raw_texts": ("<|im_end|>",) * 4,
    "separated_names": ("<|im_end|>",) * 4,
    "answer_as_reasoning": ("<|im_end|>",) * 4,
}
"""The texts that end a call, a result, an answer and a question."""


@pytest.mark.parametrize("trait", TRAITS)
def test_a_message_ends_where_its_closer_begins(trait):
    talk = (user("one"), reply("", call("x", path="two")), result("three", "x"), reply("four"), user("five"))
    prompt = prepared(trait, *talk, tools=TOOLS)
    ends = {end.message: end.tokens for end in prompt.boundaries}
    closers = [
        text_of(trait, prompt.tokens.ids[ends[index] : ends[index] + 1]) if index in ends else None
        for index in (1, 2, 3, 4)
    ]
    assert closers == list(CLOSERS[trait])


@pytest.mark.parametrize(
    ("trait", "visible"),
    [
        ("channels", "<|channel|>final<|message|>left"),
        ("strips_old_reasoning", "<|im_start|>assistant\nleft"),
        ("gemma4_channel", "<|turn>model\nleft"),
    ],
)
def test_a_reply_at_the_end_that_goes_on_has_an_end(trait, visible):
    prompt = prepared(trait, user("asked"), reply("left"))
    assert [end.message for end in prompt.boundaries] == [0, 1]
    assert text_of(trait, prompt.tokens.ids[: prompt.boundaries[-1].tokens]).endswith(visible)


# --------------------------------------------------------------------------------------- any conversation

MARKUP = (
    "<|im_end|> </think> <think> <tool_call> </tool_call> </s> [/INST] <|user|> <|end|> <turn|> <|eot_id|> "
    '<end_of_turn> <|"|> <tool_response> \U00010600 \U00010601 \U000106000t\U00010601 </parameter> '
    ' ]]> {"a":1} \\ " \' &lt;'
).split()
SPACE = st.text(" \n\t\u3000", max_size=3)
NOISE = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=4), SPACE), max_size=4).map("".join)
LEAVES = st.one_of(NOISE, st.integers(-9, 9), st.booleans(), st.none(), st.floats(-1, 1, width=16))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NOISE, inner, max_size=2)
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Conversations that a client may send: systems, questions, answers, calls with some of their results.

    Results stand in the order of their calls, as every prompt has them. Every text but the empty ones ends
    with a word of its own.
    """
    talk: list[Message] = [system(draw(NOISE)) for _ in range(draw(st.integers(0, 2)))] + [user(draw(NOISE))]
    for kind in draw(st.lists(st.sampled_from(("user", "system", "assistant", "tool", "calls")), max_size=5)):
        talk += _calls(draw) if kind == "calls" else [_message(draw, kind)]
    return tuple(_with_word(message, index) for index, message in enumerate(_in_order(talk)))


def _in_order(talk: Sequence[Message]) -> list[Message]:
    named = [replace(message, name=str(index)) for index, message in enumerate(talk)]
    return [talk[int(message.name or "")] for message in in_native_form(named, "ordinal")]


def _message(draw: st.DrawFn, role: Any) -> Message:
    reasoning = draw(st.none() | NOISE) if role == "assistant" else None
    return Message(role=role, content=draw(NOISE), reasoning=reasoning)


def _calls(draw: st.DrawFn) -> list[Message]:
    names = draw(st.lists(st.sampled_from(("write", "now")), min_size=1, max_size=3))
    arguments = st.dictionaries(st.sampled_from(("path", "text", "deep")), VALUES, max_size=3)
    calls = [call(f"c{index}", name, **draw(arguments)) for index, name in enumerate(names)]
    answered = draw(st.lists(st.sampled_from(range(len(calls))), max_size=3))
    results = [result(draw(NOISE), f"c{index}") for index in answered]
    return [reply(draw(NOISE), *calls, reasoning=draw(st.none() | NOISE)), *results]


def _with_word(message: Message, index: int) -> Message:
    if not message.content:
        return message
    body = message.content.rstrip()
    return replace(message, content=f"{body}{word_of(index)}{message.content[len(body) :]}")


def word_of(index: int) -> str:
    return f"word{index}word"


def rendered_and_prepared(trait: str, request: ChatRequest) -> tuple[Broken, Prompt, int]:
    """The whole text, the prompt, and how many renderings it took."""
    tokenizer = WatchedTokenizer(trait_tokenizer(trait))
    preparer = Preparer(tokenizer, family_of(trait), now=lambda: NOON)
    preparer._tools.shown(request.tools)  # each tool is rendered by itself when it is seen first
    tokenizer.rendered.clear()
    texts: list[RenderedText] = []
    render = preparer._writer._renderer.render

    def kept(*args: Any) -> RenderedText:
        texts.append(render(*args))
        return texts[-1]

    with patch.object(preparer._writer._renderer, "render", kept):
        prompt = preparer.prepare(request)
    return preparer._client_marks.broken(texts[0].whole), prompt, len(tokenizer.rendered)


WITHOUT_A_TAIL = ("tools_before_last_user", "system_with_last_word", "refuses_empty_replies")
"""Nothing makes the model answer: that has to be found out again each time."""

SHOW_OLD_REASONING = ("reasoning_or_answer", "reasoning_without_text", "answer_as_reasoning")
"""One more rendering tells a short reasoning from other texts with its words."""


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.sample(12)
def test_a_request_takes_three_renderings_and_the_next_one_two(trait):
    """The prompt, the prompt without its tail, and the one with marks. The next tail is that one again."""
    tokenizer = WatchedTokenizer(trait_tokenizer(trait))
    preparer = Preparer(tokenizer, family_of(trait), now=lambda: NOON)
    counts: list[int] = []
    preparer._tools.shown(TOOLS)  # each tool is rendered by itself when it is seen first
    for talk in (TALK, (*TALK, reply("textfour"), user("askfour"))):
        tokenizer.rendered.clear()
        preparer.prepare(ChatRequest(messages=talk, tools=TOOLS))
        counts.append(len(tokenizer.rendered))
    reasoning_texts = trait in SHOW_OLD_REASONING
    assert counts == [3 + reasoning_texts, 2 + reasoning_texts + (trait in WITHOUT_A_TAIL)]


@pytest.mark.sample(18)
@pytest.mark.parametrize("trait", TRAITS)
def test_a_tail_that_is_remembered_is_the_one_that_is_there(trait):
    """Whatever was asked before, and however it ended."""
    preparer = fresh_preparer(trait)
    for thinking in (True, False, True):
        for talk in (TALK, TALK[:3], TALK[:4], (*TALK, reply("<think>"), user("</think>"))):
            request = ChatRequest(messages=talk, tools=TOOLS, thinking=Thinking(on=thinking))
            afresh = fresh_preparer(trait)
            assert preparer.prepare(request) == afresh.prepare(request)


def check(trait: str, request: ChatRequest) -> None:
    """Everything that is true of the boundaries of a prompt."""
    (whole, _, breaks), prompt, renderings = rendered_and_prepared(trait, request)
    thinks = any(message.reasoning for message in request.messages)
    assert renderings <= 4 + thinks, "one more, to tell reasoning from other texts with their words"
    pieces = [whole[start:end] for start, end in zip([0, *breaks], [*breaks, len(whole)], strict=True)]
    encode = partial(trait_tokenizer(trait).encode, as_document=False)
    assert list(prompt.tokens.ids) == [token for piece in pieces for token in encode(piece)]
    counts = [mark.tokens for mark in prompt.boundaries]
    assert all(earlier < later for earlier, later in pairwise(counts))
    assert all(earlier.message < later.message for earlier, later in pairwise(prompt.boundaries))
    for boundary in prompt.boundaries:
        before = text_of(trait, prompt.tokens.ids[: boundary.tokens])
        assert whole.startswith(before)
        check_end(trait, request.messages, boundary.message, before, whole[len(before) :])


def check_end(trait: str, messages: Sequence[Message], index: int, before: str, after: str) -> None:
    message = messages[index]
    closers = TRAITS[trait].added_tokens
    if message.role == "assistant":
        closers = tuple(preparer_of(trait).facts.closers)
    assert after.startswith(closers)
    if message.content:
        assert word_of(index) in before
    later = [other for other in range(index + 1, len(messages)) if messages[other].content]
    assert not any(word_of(other) in before for other in later)


OPTIONS = st.fixed_dictionaries(
    {
        "tools": st.sampled_from(((), TOOLS)),
        "thinking": st.sampled_from((Thinking(), Thinking(on=True), Thinking(on=False))),
    }
)


@pytest.mark.thorough
@pytest.mark.parametrize("trait", TRAITS)
@examples(15, few=4)
@given(messages=conversations(), options=OPTIONS)
@example(messages=(user(f"{EVERY_RARE_CHARACTER}word0word"),), options={})
@example(
    messages=(user("\U00010600\U00010601\U00010610word0word"), reply("word1word"), user("word2word")),
    options={},
)
def test_pieces_are_the_whole_and_ends_are_ends(trait, messages, options):
    check(trait, ChatRequest(messages=messages, **options))


@pytest.mark.sample(12)
@pytest.mark.parametrize("trait", [trait for trait in TRAITS if not preparer_of(trait).facts.moving])
@examples(8, few=4)
@given(messages=conversations(), options=OPTIONS)
def test_a_message_more_changes_nothing_before_an_end(trait, messages, options):
    """But for reasoning, which templates drop once they are old."""
    talk = [replace(message, reasoning=None) for message in messages]
    preparer = preparer_of(trait)
    whole = preparer.prepare(ChatRequest(messages=tuple(talk), **options))
    ends = {end.message: end.tokens for end in whole.boundaries}
    for count in range(1, len(talk)):
        part = preparer.prepare(ChatRequest(messages=tuple(talk[:count]), **options))
        for boundary in part.boundaries:
            if boundary.message in ends:
                assert ends[boundary.message] == boundary.tokens
                assert whole.tokens.ids[: boundary.tokens] == part.tokens.ids[: boundary.tokens]


def test_the_tools_and_the_system_text_move_with_the_last_user_message():
    short, long = (
        prepared("tools_before_last_user", *talk, tools=TOOLS)
        for talk in ((system("s"), user("a")), (system("s"), user("a"), reply("b"), user("c")))
    )
    assert [end.message for end in short.boundaries] == [1]
    assert [end.message for end in long.boundaries] == [1, 2, 3]
    kept = long.boundaries[1].tokens
    assert text_of("tools_before_last_user", long.tokens.ids[:kept]) == "<s>[INST]a[/INST]b"


# ---------------------------------------------------------------------- templates that no trait stands for

CHATML = """
{%- for message in messages -%}
    {{- '<open>' ~ message.role ~ '\\n' ~ message.content -}}
    {%- for call in message.tool_calls or [] -%}
        {{- '<call>' ~ call.function.name ~ call.function.arguments | tojson ~ '</call>' -}}
    {%- endfor -%}
    {{- '<close>\\n' -}}
{%- endfor -%}
{{- '<open>assistant\\n' if add_generation_prompt -}}
"""
ADDED = ("<open>", "<close>", "<call>", "</call>")


def fake_prompt(
    template: str, *messages: Message, tools: Any = (), **tokenizer: Any
) -> tuple[Prompt, list[tuple[int, str]]]:
    """The prompt, and for every end the text before it."""
    fake = FakeTokenizer(template, ADDED, ("<close>",), **tokenizer)
    prompt = Preparer(fake, Family(name="generic")).prepare(ChatRequest(messages=messages, tools=tools))
    ends = [(end.message, fake.decode(prompt.tokens.ids[: end.tokens])) for end in prompt.boundaries]
    return prompt, ends


def test_a_tokenizer_that_cannot_be_cut_has_no_boundaries():
    talk = (user("a"), reply("b"), user("c"))
    assert [message for message, _ in fake_prompt(CHATML, *talk)[1]] == [0, 1, 2]
    prompt, ends = fake_prompt(CHATML, *talk, marks_the_start=True)
    assert ends == []
    text = "<open>user\na<close>\n<open>assistant\nb<close>\n<open>user\nc<close>\n<open>assistant\n"
    assert list(prompt.tokens.ids) == FakeTokenizer(CHATML, ADDED, marks_the_start=True).encode(
        text, as_document=False
    )


def test_tools_that_are_described_are_no_message_of_the_request():
    _, ends = fake_prompt(CHATML, user("a"), reply("b"), tools=TOOLS)
    assert "You have these tools" in ends[0][1]
    assert [message for message, _ in ends] == [0, 1]


def test_a_reply_ends_after_its_last_call_whatever_its_arguments_say():
    _, ends = fake_prompt(
        CHATML, user("a"), reply("text <close>", call("x", a="<close>", b=1), call("y", "now")), user("b")
    )
    assert ends[1][1].endswith("<call>now{}</call>")
    _, ends = fake_prompt(CHATML, user("a"), reply("text", call("x", a={"b": ["<close>"]}, c=" ")), user("b"))
    assert ends[1][1].endswith('<call>write{"a": {"b": ["<close>"]}, "c": " "}</call>')


@pytest.mark.parametrize(
    "look",
    [
        "{%- if '\U00010600' in name %}{{ raise_exception('unknown') }}{% endif -%}",
        "{{- name | length -}}",
    ],
)
def test_a_template_that_looks_at_names_gets_marks_in_texts_only(look):
    template = CHATML.replace("{{- '<call>'", "{%- set name = call.function.name -%}" + look + "{{- '<call>'")
    _, ends = fake_prompt(
        template, user("a"), reply("b", call("x", "now")), reply("", call("x", "now")), user("c")
    )
    assert [message for message, _ in ends] == [0, 3]


def test_a_call_whose_arguments_a_renderer_parses_has_an_end():
    """Arguments that are JSON text, with anything behind it, are no such text any more."""
    template = CHATML.replace(
        "{{- '<call>'",
        "{{- '' if call.function.arguments.endswith('}') else raise_exception('no JSON') -}}{{- '<call>'",
    ).replace("call.function.arguments | tojson", "call.function.arguments")
    _, ends = fake_prompt(template, user("a"), reply("", call("x", a="b", c=["<close>"], d=1)), user("e"))
    assert ends[1] == (1, ends[1][1])
    assert ends[1][1].endswith('<call>write{"a": "b", "c": ["<close>"], "d": 1}</call>')


def test_reasoning_that_begins_where_a_result_ends_is_open():
    """There is no generation prompt after a result: all of it is the result's."""
    opening = "{{- ('<think>' if loop.last else '</think>') if message.role == 'tool' else '' -}}"
    end = "{{- '<close>\\n' -}}"
    template = CHATML.replace(end, f"{end}{opening}").replace(
        "if add_generation_prompt", "if add_generation_prompt and messages[-1].role != 'tool'"
    )
    preparer = Preparer(FakeTokenizer(template, ADDED, ("<close>",)), Family(name="generic", reasoning=THINK))
    talk = (user("a <think>"), reply("", call("x", a="b")), result("c </think>", "x"))
    assert preparer.prepare(ChatRequest(messages=talk, tools=TOOLS)).reasoning_is_open
    assert not preparer.prepare(ChatRequest(messages=talk[:1], tools=TOOLS)).reasoning_is_open


def test_a_reply_whose_call_cannot_be_marked_has_no_end():
    template = CHATML.replace("call.function.name ~ ", "")
    _, ends = fake_prompt(template, user("a"), reply("b", call("x", n=1)), user("c"))
    assert [message for message, _ in ends] == [0, 2]


def test_a_template_that_changes_every_marked_text_has_no_boundaries():
    template = CHATML.replace("message.content -", "message.content ~ message.content | length -")
    prompt, ends = fake_prompt(template, user("a"), reply("b"))
    assert ends == []
    assert len(prompt.tokens) > 10


def test_a_hidden_message_has_no_end_and_takes_none_from_the_one_before():
    template = "{%- for message in messages if not message.name -%}" + CHATML.split("-%}", 1)[1]
    _, ends = fake_prompt(template, user("a"), replace(user("b"), name="hidden"), reply("c"))
    assert [message for message, _ in ends] == [0, 2]


def test_text_that_looks_like_a_closer_is_none():
    nothing_after = (
        "{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content ~ '\\n' -}}{%- endfor -%}"
    )
    _, ends = fake_prompt(nothing_after, user("a"), reply("b <close> c"), user("d <open>"), reply("e"))
    assert ends == []


def test_a_text_that_begins_with_a_closer_closes_nothing():
    nothing_between = "{%- for message in messages -%}{{- message.content -}}{%- endfor -%}{{- '<close>' -}}"
    _, ends = fake_prompt(nothing_between, user("a"), user("<close>b"), user("c"))
    assert [message for message, _ in ends] == [2]


def test_an_empty_message_does_not_lend_its_closer():
    only_replies = (
        "{%- for message in messages -%}{{- message.role ~ ': ' ~ message.content -}}"
        "{{- '<close>' if message.role == 'assistant' -}}{{- '\\n' -}}{%- endfor -%}"
    )
    _, ends = fake_prompt(only_replies, user("a"), reply(""), user("b"), reply("c"), user("d"))
    assert [message for message, _ in ends] == [3]


def test_a_template_that_repeats_a_text_ends_the_message_after_the_last_one():
    template = CHATML.replace("message.content -", "message.content ~ ' / ' ~ message.content -")
    _, ends = fake_prompt(template, user("a"), reply("b"))
    assert [text for _, text in ends] == [
        "<open>user\na / a",
        "<open>user\na / a<close>\n<open>assistant\nb / b",
    ]


JSON_VALUES: tuple[Json, ...] = (
    {},
    {"a": 1},
    {"a": [None, True]},
    {"a": " "},
    {"a": "b"},
    {"a": {"b": "c"}, "d": 2},
)


@pytest.mark.parametrize("arguments", JSON_VALUES, ids=str)
@pytest.mark.parametrize("trait", [trait for trait in TRAITS if trait != "plain"])
def test_a_call_has_an_end_whatever_its_arguments_are(trait, arguments):
    talk = (user("a"), reply("", call("x", **arguments)), result("", "x"), reply("b"))
    prompt = prepared(trait, *talk, tools=TOOLS)
    assert {0, 1, 2} <= {end.message for end in prompt.boundaries}
