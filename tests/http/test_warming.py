"""What a known client's conversations begin with is read into memory because somebody asks for it."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from scripts import tiny_models
from start_llm.access.key_limits import KeyLimits
from start_llm.access.tenants import tenant_of_key
from start_llm.commands.warm_client import warm_lines
from start_llm.core.errors import LaunchError
from start_llm.core.events import Failed
from start_llm.engine.generation import Generation
from start_llm.launch.server_info import ServerInfo
from tests.conftest import TinyModel
from tests.server.client import Reply, ask
from tests.serving import Server, serving

RULES = "You are an agent, and work on a project with many files. " * 20
PATH = "/v1/cache/warm"
PI, CLAUDE = {"User-Agent": "pi"}, {"User-Agent": "claude-cli/2.1 (external)"}
ANN, BEN = ({"Authorization": f"Bearer {key}"} for key in ("ann", "ben"))


def begin(server: Server, rules: str, headers: dict[str, str], question: str = "Hi") -> dict[str, Any]:
    """Begin a conversation, and return the receipt."""
    body = {"messages": [{"role": "system", "content": rules}, {"role": "user", "content": question}]}
    body |= {"max_tokens": 2, "return_receipt": True}
    return server.post("/v1/chat/completions", body, headers)["usage"]["receipt"]


def warm(server: Server, headers: dict[str, str], **body: Any) -> list[dict[str, Any]]:
    return server.post(PATH, body, headers)["beginnings"]


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """One that has been restarted: its memory is empty, and the disk has what two keys said before."""
    folder, kept = tiny_model("qwen3_5", hidden=64, layers=4), tmp_path_factory.mktemp("ssd")
    settings: dict[str, Any] = {"idle_work": "off", "ssd_folder": str(kept), "drain_s": 10}
    with serving(folder, **settings) as instance:
        begin(instance, f"pi: {RULES}", PI | ANN)
        begin(instance, f"Claude: {RULES}", CLAUDE | ANN)
        begin(instance, f"Ben's pi: {RULES}", PI | BEN)
    with serving(folder, **settings) as instance:
        yield instance


@pytest.mark.thorough
def test_a_client_s_first_turn_after_a_restart_takes_nothing_from_the_disk(server: Server):
    (receipt,) = warm(server, ANN, programs=["pi"])
    assert receipt["from_disk"] > 0.8 * receipt["prompt_tokens"]
    first = begin(server, f"pi: {RULES}", PI | ANN, "Where are we?")
    assert first["from_disk"] == 0
    assert first["from_memory"] >= receipt["prompt_tokens"] - 1
    (again,) = warm(server, ANN, programs=["pi"])
    assert again["read"] == 0
    assert begin(server, f"Claude: {RULES}", CLAUDE | ANN)["from_disk"] > 100, "nobody asked for this one"


def test_a_key_warms_what_is_its_own(server: Server):
    (receipt,) = warm(server, BEN)
    assert begin(server, f"Ben's pi: {RULES}", PI | BEN)["from_memory"] >= receipt["prompt_tokens"] - 1
    assert warm(server, {"Authorization": "Bearer carl"}) == []
    assert warm(server, BEN, programs=["claude-cli"]) == []


@pytest.mark.thorough
def test_what_is_computed_counts_among_the_tokens_of_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_models.build("qwen3", tmp_path / "model")
    kept = tmp_path / "ssd"
    settings: dict[str, Any] = {"idle_work": "off", "ssd_folder": str(kept), "drain_s": 10}
    with serving(folder, **settings) as server:
        begin(server, f"pi: {RULES}", PI | ANN)
    for path in kept.rglob("*"):
        if path.is_file() and path.suffix != ".db":
            path.unlink()  # the disk has lost the KV, and knows the beginning
    counted: list[tuple[bytes, int]] = []
    monkeypatch.setattr(KeyLimits, "count_tokens", lambda _, key, count: counted.append((key, count)))
    with serving(folder, **settings) as server:
        (receipt,) = warm(server, ANN)
    assert receipt["read"] > 100
    assert counted == [(tenant_of_key("ann").encode(), receipt["read"])]


def refused(server: Server, body: object) -> Reply:
    return ask(server.port, "POST", PATH, body, ANN)


def test_programs_are_texts(server: Server):
    reply = refused(server, {"programs": [1]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "programs[0]")


def test_what_cannot_be_read_is_an_error(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Generation, "take", lambda *_: [Failed("There is no memory for it.")])
    reply = refused(server, {})
    assert reply.status == 500
    assert "no memory" in reply.json["error"]["message"]


def test_the_command_tells_what_was_read(server: Server):
    served = ServerInfo(url=server.url, key="ann", model="default_model", window=4096, reply=100)
    (line,) = warm_lines("claude", served)
    assert " tokens of claude are in memory: " in line
    (line,) = warm_lines("codex", served)
    assert line.endswith("has answered no conversation of codex with this key and default_model yet.")


@pytest.mark.parametrize("path", ["/stats?", "/nothing"])
def test_the_command_tells_why_it_cannot(server: Server, path: str):
    served = ServerInfo(url=server.url + path, key="ann", model="default_model", window=4096, reply=100)
    with pytest.raises(LaunchError, match="refuses it"):
        list(warm_lines("pi", served))


def test_the_command_says_that_no_server_answers():
    served = ServerInfo(url="http://127.0.0.1:9", key="ann", model="m", window=4096, reply=100)
    with pytest.raises(LaunchError, match="does not answer"):
        list(warm_lines("pi", served))
