"""What clients get is the same with drafts as without: streamed, whole, stopped or constrained."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from scripts import tiny_models
from start_llm.engine.earlier_texts import EARLIER_BYTES
from start_llm.engine.pass_times import PASSES, PassTimes
from tests.server.client import CHAT, TEXT, ask, events_in
from tests.serving import Server, serving, tried_once

ASKED = {"prompt": "one two three four five six " * 12, "max_tokens": 80, "temperature": 0}
CHATTED = {
    "messages": [{"role": "user", "content": "Of the sea? " * 20}],
    "max_tokens": 80,
    "temperature": 0.7,
    "seed": 5,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["sea", "land"]},
        "waves": {"type": "array", "items": {"type": "boolean"}},
    },
    "required": ["name", "waves"],
    "additionalProperties": False,
}


@contextmanager
def drafting(folder: Path, how: str) -> Generator[Server]:
    """A server on which passes of sixteen tokens cost as much as those of one."""
    cheap = PassTimes(dict.fromkeys(PASSES, 1.0))
    measured = patch("start_llm.hosting.model_loading.measure_passes", return_value=cheap)
    with tried_once(), measured, serving(folder, speculation=how, max_kv_size=4096) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("qwen3"), hidden=128, layers=2)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Generator[Server]:
    with drafting(folder, "off") as server:
        yield server


@pytest.fixture(scope="module")
def drafted(folder: Path) -> Generator[Server]:
    """It knows the replies already, so drafts are right for the most part."""
    with drafting(folder, "auto") as server:
        for path, body in ((TEXT, ASKED), (CHAT, CHATTED)):
            server.post(path, body)
        yield server


def accepted(server: Server) -> int:
    return server.get("/stats")["speculation"]["accepted_tokens"]


def choice(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return server.post(path, body)["choices"][0]


def streamed(server: Server, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream, and why it ended."""
    reply = ask(server.port, "POST", path, {**body, "stream": True})
    choices = [event["choices"][0] for event in events_in(reply.body) if event != "[DONE]"]
    texts = (part.get("text") or part.get("delta", {}).get("content") or "" for part in choices)
    return "".join(texts), next(part["finish_reason"] for part in choices if part.get("finish_reason"))


CONSTRAINTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.3},
    "a limit": {"max_tokens": 37},
    "filters": {"top_p": 0.9, "min_p": 0.02, "top_k": 12},
}


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize(("path", "body"), [(TEXT, ASKED), (CHAT, CHATTED)], ids=["text", "chat"])
def test_a_reply_is_the_same_whole_and_streamed(
    plain: Server, drafted: Server, path: str, body: dict[str, Any], constraint: str
):
    asked = body | CONSTRAINTS[constraint]
    expected = choice(plain, path, asked)
    text = expected["text"] if path == TEXT else expected["message"]["content"]
    before = accepted(drafted)
    assert choice(drafted, path, asked) == expected
    assert streamed(drafted, path, asked) == (text, expected["finish_reason"])
    assert accepted(drafted) > before


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("place", [25, 40, 90])
def test_a_reply_ends_at_a_stop_string_inside_a_draft(plain: Server, drafted: Server, place: int):
    text = choice(plain, TEXT, ASKED)["text"]
    asked = ASKED | {"stop": [text[place : place + 6]]}
    expected = choice(plain, TEXT, asked)
    assert expected["finish_reason"] == "stop"
    assert len(expected["text"]) <= place
    before = accepted(drafted)
    assert choice(drafted, TEXT, asked) == expected
    assert streamed(drafted, TEXT, asked) == (expected["text"], "stop")
    assert accepted(drafted) > before


@pytest.mark.thorough
def test_log_probabilities_and_counts_are_the_same(plain: Server, drafted: Server):
    asked = ASKED | {"logprobs": 3}
    ours, theirs = drafted.post(TEXT, asked), plain.post(TEXT, asked)
    assert ours["usage"]["completion_tokens"] == theirs["usage"]["completion_tokens"] == 80
    (mine,), (other,) = ours["choices"], theirs["choices"]
    assert mine["logprobs"]["tokens"] == other["logprobs"]["tokens"]
    assert mine["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
    assert mine["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-3)


def test_the_status_page_shows_what_drafts_saved(plain: Server, drafted: Server):
    activity = drafted.get("/activity")["speculation"]
    stats = drafted.get("/stats")["speculation"]
    assert activity["accepted_tokens"] == stats["accepted_tokens"] > 0
    assert activity["drafted_tokens"] == stats["drafted_tokens"]
    assert activity["pays"]
    assert plain.get("/activity")["speculation"] == {
        "pays": False,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "saved_seconds": 0,
    }


def test_memory_is_planned_for_what_earlier_conversations_said(plain: Server, drafted: Server):
    without, with_drafts = (server.get("/stats")["admission"]["usable_bytes"] for server in (plain, drafted))
    assert without - with_drafts == EARLIER_BYTES


@pytest.mark.thorough
def test_structured_output_is_the_same(plain: Server, drafted: Server):
    form = {"type": "json_schema", "json_schema": {"name": "of", "schema": SCHEMA, "strict": True}}
    asked = CHATTED | {"response_format": form}
    expected = choice(plain, CHAT, asked)
    before = accepted(drafted)
    assert choice(drafted, CHAT, asked) == expected
    assert streamed(drafted, CHAT, asked)[0] == expected["message"]["content"]
    assert accepted(drafted) > before
