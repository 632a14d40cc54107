"""The servers that are measured with the shapes of agents: one behind a URL, or one that is restarted."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from start_llm.app import App
from tests.agents.agent_account import Message, Request
from tests.agents.agent_shapes import Reply, ServerFailed
from tests.serving import serving

TIMEOUT_S = 600


@dataclass
class Streamed:
    """The reply of a stream, put together from its deltas."""

    began: float
    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    first_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    ended: bool = False

    def feed(self, line: bytes) -> None:
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.ended = True
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerFailed(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", []):
            self._delta(choice.get("delta") or {})

    def _delta(self, delta: dict[str, Any]) -> None:
        content = delta.get("content") or ""
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        calls = delta.get("tool_calls") or []
        if self.first_s is None and (content or reasoning or calls):
            self.first_s = time.perf_counter() - self.began
        self.content += content
        self.reasoning += reasoning
        for call in calls:
            self._call(call)

    def _call(self, delta: dict[str, Any]) -> None:
        function = delta.get("function") or {}
        new = {"id": delta.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
        call = self.calls.setdefault(delta.get("index", len(self.calls)), new)
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def reply(self) -> Reply:
        if not self.ended:
            raise ServerFailed("the stream ended without [DONE]")
        message: Message = {"role": "assistant", "content": self.content}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        message |= {"tool_calls": [self.calls[index] for index in sorted(self.calls)]} if self.calls else {}
        seconds = time.perf_counter() - self.began if self.first_s is None else self.first_s
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        tokens = self.usage.get("prompt_tokens")
        return Reply(message=message, first_s=seconds, prompt_tokens=tokens, cached_tokens=cached)


@dataclass(frozen=True)
class HttpServer:
    """A server after a base URL, which ends in /v1."""

    base_url: str
    model: str
    api_key: str = ""

    def ask(self, request: Request) -> Reply:
        streamed = Streamed(time.perf_counter())
        with self._connected() as connection:
            self._post(connection, request)
            for line in _accepted(connection):
                streamed.feed(line)
        return streamed.reply()

    def leave(self, request: Request, after_s: float) -> None:
        with self._connected() as connection:
            self._post(connection, request)
            time.sleep(after_s)

    def prefilled_tokens(self) -> int | None:
        with suppress(ServerFailed):
            engine = self._get(urlsplit(self.base_url).path.removesuffix("/v1") + "/stats").get("engine")
            return engine.get("prefilled_tokens") if isinstance(engine, dict) else None
        return None

    def named(self) -> HttpServer:
        """With a model's name: the first that the server has, if none is given. Raises SystemExit."""
        if self.model:
            return self
        try:
            models = self._get(urlsplit(self.base_url).path + "/models")["data"]
        except ServerFailed as error:
            raise SystemExit(f"{self.base_url} does not answer: {error}") from error
        return replace(self, model=models[0]["id"])

    def _get(self, path: str) -> dict[str, Any]:
        with self._connected() as connection:
            connection.request("GET", path, headers=self._headers)
            return json.load(_accepted(connection))

    def _post(self, connection: http.client.HTTPConnection, request: Request) -> None:
        body = {"model": self.model, "messages": request.messages, "max_tokens": request.max_tokens}
        body |= {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"tools": request.tools} if request.tools else {}
        body |= {"session_id": request.name} if request.name else {}
        path = urlsplit(self.base_url).path + "/chat/completions"
        connection.request("POST", path, json.dumps(body), self._headers)

    @contextmanager
    def _connected(self) -> Generator[http.client.HTTPConnection]:
        url = urlsplit(self.base_url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        connection = kinds[url.scheme](url.netloc, timeout=TIMEOUT_S)
        try:
            yield connection
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise ServerFailed(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    @property
    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


def _accepted(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    response = connection.getresponse()
    if response.status != 200:
        raise ServerFailed(f"{response.status} {response.read(300).decode(errors='replace')}")
    return response


class Restarted:
    """start_llm in this process, with a disk tier: stopped and started again before each request.

    It is not stopped while another request runs.
    """

    def __init__(self, folder: Path, disk: Path) -> None:
        self._folder, self._disk = folder, disk
        self._prefilled = self._running = 0
        self._serving: ExitStack | None = None
        self._server: HttpServer | None = None
        self._app: App | None = None
        self._lock = threading.Lock()

    def ask(self, request: Request) -> Reply:
        with self._restarted() as server:
            return server.ask(request)

    def leave(self, request: Request, after_s: float) -> None:
        with self._restarted() as server:
            server.leave(request, after_s)

    def prefilled_tokens(self) -> int:
        return self._prefilled + (self._app.runtime.status.engine.prefilled_tokens if self._app else 0)  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        if self._serving:
            self._serving.close()
        self._prefilled = self.prefilled_tokens()  # with the last chunk of a prompt that was cut at the end
        self._serving = self._server = self._app = None

    @contextmanager
    def _restarted(self) -> Generator[HttpServer]:
        with self._lock:
            if not self._running or self._server is None:
                self.close()
                self._serving = ExitStack()
                started = self._serving.enter_context(
                    serving(self._folder, ssd_folder=str(self._disk), drain_s=60)
                )
                self._server, self._app = HttpServer(f"{started.url}/v1", "default_model"), started.app
            self._running += 1
            server = self._server
        try:
            yield server
        finally:
            with self._lock:
                self._running -= 1
