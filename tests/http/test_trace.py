"""The trace of a running server: a line for each request, with the figures that its client received."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.tenants import tenant_of_key
from start_llm.telemetry.trace import session_digest
from tests.conftest import TinyModel
from tests.server.client import CHAT, TEXT, Client, ask, wait_until
from tests.serving import Server, serving

WORDS = "Zanzibar quillwort obelisk"
SECRET = "whose-session-is-this"
LONG_PROMPT = list(range(250)) * 240

type Line = dict[str, Any]


class Desk:
    """A server and its trace."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.root = server, root

    def chat(self, messages: Sequence[Any], key: str = "", **more: Any) -> Any:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0, **more}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = ask(self.server.port, "POST", CHAT, body, headers)
        assert reply.status == 200, reply.body
        return reply.json

    def is_quiet(self) -> bool:
        return self.server.get("/stats")["requests"]["in_flight"] == 0

    def files(self) -> list[Path]:
        """All of them, once every request has its line."""
        wait_until(self.is_quiet, within_s=5)
        return sorted(self.root.glob("*/cache-session-*.log"))

    def lines(self) -> list[Line]:
        return [json.loads(line) for file in self.files() for line in file.read_text().splitlines()]


@contextmanager
def traced(folder: Path, root: Path, **settings: Any) -> Generator[Desk]:
    with serving(folder, thinking=False, traces=True, log_root=str(root), **settings) as server:
        yield Desk(server, root)


@pytest.fixture
def desk(tiny_model: TinyModel, tmp_path: Path) -> Generator[Desk]:
    with traced(tiny_model("qwen3"), tmp_path / "traces") as traced_desk:
        yield traced_desk


def system(text: str = "Be brief.") -> Any:
    return {"role": "system", "content": text}


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def talk(desk: Desk, turns: int, **more: Any) -> list[Any]:
    """A conversation; returns the replies."""
    messages, replies = [system()], list[Any]()
    for turn in range(turns):
        messages.append(user(f"{WORDS} {turn}?\n"))
        replies.append(desk.chat(messages, **more))
        content = replies[-1]["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    return replies


@pytest.mark.thorough
def test_three_turns_are_three_lines_of_one_file_with_the_figures_of_the_replies(desk: Desk):
    replies = talk(desk, 3)
    (file,) = desk.files()
    lines = desk.lines()
    assert [line["request_id"] for line in lines] == [reply["id"] for reply in replies]
    for line, reply in zip(lines, replies, strict=True):
        usage = reply["usage"]
        assert (
            line["prompt_tokens"] == usage["prompt_tokens"] == line["cached_tokens"] + line["computed_tokens"]
        )
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert line["completion_tokens"] == usage["completion_tokens"]
        assert line["ending"] == reply["choices"][0]["finish_reason"]
        assert 0 < line["ttft_seconds"] <= line["total_seconds"]
        assert file.name == f"cache-session-{line['session']}.log"
        assert (line["endpoint"], line["session_source"]) == (CHAT, "conversation")
    assert [line["messages"] for line in lines] == [2, 4, 6]
    assert [line["stable_prefix_msg_count"] for line in lines] == [0, 3, 5]
    assert [line["bound_messages"] for line in lines] == [0, 3, 5]
    assert [line["cache_hit"] for line in lines] == [False, True, True]
    assert [line["miss_reason"] for line in lines] == ["new", None, None]
    assert [line["cache_key_delta_chars"] >= turn for turn, line in enumerate(lines, 1)] == [True] * 3
    assert all(line["bound_tokens"] > 0 and line["replaced_tokens"] > 0 for line in lines[1:])


@pytest.mark.thorough
def test_two_sessions_have_two_files_and_so_have_two_tenants_of_one_name(desk: Desk):
    for key, session in (("", "a"), ("", "b"), ("", "a"), ("somebody", "a")):
        desk.chat([user("Hello")], key, session_id=session, parent_session_id="a")
    names = {file.stem: len(file.read_text().splitlines()) for file in desk.files()}
    digests = [session_digest(b"", "a"), session_digest(b"", "b")]
    other = session_digest(tenant_of_key("somebody").encode(), "a")
    assert names == {
        f"cache-session-{name}": count for name, count in zip([*digests, other], (2, 1, 1), strict=True)
    }
    parents = {line["session"]: line["parent_session"] for line in desk.lines()}
    assert parents == {digests[0]: digests[0], digests[1]: digests[0], other: other}


def test_streams_and_texts_are_traced_too(desk: Desk):
    streamed = ask(
        desk.server.port, "POST", CHAT, {"messages": [user("Hello")], "stream": True, "max_tokens": 3}
    )
    assert streamed.status == 200
    whole = ask(desk.server.port, "POST", "/completions", {"prompt": "Hello", "max_tokens": 3}).json
    lines = {line["endpoint"]: line for line in desk.lines()}
    assert lines.keys() == {CHAT, TEXT}
    assert lines[CHAT]["request_id"].encode() in streamed.body
    assert (lines[TEXT]["request_id"], lines[TEXT]["session_source"]) == (whole["id"], "none")


@pytest.mark.long
def test_a_client_that_leaves_has_its_line(desk: Desk):
    with Client(desk.server.port) as client:
        client.request("POST", TEXT, {"prompt": LONG_PROMPT, "stream": True})
        wait_until(lambda: desk.server.get("/stats")["engine"]["prefill"] is not None, within_s=10)
    (line,) = desk.lines()
    assert (line["ending"], line["prompt_tokens"]) == ("cancelled", len(LONG_PROMPT))
    assert line["computed_tokens"] < len(LONG_PROMPT)
    assert (line["ttft_seconds"], line["completion_tokens"]) == (None, 0)


@pytest.mark.long
def test_a_request_that_the_end_of_the_server_cuts_has_its_line(tiny_model: TinyModel, tmp_path: Path):
    with traced(tiny_model("qwen3"), tmp_path) as desk, Client(desk.server.port) as client:
        client.request("POST", TEXT, {"prompt": LONG_PROMPT, "stream": True})
        wait_until(lambda: desk.server.get("/stats")["engine"]["prefill"] is not None, within_s=10)
        assert desk.server.app.close()
    (file,) = tmp_path.glob("*/*.log")
    (line,) = map(json.loads, file.read_text().splitlines())
    assert line["ending"] in ("cancelled", "failed")


def test_nothing_that_a_client_sent_or_received_stands_in_the_trace(desk: Desk):
    replies = talk(desk, 2, session_id=SECRET, metadata={"branch": SECRET}, model=SECRET)
    written = b"".join(path.read_bytes() for path in desk.files())
    text = " ".join(reply["choices"][0]["message"]["content"] for reply in replies)
    words = [word for word in f"{WORDS} {SECRET} {text}".split() if len(word) > 3]
    assert len(words) > 3
    assert not [word for word in words if json.dumps(word)[1:-1].encode() in written]
    assert not [path for path in desk.root.rglob("*") if SECRET in path.name]


@pytest.mark.long
def test_the_counters_of_a_request_are_its_own(tiny_model: TinyModel, tmp_path: Path):
    """A network with state, and branches at places where none was kept: each such branch is one miss."""
    with traced(tiny_model("qwen3_5"), tmp_path) as desk:
        long = [system(" ".join(f"{WORDS} {number}." for number in range(200)))]
        for number in range(4):
            desk.chat([*long, user(f"{number} " * (40 if number else 1))])
        clients = [Client(desk.server.port) for _ in range(3)]
        for number, client in enumerate(clients):
            cut = long[0]["content"][: 3000 + 400 * number]
            client.request("POST", CHAT, {"messages": [system(cut), user("And?")], "max_tokens": 2})
        assert [client.reply().status for client in clients] == [200] * 3
        for client in clients:
            client.close()
        lines = sorted(desk.lines(), key=lambda line: line["time"])
        stats = desk.server.get("/stats")["prompt_cache"]
    name = "hybrid_trim_miss"
    bumps = [line["cache_metrics_bumped_this_request"][name] for line in lines]
    assert [line["miss_reason"] == "no_state" for line in lines] == [bump == 1 for bump in bumps]
    assert sum(bumps) == stats[name] > 0
    assert lines[-1]["cache_metrics_snapshot"][name] == stats[name]


def test_a_trace_that_cannot_be_written_fails_no_request_and_is_reported_once(desk: Desk):
    (day,) = desk.root.iterdir()
    day.rmdir()
    desk.root.rmdir()
    desk.root.write_text("in the way")
    talk(desk, 2)
    wait_until(desk.is_quiet, within_s=5)
    assert desk.server.printed().count("cannot be written") == 1
    assert desk.root.read_text() == "in the way"


def test_a_line_names_the_messages_in_which_something_was_mended(desk: Desk):
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": 5}}
    result = {"role": "tool", "tool_call_id": "c", "content": "cut \ud83d"}
    desk.chat([user("Hello"), {"role": "assistant", "tool_calls": [call]}, result])
    desk.chat([user("Hello")])
    assert sorted(line["mended"] for line in desk.lines()) == [[], ["messages[1]", "messages[2]"]]


@pytest.mark.thorough
def test_a_line_is_written_after_the_last_event(desk: Desk, tmp_path: Path):
    """However slow the disk is."""

    class Slow:
        def __init__(self, files: Any) -> None:
            self.files, self.root, self.wrote = files, files.root, list[float]()

        def append(self, *line: Any) -> None:
            time.sleep(1)
            self.wrote.append(time.monotonic())
            self.files.append(*line)

    trace: Any = desk.server.app.runtime.service._reports.trace
    trace._files = slow = Slow(trace._files)
    began = time.monotonic()
    desk.chat([user("Hello")])
    assert time.monotonic() - began < 1
    assert slow.wrote == []
    wait_until(lambda: slow.wrote != [], within_s=5)
    assert len(desk.lines()) == 1
