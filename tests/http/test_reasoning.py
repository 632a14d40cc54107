"""Reasoning come as reasoning, live, and only if they were asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Hearing
from tests.http.forms import ANSWER, FORMS, PROSE, REASONING, THINKING, Form
from tests.http.reading import QUESTION, REPORT, ReplyContent, hear
from tests.http.scripts import asking, write_model
from tests.server.client import CHAT, Client, engine_is_free, wait_until
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

pytestmark = pytest.mark.sample(5)

SWITCHABLE = ["hermes", "qwen_xml", "glm", "gemma4", "dsml"]
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_comes_before_the_answer_and_without_its_marks(name, hearing: Hearing):
    heard = hearing(name, "reasoned")
    assert heard.reply == ReplyContent(content=ANSWER, reasoning=REASONING)
    assert heard.kinds == ["reasoning_content", "content"]
    assert len(heard.fragments("reasoning_content")) > 1


@pytest.mark.parametrize("name", THINKING)
def test_a_whole_reply_has_the_reasoning_under_both_names(name, hearing: Hearing):
    assert hearing(name, "reasoned").body["choices"][0]["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "reasoning_content": REASONING,
        "reasoning": REASONING,
    }


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", THINKING)
def test_the_tokens_of_reasoning_and_its_marks_are_counted(name, hearing: Hearing):
    form = FORMS[name]
    heard = hearing(name, "reasoned", **REPORT)
    closing = (form.closing or "").removesuffix("<|start|>assistant").rstrip("\n")
    left = len(f"{form.opening}{REASONING}{closing}".encode())
    thinking = 0
    for entry in heard.logprobs:
        thinking += left > 0
        left -= len(entry["bytes"])
    assert heard.reasoning_tokens == thinking


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.sample(10)
def test_a_reply_without_reasoning_has_no_reasoning(name, hearing: Hearing):
    heard = hearing(name, "answer")
    assert heard.reply == ReplyContent(content=ANSWER)
    assert "reasoning" not in heard.body["choices"][0]["message"]
    assert heard.reasoning_tokens == 0


@pytest.mark.thorough
def test_reasoning_is_read_while_the_model_still_thinks(tmp_path: Path):
    endless = trait_folder("opens_reasoning", tmp_path)
    with serving(endless) as server, Client(server.port) as client:
        client.request("POST", CHAT, {"messages": QUESTION, "stream": True, "max_tokens": 100_000})
        assert client.head()[0] == 200
        deltas = (event["choices"][0]["delta"] for event in client.events())
        assert next(delta for delta in deltas if delta.get("reasoning_content"))
        assert not engine_is_free(server.port)
        client.close()
        wait_until(lambda: engine_is_free(server.port), within_s=10)


# -------------------------------------------------------------------------------------------- on and off


@pytest.fixture(scope="module", params=SWITCHABLE)
def two_tails(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that thinks where the prompt ends as the template's prompts for reasoning do."""
    form = FORMS[request.param]
    starts = {form.tail: form.reasoning(REASONING) + ANSWER, form.tail_off: PROSE}
    return write_model(tmp_path_factory.mktemp("tails"), form.trait, starts=starts)


@pytest.fixture(scope="module")
def thinker(two_tails: Path) -> Iterator[Server]:
    with serving(two_tails) as server:
        yield server


def test_a_model_is_asked_to_think_if_nobody_says_anything(thinker: Server):
    assert hear(thinker).reply == ReplyContent(content=ANSWER, reasoning=REASONING)


@pytest.mark.sample(10)
@pytest.mark.parametrize("fields", OFF, ids=str)
def test_a_request_switches_the_reasoning_off(fields, thinker: Server):
    heard = hear(thinker, **fields)
    assert (heard.reply, heard.reasoning_tokens) == (ReplyContent(content=PROSE), 0)


def test_the_server_may_have_reasoning_off_unless_a_request_asks_for_one(two_tails: Path):
    with serving(two_tails, thinking=False) as server:
        assert hear(server).reply == ReplyContent(content=PROSE)
        for fields in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
            assert hear(server, **fields).reply == ReplyContent(content=ANSWER, reasoning=REASONING)


# ------------------------------------------------------------------------------------------------ budgets

LONG_REASONING = " ".join(f"Step {number} of many." for number in range(20, 40))
CUT_TAILS = {
    "hermes": "\n\n",
    "qwen_xml": "\n\n",
    "glm": "</think>",
    "gemma4": "<channel|>",
    "dsml": "</think>",
    "seed": "</seed:think>",
    "deepseek": "\n\n",
    "minimax_m3": "</mm:think>",
    "harmony": "<|message|>",
    "cohere": "<|END_THINKING|>",
}
"""The last token of what the server writes to close reasoning."""
MAX_CLOSING_TOKENS = 6


def long_thinker(form: Form, cut_tail: str) -> dict[str, Any]:
    """It thinks for long, and answers after the text that closes reasoning."""
    return {
        "scripts": {"think": form.reasoning(LONG_REASONING) + form.answer(PROSE)},
        "starts": {cut_tail: ANSWER},
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_closed_when_its_budget_is_used_up_and_the_answer_follows(name, tmp_path: Path):
    form = FORMS[name]
    folder = write_model(tmp_path, form.trait, **long_thinker(form, CUT_TAILS[name]))
    with serving(folder) as server:
        whole = hear(server, **asking("think"))
        assert whole.reply == ReplyContent(content=PROSE, reasoning=LONG_REASONING)
        budget = whole.reasoning_tokens // 2
        heard = hear(server, **asking("think"), thinking={"type": "enabled", "budget_tokens": budget})
    assert heard.reply.content == ANSWER
    assert heard.reply.finish == "stop"
    assert LONG_REASONING.startswith(heard.reply.reasoning)
    assert 0 < len(heard.reply.reasoning) < len(LONG_REASONING)
    assert budget <= heard.reasoning_tokens <= budget + MAX_CLOSING_TOKENS
    assert heard.kinds == ["reasoning_content", "content"]


def test_a_budget_that_is_not_used_up_changes_nothing(hearing: Hearing):
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1000}}
    assert hearing("qwen_xml", "reasoned", **fields).reply == hearing("qwen_xml", "reasoned").reply


# ------------------------------------------------------------------------------------------------ endings


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(
    ("stop", "reply"),
    [
        ("ask myself", ReplyContent(reasoning=REASONING, content=ANSWER)),
        (["\n\n", "\n"], ReplyContent(reasoning=REASONING, content=ANSWER)),
        (["<", "think", "|"], ReplyContent(reasoning=REASONING, content=ANSWER)),
        (["nowhere", "I", "52"], ReplyContent(reasoning=REASONING)),
        ("🌊", ReplyContent(reasoning=REASONING, content="It is 52 m deep — 深い ")),
        ("深い 🌊 —", ReplyContent(reasoning=REASONING, content="It is 52 m deep — ")),
        ("deep — 深い 🐟", ReplyContent(reasoning=REASONING, content=ANSWER)),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_answer_before_it_and_no_reasoning(name, stop, reply, hearing: Hearing):
    assert hearing(name, "reasoned", stop=stop).reply == reply


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_a_limit_in_reasoning_leaves_the_reasoning_so_far_and_no_answer(name, hearing: Hearing):
    limit = hearing(name, "reasoned", **REPORT).tokens_until("First I")
    heard = hearing(name, "reasoned", max_tokens=limit)
    assert (heard.reply.content, heard.reply.finish) == ("", "length")
    assert "First I" in heard.reply.reasoning
    assert REASONING.startswith(heard.reply.reasoning)
    assert heard.reasoning_tokens == heard.usage["completion_tokens"] == limit


@pytest.mark.thorough
def test_no_event_of_a_stream_holds_a_piece_of_a_mark(hearing: Hearing):
    for name in THINKING:
        heard = hearing(name, "reasoned")
        texts = [text for kind in heard.kinds for text in heard.fragments(kind)]
        assert not any(sign in text for text in texts for sign in "<>|")
