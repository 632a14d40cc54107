"""What the next request will begin with is read while nobody waits, and nothing else changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import EngineDied, Overloaded
from start_llm.engine.engine import Engine
from start_llm.serving import read_ahead
from tests.conftest import TinyModel
from tests.serving import Server, serving

FAMILIES = ["qwen3", "qwen3_5", "gemma3_text", "glm4_moe_lite"]
"""Dense, hybrid, sliding window, latent."""
RULES = "You work on a project. " * 12
REPLY = 60
SESSION = {"session_id": "one"}


def carrier(number: int) -> dict[str, str]:
    """OpenClaw's last message, which the next request does not have."""
    text = f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nRuns: {number}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    return {"role": "user", "content": text}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_SETTLES_S", 0.01)


@contextmanager
def served(folder: Path, **settings: Any) -> Generator[Server]:
    with serving(folder, idle_work="on", **settings) as server:
        yield server


def ask(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "max_tokens": REPLY, "temperature": 0, **SESSION, **more}
    return server.post("/v1/chat/completions", body)


def computed(reply: dict[str, Any]) -> int:
    usage = reply["usage"]
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]


def idle(server: Server) -> dict[str, Any]:
    return server.get("/stats")["idle_work"]


def until(holds: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def turn(server: Server, messages: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Ask with a carrier behind what was said, and add the reply to that."""
    reply = ask(server, [*messages, carrier(number)])
    messages += [reply["choices"][0]["message"], {"role": "user", "content": f"Go on with step {number}."}]
    return reply


def beginning() -> list[dict[str, Any]]:
    return [{"role": "system", "content": RULES}, {"role": "user", "content": "Begin."}]


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_behind_a_message_that_goes_is_read_before_the_next_request(
    tiny_model: TinyModel, family: str
):
    folder = tiny_model(family, hidden=64, layers=4)
    replies: dict[str, list[dict[str, Any]]] = {}
    for value in ("on", "off"):
        messages = beginning()
        with serving(folder, idle_work=value) as server:
            turns = replies[value] = []
            for number in range(3):
                turns.append(turn(server, messages, number))
                if value == "on":
                    until(lambda number=number: idle(server)["works"] == number + 1)
            stats = idle(server)
        assert stats["works"] == (3 if value == "on" else 0)
    texts = {value: [item["choices"][0]["message"] for item in turns] for value, turns in replies.items()}
    assert texts["on"] == texts["off"]
    on, off = ([computed(item) for item in replies[value][1:]] for value in ("on", "off"))
    assert all(item <= other - REPLY + 2 for item, other in zip(on, off, strict=True)), (on, off)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_that_could_not_be_recorded_is_read_too(tiny_model: TinyModel, family: str):
    """It ends at a stop string, so it is not all that the model wrote. Its client sends it back as it is."""
    messages = beginning()
    with served(tiny_model(family, hidden=64, layers=2)) as server:
        whole = ask(server, [*messages, carrier(0)])["choices"][0]["message"]["content"]
        until(lambda: idle(server)["works"] == 1)
        cut = whole[len(whole) * 3 // 4 :][:6]
        reply = ask(server, [*messages, carrier(0)], stop=[cut], session_id="stopped")
        until(lambda: idle(server)["works"] == 2)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        after = ask(server, messages, session_id="stopped")
    assert computed(after) < 30 < reply["usage"]["completion_tokens"]


@pytest.mark.thorough
def test_what_was_read_counts_as_used_when_the_next_request_finds_it(tiny_model: TinyModel):
    messages = beginning()
    with served(tiny_model(hidden=64, layers=2)) as server:
        for number in range(3):
            turn(server, messages, number)
            until(lambda number=number: idle(server)["works"] == number + 1)
        work = idle(server)
        computed_in_all = server.get("/stats")["prompt_cache"]["computed_tokens"]
    assert work["read_tokens"] >= 3 * (REPLY - 1)
    assert work["used_tokens"] >= 0.6 * work["read_tokens"], "of three works, two were followed by a request"
    assert computed_in_all > work["read_tokens"]


@pytest.mark.thorough
def test_nothing_is_read_that_is_known_already(tiny_model: TinyModel):
    """Without a carrier all of the reply is in the cache."""
    with served(tiny_model(hidden=64, layers=2)) as server:
        ask(server, beginning())
        time.sleep(0.3)
        assert idle(server)["works"] == 0


def test_nobody_reads_ahead_for_another_session_or_key(tiny_model: TinyModel):
    messages = beginning()
    with served(tiny_model(hidden=64, layers=2)) as server:
        turn(server, messages, 0)
        until(lambda: idle(server)["works"] == 1)
        other = ask(server, [*messages, carrier(1)], session_id="two", user="someone else")
        assert idle(server)["used_tokens"] == 0
    assert computed(other) > 0


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("error", [EngineDied("The engine cannot tell."), Overloaded("Too many wait.")])
def test_an_engine_that_does_not_answer_once_is_asked_again(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    peek, asked = Engine.peek, list[int]()

    def dies_once(self: Engine, request: Any) -> Any:
        asked.append(len(request.prompt))
        if len(asked) == 1:
            raise error
        return peek(self, request)

    monkeypatch.setattr(Engine, "peek", dies_once)
    messages = beginning()
    with served(tiny_model(hidden=64, layers=2)) as server:
        turn(server, messages, 0)
        until(lambda: asked)
        turn(server, messages, 1)
        until(lambda: idle(server)["works"] == 1)


@pytest.mark.thorough
def test_it_stops_with_the_server_in_the_midst_of_its_work(tiny_model: TinyModel):
    messages = beginning()
    with served(tiny_model(hidden=64, layers=2)) as server:
        turn(server, messages, 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


@pytest.mark.long
def test_it_rests_while_little_of_what_it_read_is_used(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(read_ahead, "_MOST_EXPECTED", 1)
    with served(tiny_model(hidden=64, layers=2)) as server:
        for number in range(25):
            messages = [{"role": "user", "content": f"{RULES} {number}"}]
            reply = ask(server, [*messages, carrier(0)], session_id=f"session {number}", max_tokens=30)
            assert reply["usage"]["completion_tokens"] == 30
            until(lambda number=number: idle(server)["works"] > number or idle(server)["is_paused"])
        stats = idle(server)
    assert stats["is_paused"]
    assert stats["works"] < 20
