"""A server for probes that computes nothing: what it tells of itself is what the test says."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHARACTERS_PER_TOKEN = 4

type Message = Mapping[str, Any]


def nothing_cached(_: int) -> None:
    return None


def tokens_of(messages: Sequence[Message]) -> int:
    return len(json.dumps(messages)) // CHARACTERS_PER_TOKEN


@dataclass
class Fake:
    """A fake that says this.

    Attributes:
        cached: of a prompt's tokens; None reports none.
        length: of a prompt in tokens.
        content, reasoning: of every reply.
        counters: of `/stats`, which rise by `rise` with every request; None has no `/stats`.
        is_router: its `/stats` are of several servers.
        looks: of the vision tower, for each request; none for those that are not listed.
        broken: raw lines of the stream in place of a reply.
        status: of a chat completion.
        bodies: what it was asked.
    """

    cached: Callable[[int], int | None] = nothing_cached
    length: Callable[[Sequence[Message]], int] = tokens_of
    content: str = "Fine."
    reasoning: str = ""
    counters: dict[str, int] | None = field(default_factory=dict[str, int])
    rise: Mapping[str, int] = field(default_factory=dict[str, int])
    is_router: bool = False
    looks: Sequence[int] = ()
    broken: str | None = None
    status: int = 200
    bodies: list[Any] = field(default_factory=list[Any])
    url: str = ""

    def reply(self, body: Any) -> str:
        self.bodies.append(body)
        for name, number in self.rise.items():
            if self.counters is not None:
                self.counters[name] = self.counters.get(name, 0) + number
        if self.broken is not None:
            return self.broken
        return "".join(f"data: {json.dumps(event)}\n\n" for event in self._events(body)) + "data: [DONE]\n\n"

    def _events(self, body: Any) -> list[dict[str, Any]]:
        prompt = self.length(body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 8}
        if (cached := self.cached(prompt)) is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        deltas = [{"reasoning_content": self.reasoning}, {"content": self.content}]
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        return [{"choices": [choice]} for choice in [*choices, end]] + [{"choices": [], "usage": usage}]


@contextmanager
def faked(fake: Fake) -> Generator[Fake]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path == "/stats" and fake.counters is not None
            images = {"tower_runs": sum(fake.looks[: len(fake.bodies)])}
            stats = {"prompt_cache": fake.counters, "images": images}
            stats |= {"servers": []} if fake.is_router else {}
            self._answer(200 if is_known else 404, json.dumps(stats))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(fake.status, fake.reply(body))

        def _answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
