"""What the terminal says of requests that are refused, given up, or sent by nobody."""

from __future__ import annotations

import re
from typing import Any

import pytest

from start_llm.access.backend_secret import READINESS_HEADER
from start_llm.app import App
from start_llm.config.settings import Settings
from start_llm.telemetry.terminal import Terminal
from tests.server.client import CHAT, Client, ask, engine_is_free, events_in, message, wait_until
from tests.serving import Server, serving
from tests.telemetry.ttys import a_tty

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
REFUSED = {
    "bad JSON": (message("POST", CHAT, b"{"), "400 POST /v1/chat/completions  The body"),
    "no Content-Type": (
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}",
        "415 POST /v1/messages  The Content-Type",
    ),
    "foreign Host": (
        message("GET", "/stats", headers={"Host": "evil.example"}),
        "403 GET /stats  This server",
    ),
    "foreign Origin": (
        message("POST", CHAT, HELLO, {"Origin": "https://evil.example"}),
        "403 POST /v1/chat/completions  ",
    ),
    "unknown path": (message("GET", "/x?key=secret"), "404 GET /x  There is nothing at /x"),
    "no HTTP": (b"hello\r\n\r\n", "400  Bad Request: no readable request"),
}


def lines(server: Server, word: str) -> list[str]:
    return [line for line in server.printed().splitlines() if word in line]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_request_is_one_line_with_status_and_reason(scripted_model: Any, name: str):
    data, expected = REFUSED[name]
    with serving(scripted_model) as server:
        with Client(server.port) as client:
            client.send(data)
            client.reply()
        (line,) = lines(server, "refused")
    assert re.match(rf"\d\d:\d\d:\d\d refused +{re.escape(expected)}", line)
    assert "secret" not in line


def test_a_wrong_key_is_a_line_that_does_not_name_it(scripted_model: Any):
    with serving(scripted_model, access_keys=("right",)) as server:
        assert ask(server.port, "POST", CHAT, HELLO, {"Authorization": "Bearer wrong"}).status == 401
        (line,) = lines(server, "refused")
    assert " 401 POST /v1/chat/completions  " in line
    assert "wrong" not in line.partition("completions")[2].lower().replace("wrong key", "")


def test_a_reply_that_is_given_up_is_counted_as_far_as_it_was_made(endless: Server):
    """In its line and in /stats."""
    before = endless.get("/stats")["requests"]
    with Client(endless.port) as client:
        body = HELLO | {"max_tokens": 20_000, "stream": True, "session_id": "runaway"}
        client.request("POST", CHAT, body, {"User-Agent": "claude-cli/2.0 (external)"})
        client.head()
        received = 0
        for chunk in client.chunks():
            received += sum(event != "[DONE]" and bool(event["choices"]) for event in events_in(chunk))
            if received > 20:
                break
    wait_until(lambda: bool(lines(endless, "runaway")), within_s=5)
    wait_until(lambda: endless.get("/stats")["requests"]["in_flight"] == 0, within_s=5)
    after = endless.get("/stats")["requests"]
    (line,) = lines(endless, "runaway")
    written = re.search(r"chat +claude-cli +[0-9a-f]{6} runaway +cancelled .* ([\d,]+) written", line)
    assert written
    counted = int(written[1].replace(",", ""))
    assert counted >= 20
    assert after["completion_tokens"] - before["completion_tokens"] == counted
    assert after["prompt_tokens"] > before["prompt_tokens"]


def test_the_request_with_which_the_server_tries_the_proxy_is_counted_nowhere(
    scripted_model: Any, tmp_path: Any
):
    with serving(scripted_model, traces=True, log_root=str(tmp_path)) as server:
        before, printed = server.get("/stats"), server.printed()
        reply = ask(server.port, "POST", CHAT, HELLO, {READINESS_HEADER: server.app._secret.readiness})
        assert (reply.status, reply.json["usage"]["total_tokens"]) == (200, 0)
        wait_until(lambda: engine_is_free(server.port), within_s=5)
        after = server.get("/stats")
        assert after == before | {name: after[name] for name in after if "uptime" in name}
        assert server.printed() == printed
        assert server.get("/activity")["recent"] == []
        assert not list(tmp_path.rglob("*.log"))
        pretended = ask(server.port, "POST", CHAT, HELLO, {READINESS_HEADER: "guess"})
        assert pretended.json["usage"]["total_tokens"] > 0, "nobody else can hide"


@pytest.mark.thorough
def test_a_terminal_that_nobody_reads_stops_no_request(scripted_model: Any):
    def on_a_stopped_terminal(settings: Settings, _: Terminal) -> App:
        return App(settings, Terminal(screen.stream))

    with a_tty(is_read=False) as screen:
        with serving(scripted_model, on_a_stopped_terminal) as server:
            for _ in range(2000):
                server.app._terminal.say("x" * 100)
            for _ in range(3):
                assert ask(server.port, "POST", CHAT, HELLO).status == 200
            assert server.get("/health")["status"] == "ok"
        screen.read()
        server.app._terminal.close()
