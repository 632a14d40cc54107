"""A server that is stopped and started again knows its conversations."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.http.test_conversations import CLOSERS, REPLY_TOKENS, Message, system, user, words
from tests.serving import Server, serving

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite"]
"""Plain; windows; recurrent layers; latent."""
CONVERSATIONS = 10

type Client = Callable[[Sequence[Message], int], list[Message]]
"""What it sends of a conversation in a turn."""


def echoes(messages: Sequence[Message], turn: int) -> list[Message]:
    return list(messages)


def respells(messages: Sequence[Message], turn: int) -> list[Message]:
    forms = [lambda text: text, lambda text: f"{text}\n", lambda text: [{"type": "text", "text": text}]]
    return [
        {**message, "content": forms[(turn + place) % 3](message["content"])}
        for place, message in enumerate(messages)
    ]


def dated(messages: Sequence[Message], turn: int) -> list[Message]:
    first = {**messages[0], "content": f"Current time is 10:0{turn}.\n{messages[0]['content']}"}
    return [first, *messages[1:]]


CLIENTS: list[Client] = [echoes, respells, dated]


@dataclass
class Conversation:
    """One conversation, and how many tokens of each of its prompts were computed."""

    messages: list[Message]
    sends: Client
    name: str
    computed: list[int] = field(default_factory=list[int])
    turn: int = 0

    def ask(self, server: Server, question: str) -> None:
        self.messages.append(user(question))
        sent = self.sends(self.messages, self.turn)
        body = {"messages": sent, "max_tokens": REPLY_TOKENS, "temperature": 0, "session_id": self.name}
        answer = server.post("/v1/chat/completions", body)
        usage = answer["usage"]
        self.computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        self.turn += 1


def conversations() -> list[Conversation]:
    rng = random.Random(1)
    return [
        Conversation([system(f"{number} {words(rng, 40)}")], CLIENTS[number % len(CLIENTS)], f"c{number}")
        for number in range(CONVERSATIONS)
    ]


def turn(server: Server, everybody: Sequence[Conversation], number: int) -> None:
    for one in everybody:
        one.ask(server, words(random.Random(f"{one.name} {number}"), 20))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample(2)
def test_ten_conversations_go_on_as_on_a_server_that_never_stopped(
    family: str, tiny_model: TinyModel, tmp_path: Path
):
    folder, stopped, kept = tiny_model(family, hidden=128, layers=2), conversations(), conversations()
    with serving(folder, thinking=False) as server:
        for number in range(3):
            turn(server, kept, number)
    for number in range(3):
        with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
            turn(server, stopped, number)
            stats = server.get("/stats")
            assert stats["ssd"]["rejected_files"] == {}
            assert stats["ssd"]["hits"] == (CONVERSATIONS if number else 0)
            assert stats["ssd"]["conversations"]["rejected_rows"] == 0
    for one, other in zip(stopped, kept, strict=True):
        assert one.messages == other.messages, "the same replies"
        assert all(mine <= theirs + 64 for mine, theirs in zip(one.computed, other.computed, strict=True))


@pytest.mark.parametrize("lost", ["pages", "states", "transcripts", "all"])
def test_either_half_is_right_without_the_other(lost: str, tiny_model: TinyModel, tmp_path: Path):
    folder, everybody = tiny_model("qwen3_5", hidden=128, layers=2), conversations()[:3]
    kept = conversations()[:3]
    with serving(folder, thinking=False) as server:
        for number in range(2):
            turn(server, kept, number)
    with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
        turn(server, everybody, 0)
    for path in list(tmp_path.rglob("*")):
        if path.is_file() and lost in ("all", path.relative_to(tmp_path).parts[0]):
            path.unlink()
    with serving(folder, thinking=False, ssd_folder=str(tmp_path), drain_s=10) as server:
        turn(server, everybody, 1)
    echoing = [(one, other) for one, other in zip(everybody, kept, strict=True) if one.sends is not dated]
    assert all(one.messages == other.messages for one, other in echoing)


def test_another_key_finds_nothing_after_a_restart(tiny_model: TinyModel, tmp_path: Path):
    from tests.server.client import CHAT
    from tests.server.client import ask as call

    folder, computed = tiny_model("qwen3"), list[int]()
    body = {"messages": [system("Tenants"), user("Fish?")], "max_tokens": 4, "temperature": 0}
    for key in ("one", "two", "one"):
        with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
            usage = call(server.port, "POST", CHAT, body, {"Authorization": f"Bearer {key}"}).json["usage"]
            computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert computed[0] == computed[1] > 50
    assert computed[2] <= CLOSERS


def test_a_stored_response_is_gone_on_from(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3")
    body: dict[str, Any] = {"input": "Tell me of the sea. " * 10, "max_output_tokens": 4}
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        first = server.post("/v1/responses", body)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        second = server.post("/v1/responses", {**body, "input": "More.", "previous_response_id": first["id"]})
    known = second["usage"]["input_tokens_details"]["cached_tokens"]
    assert known >= first["usage"]["total_tokens"] - 1


def test_a_second_server_on_the_folder_says_so_and_serves(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3")
    with (
        serving(folder, ssd_folder=str(tmp_path)) as first,
        serving(folder, ssd_folder=str(tmp_path)) as second,
    ):
        assert "stays off" in second.printed()
        assert first.get("/stats")["ssd"]["state"] in ("on", "scanning")
        assert second.get("/stats")["ssd"]["state"].startswith("off: process ")
        assert second.post("/v1/completions", {"prompt": "Fish", "max_tokens": 3})["choices"]


def test_a_damaged_database_is_begun_again(tiny_model: TinyModel, tmp_path: Path):
    folder, one = tiny_model("qwen3"), conversations()[0]
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        one.ask(server, "Fish?")
    (path,) = (tmp_path / "transcripts").glob("*.db")
    path.write_bytes(path.read_bytes()[:3000] + b"x" * 500)
    with serving(folder, ssd_folder=str(tmp_path), drain_s=10) as server:
        assert server.get("/stats")["ssd"]["conversations"]["resets"] == 1
        one.ask(server, "Boats?")
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
