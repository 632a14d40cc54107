"""Thoughts come as thoughts, live, and only if they were asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import Hearing
from tests.http.forms import ANSWER, FORMS, PROSE, THINKING, THOUGHT, Form
from tests.http.reading import QUESTION, REPORT, Said, hear
from tests.http.scripts import asking, write_model
from tests.server.client import CHAT, Client, engine_is_free, wait_until
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

SWITCHABLE = ["hermes", "qwen_xml", "glm", "gemma4", "dsml"]
OFF: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"thinking": {"type": "disabled"}},
    {"chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_comes_before_the_answer_and_without_its_marks(name, hearing: Hearing):
    heard = hearing(name, "thought")
    assert heard.said == Said(content=ANSWER, reasoning=THOUGHT)
    assert heard.kinds == ["reasoning_content", "content"]
    assert len(heard.fragments("reasoning_content")) > 1


@pytest.mark.parametrize("name", THINKING)
def test_a_whole_reply_has_the_thought_under_both_names(name, hearing: Hearing):
    assert hearing(name, "thought").body["choices"][0]["message"] == {
        "role": "assistant",
        "content": ANSWER,
        "refusal": None,
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
    }


@pytest.mark.parametrize("name", THINKING)
def test_the_tokens_of_a_thought_and_its_marks_are_counted(name, hearing: Hearing):
    form = FORMS[name]
    heard = hearing(name, "thought", **REPORT)
    closing = (form.closing or "").removesuffix("<|start|>assistant").rstrip("\n")
    left = len(f"{form.opening}{THOUGHT}{closing}".encode())
    thinking = 0
    for entry in heard.logprobs:
        thinking += left > 0
        left -= len(entry["bytes"])
    assert heard.reasoning_tokens == thinking


@pytest.mark.parametrize("name", THINKING)
def test_a_reply_without_a_thought_has_no_reasoning(name, hearing: Hearing):
    heard = hearing(name, "answer")
    assert heard.said == Said(content=ANSWER)
    assert "reasoning" not in heard.body["choices"][0]["message"]
    assert heard.reasoning_tokens == 0


def test_a_thought_is_read_while_the_model_still_thinks(tmp_path: Path):
    endless = trait_folder("opens_thought", tmp_path)
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
    """A model that thinks where the prompt ends as the template's prompts for thoughts do."""
    form = FORMS[request.param]
    starts = {form.tail: form.thought(THOUGHT) + ANSWER, form.tail_off: PROSE}
    return write_model(tmp_path_factory.mktemp("tails"), form.trait, starts=starts)


@pytest.fixture(scope="module")
def thinker(two_tails: Path) -> Iterator[Server]:
    with serving(two_tails) as server:
        yield server


def test_a_model_is_asked_to_think_if_nobody_says_anything(thinker: Server):
    assert hear(thinker).said == Said(content=ANSWER, reasoning=THOUGHT)


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_a_request_switches_the_thought_off(fields, thinker: Server):
    heard = hear(thinker, **fields)
    assert (heard.said, heard.reasoning_tokens) == (Said(content=PROSE), 0)


def test_the_server_may_have_thoughts_off_unless_a_request_asks_for_one(two_tails: Path):
    with serving(two_tails, thinking=False) as server:
        assert hear(server).said == Said(content=PROSE)
        for fields in ({"enable_thinking": True}, {"reasoning_effort": "low"}):
            assert hear(server, **fields).said == Said(content=ANSWER, reasoning=THOUGHT)


# ------------------------------------------------------------------------------------------------ budgets

LONG_THOUGHT = " ".join(f"Step {number} of many." for number in range(20, 40))
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
"""The last token of what the server writes to close a thought."""
MOST_CLOSING_TOKENS = 6


def long_thinker(form: Form, cut_tail: str) -> dict[str, Any]:
    """It thinks for long, and answers behind the text that closes a thought."""
    return {
        "scripts": {"think": form.thought(LONG_THOUGHT) + form.answer(PROSE)},
        "starts": {cut_tail: ANSWER},
    }


@pytest.mark.parametrize("name", THINKING)
def test_a_thought_is_closed_when_its_budget_is_used_up_and_the_answer_follows(name, tmp_path: Path):
    form = FORMS[name]
    folder = write_model(tmp_path, form.trait, **long_thinker(form, CUT_TAILS[name]))
    with serving(folder) as server:
        whole = hear(server, **asking("think"))
        assert whole.said == Said(content=PROSE, reasoning=LONG_THOUGHT)
        budget = whole.reasoning_tokens // 2
        heard = hear(server, **asking("think"), thinking={"type": "enabled", "budget_tokens": budget})
    assert heard.said.content == ANSWER
    assert heard.said.finish == "stop"
    assert LONG_THOUGHT.startswith(heard.said.reasoning)
    assert 0 < len(heard.said.reasoning) < len(LONG_THOUGHT)
    assert budget <= heard.reasoning_tokens <= budget + MOST_CLOSING_TOKENS
    assert heard.kinds == ["reasoning_content", "content"]


def test_a_budget_that_is_not_used_up_changes_nothing(hearing: Hearing):
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1000}}
    assert hearing("qwen_xml", "thought", **fields).said == hearing("qwen_xml", "thought").said


# ------------------------------------------------------------------------------------------------ endings


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ("ask myself", Said(reasoning=THOUGHT, content=ANSWER)),
        (["\n\n", "\n"], Said(reasoning=THOUGHT, content=ANSWER)),
        (["<", "think", "|"], Said(reasoning=THOUGHT, content=ANSWER)),
        (["nowhere", "I", "52"], Said(reasoning=THOUGHT)),
        ("🌊", Said(reasoning=THOUGHT, content="It is 52 m deep — 深い ")),
        ("深い 🌊 —", Said(reasoning=THOUGHT, content="It is 52 m deep — ")),
        ("deep — 深い 🐟", Said(reasoning=THOUGHT, content=ANSWER)),
    ],
    ids=str,
)
def test_a_stop_string_ends_the_answer_before_it_and_no_thought(name, stop, said, hearing: Hearing):
    assert hearing(name, "thought", stop=stop).said == said


@pytest.mark.parametrize("name", THINKING)
def test_a_limit_in_a_thought_leaves_the_thought_so_far_and_no_answer(name, hearing: Hearing):
    limit = hearing(name, "thought", **REPORT).tokens_until("First I")
    heard = hearing(name, "thought", max_tokens=limit)
    assert (heard.said.content, heard.said.finish) == ("", "length")
    assert "First I" in heard.said.reasoning
    assert THOUGHT.startswith(heard.said.reasoning)
    assert heard.reasoning_tokens == heard.usage["completion_tokens"] == limit


def test_no_event_of_a_stream_holds_a_piece_of_a_mark(hearing: Hearing):
    for name in THINKING:
        heard = hearing(name, "thought")
        texts = [text for kind in heard.kinds for text in heard.fragments(kind)]
        assert not any(sign in text for text in texts for sign in "<>|")
