"""A server on two ranks, started as a user starts it: it answers, stops, and ends when a rank is gone."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import socket
import threading
import time
import urllib.error
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agent_servers import HttpServer
from start_llm.config.paths import DEMO_MODEL
from tests.agents.agent_account import Rendering
from tests.agents.server_fleet import LEAST_EFFICIENCY, Conversations
from tests.conftest import TinyModel
from tests.ranks.launches import Launched, is_free, runs, until
from tests.ranks.services import HOSTS, ask, begin_reply, chat, is_ready, served
from tests.serving import Server, serving
from tests.vision.seeing import folder_of, picture

pytestmark = pytest.mark.timeout(400)
_PATIENCE_S = 180
_AT_ONCE_S = 5
"""Seconds in which a service ends that has lost a rank."""


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[Launched, int]]:
    """Two ranks that serve the demo model."""
    with served(DEMO_MODEL, tmp_path_factory.mktemp("state")) as service:
        yield service


@pytest.fixture(scope="module")
def alone() -> Generator[Server]:
    """One process that does."""
    with serving(DEMO_MODEL) as server:
        yield server


def three_turns(post: Any) -> list[tuple[str, Any]]:
    """Texts and usage of a conversation."""
    messages = [{"role": "system", "content": "Be brief. " * 40}]
    heard: list[tuple[str, Any]] = []
    for question in ("Which fish live in the Baltic Sea?", "How deep?", "And how old?"):
        messages.append({"role": "user", "content": question})
        reply = post("/v1/chat/completions", chat(messages))
        text = reply["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        heard.append((text, reply["usage"]))
    return heard


@pytest.mark.thorough
def test_a_conversation_is_answered_and_reused_as_by_one_process(together, alone):
    _, port = together
    heard = three_turns(lambda path, body: ask(port, path, body))
    assert heard == three_turns(alone.post)
    assert heard[2][1]["prompt_tokens_details"]["cached_tokens"] > 0


SHAPE = {
    "type": "object",
    "properties": {"fish": {"enum": ["cod", "herring"]}, "deep": {"type": "boolean"}},
    "required": ["fish", "deep"],
    "additionalProperties": False,
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 1.0, "seed": 5},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "fish", "schema": SHAPE}}},
        {"frequency_penalty": 1.5, "logprobs": True, "top_logprobs": 2},
        {"stop": [" "]},
    ],
    ids=["seeded", "grammar", "penalty", "stop"],
)
def test_whatever_a_client_wishes_is_answered_as_by_one_process(together, alone, wish):
    _, port = together
    body = chat([{"role": "user", "content": "Which fish live in the Baltic Sea?"}], **wish)
    heard = ask(port, "/v1/chat/completions", body)["choices"][0]
    expected = alone.post("/v1/chat/completions", body)["choices"][0]
    assert heard["message"]["content"] == expected["message"]["content"]
    assert heard["finish_reason"] == expected["finish_reason"]
    if "response_format" in wish:
        assert re.match(r'\s*{\s*"fish"\s*:\s*"(cod|herring)"', heard["message"]["content"])


@pytest.mark.thorough
def test_a_client_that_goes_away_is_left_and_the_others_are_answered(together):
    _, port = together
    before = ask(port, "/stats")["engine"]["failures"]
    body = json.dumps(chat([{"role": "user", "content": "Count."}], max_tokens=4000, stream=True)).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        assert client.recv(100)
    until(lambda: not ask(port, "/stats")["batch"]["active_rows"], 20, "it is left")
    assert ask(port, "/v1/chat/completions", chat([{"role": "user", "content": "Hello"}]))["choices"]
    assert ask(port, "/stats")["engine"]["failures"] == before


@pytest.mark.thorough
def test_the_model_stays_loaded(together):
    _, port = together
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(port, "/v1/models/demo/unload", {})
    assert refused.value.code == 409


@pytest.mark.thorough
def test_it_says_at_the_start_what_it_does_without(together):
    launch, _ = together
    assert "without embeddings and adapters" in launch.text
    assert "Rank 1 of 2: loading" in launch.text


@pytest.mark.long
def test_agents_cost_two_ranks_what_is_new(together):
    _, port = together
    server = HttpServer(f"http://127.0.0.1:{port}/v1", "any")
    agents = Conversations("two ranks", server, Rendering(DEMO_MODEL), 3, is_named=True)
    played = agents.play(3)
    assert played.efficiency >= LEAST_EFFICIENCY
    assert not played.paid


def stop(launch: Launched) -> None:
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait(60) == 0


@pytest.mark.long
def test_after_a_restart_both_ranks_go_on_from_their_disks(model, tmp_path):
    """All but the last page of rank 1 is there the second time."""
    question = chat([{"role": "user", "content": "Tell me of the sea. " * 60}])
    replies: list[tuple[str, int]] = []
    for _ in range(3):
        with served(model, tmp_path, launcher=HOSTS, SSD_CACHE_DIR=f"{tmp_path}/kv") as (launch, port):
            reply = ask(port, "/v1/chat/completions", question)
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            replies.append((reply["choices"][0]["message"]["content"], cached))
            stop(launch)
        if len(replies) == 2:
            files = [*(tmp_path / "kv.rank1" / "pages").rglob("*.safetensors")]
            assert len(files) == len([*(tmp_path / "kv" / "pages").rglob("*.safetensors")]) > 2
            for path in files[1:]:
                path.unlink()
    texts, (first, second, third) = {text for text, _ in replies}, [cached for _, cached in replies]
    assert len(texts) == 1
    assert first == 0
    assert 0 <= third < second


@pytest.mark.long
def test_what_is_answered_when_the_service_stops_is_answered_to_its_end(model, tmp_path):
    with served(model, tmp_path, launcher=HOSTS, DRAIN_SECONDS="60") as (launch, port):
        body = chat([{"role": "user", "content": "Tell."}], max_tokens=300)
        with ThreadPoolExecutor(1) as threads:
            reply = threads.submit(ask, port, "/v1/chat/completions", body)
            until(lambda: ask(port, "/stats")["batch"]["active_rows"], 60, "a reply is written", launch)
            stop(launch)
            (choice,) = reply.result()["choices"]
    assert choice["finish_reason"] == "length"
    assert "Stopped." in launch.text


@pytest.mark.long
def test_a_rank_that_stands_still_ends_the_service(model, tmp_path):
    variables = {"ENGINE_STALL_SECONDS": "2", "END_WHEN_STUCK": "true"}
    with served(model, tmp_path, launcher=HOSTS, **variables) as (launch, port):
        begin_reply(port)
        pids = [launch.rank(0), launch.rank(1)]
        os.kill(pids[1], signal.SIGSTOP)
        until(lambda: "starts again" in launch.text, 60, "it notices", launch)
        assert "The server is stuck" in launch.text
        assert "It is killed." in launch.text
        until(lambda: not any(map(runs, pids)), 5, "both have ended", launch)
        until(lambda: is_ready(launch, port), _PATIENCE_S, "it is back", launch)
        stop(launch)


# ----------------------------------------------------------------------------------------------------- images


def asked_of(question: str, *pictures: int) -> dict[str, Any]:
    """A question about pictures of these numbers."""
    shown = [base64.b64encode(picture(number, 160, 128).data).decode() for number in pictures]
    images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in shown]
    return {"role": "user", "content": [*images, {"type": "text", "text": question}]}


def shown_turn(messages: list[Any], post: Any, question: str, *pictures: int) -> tuple[str, int]:
    """Ask further, and return the answer and how many tokens were cached."""
    messages.append(asked_of(question, *pictures))
    reply = post("/v1/chat/completions", chat(messages, max_tokens=8))
    text = reply["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": text})
    return text, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.long
def test_pictures_are_seen_once_and_conversations_about_them_survive_a_restart(tmp_path):
    seeing, together, alone = folder_of("qwen3_vl"), list[Any](), list[Any]()
    variables = {"SSD_CACHE_DIR": f"{tmp_path}/kv", "IDLE_WORK": "off"}  # what is counted depends on no clock
    with served(seeing, tmp_path, launcher=HOSTS, **variables) as (launch, port):
        post = partial(ask, port)
        heard = [shown_turn(together, post, "Look. " * 30, 1), shown_turn(together, post, "What is it?")]
        heard.append(shown_turn(together, post, "And this?", 2))
        assert ask(port, "/stats")["images"]["tower_runs"] == 2
        stop(launch)
    with serving(seeing) as server:
        expected = [
            shown_turn(alone, server.post, "Look. " * 30, 1),
            shown_turn(alone, server.post, "What is it?"),
            shown_turn(alone, server.post, "And this?", 2),
        ]
        last = shown_turn(alone, server.post, "Are both alike?")
    assert heard == expected
    with served(seeing, tmp_path, launcher=HOSTS, **variables) as (launch, port):
        text, cached = shown_turn(together, partial(ask, port), "Are both alike?")
        assert text == last[0]
        assert cached > heard[2][1] > heard[1][1] > 0
        assert ask(port, "/stats")["images"]["tower_runs"] == 0
        stop(launch)


@pytest.mark.long
def test_a_rank_that_is_killed_while_pictures_are_read_ends_the_service(tmp_path):
    with served(folder_of("qwen3_vl"), tmp_path) as (launch, port):
        body = chat([asked_of("What are these?", *range(60))])

        def read() -> None:
            with suppress(OSError, http.client.HTTPException):
                ask(port, "/v1/chat/completions", body)

        threading.Thread(target=read, daemon=True).start()
        until(lambda: ask(port, "/stats")["images"]["tower_runs"], 60, "a picture is seen", launch)
        os.kill(launch.rank(1), signal.SIGKILL)
        launch.wait(_AT_ONCE_S)
        assert "Rank 1 at 127.0.0.1 is gone. The service ends." in launch.text
        assert is_free(port)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_is_killed_ends_the_service(model, tmp_path, number):
    with served(model, tmp_path) as (launch, port):
        begin_reply(port)
        pids = [launch.rank(0), launch.rank(1)]
        began = time.monotonic()
        os.kill(pids[number], signal.SIGKILL)
        launch.wait(_AT_ONCE_S)
        assert time.monotonic() - began < _AT_ONCE_S
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert is_free(port)
        if number == 1:
            assert "Rank 1 at 127.0.0.1 is gone. The service ends." in launch.text
            assert "Node with rank 0 exited with code 75" in launch.text


@pytest.mark.long
def test_hosts_serve_come_back_when_one_is_killed_and_stop(model, tmp_path):
    with served(model, tmp_path, launcher=HOSTS) as (launch, port):
        question = chat([{"role": "user", "content": "Tell."}])
        answered = ask(port, "/v1/chat/completions", question)["choices"]
        before = [launch.rank(0), launch.rank(1)]
        os.kill(before[1], signal.SIGKILL)
        until(lambda: "starts again" in launch.text, 2 * _AT_ONCE_S, "it notices")
        until(lambda: is_ready(launch, port), _PATIENCE_S, "it is back", launch)
        assert ask(port, "/v1/chat/completions", question)["choices"] == answered
        pids = [launch.rank(0), launch.rank(1)]
        assert not {*before} & {*pids}
        launch.process.send_signal(signal.SIGTERM)
        assert launch.wait(20) == 0
        assert "Stopped." in launch.text
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert is_free(port)
