"""A streaming chat client for the probes. It needs only the standard library."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

Message = dict[str, Any]
Tool = dict[str, Any]

_LONGEST_ERROR = 300


class Unmeasured(Exception):
    """Raised when nothing can be measured. The message gives the reason in one line."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A complete reply.

    Attributes:
        reasoning_field: the field in which the reasoning arrived.
        calls: the tool calls of the stream; `arguments` is text.
        finish: the finish reason.
        first_s: seconds until the first text, reasoning or call.
        prompt, cached, completion: token counts from `usage`. A missing `cached_tokens` counts as 0.
    """

    content: str
    reasoning: str
    reasoning_field: str
    calls: Sequence[Mapping[str, Any]]
    finish: str
    first_s: float
    prompt: int
    cached: int
    completion: int

    @property
    def is_cut(self) -> bool:
        return self.finish == "length"

    def sent_back(self, call_id: Callable[[str], str] = str) -> Message:
        """Return the message as a JavaScript client sends it back.

        Arguments are parsed and serialized again. Blank text beside calls becomes null.
        """
        message: Message = {"role": "assistant", "content": self.content}
        if self.calls and not self.content.strip():
            message["content"] = None
        if self.reasoning:
            message[self.reasoning_field] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call_sent_back(call, call_id) for call in self.calls]
        return message


def _call_sent_back(call: Mapping[str, Any], call_id: Callable[[str], str]) -> dict[str, Any]:
    function = {**call["function"], "arguments": respelt(call["function"]["arguments"])}
    return {"id": call_id(call["id"]), "type": "function", "function": function}


def respelt(arguments: str) -> str:
    """Return the same arguments as JavaScript serializes them: no spaces, no escapes, 1000.0 as 1000."""
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:  # a call that was cut short; clients send it unchanged
        return arguments
    return json.dumps(_whole(parsed), separators=(",", ":"), ensure_ascii=False)


def _whole(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {key: _whole(item) for key, item in value.items()}
        case _:
            return value


@dataclass
class _Stream:
    """Assembles a reply from the lines of its stream."""

    began: float
    texts: dict[str, str] = field(default_factory=dict[str, str])
    calls: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    finish: str = ""
    first_s: float | None = None
    usage: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_ended: bool = False

    def feed(self, line: bytes) -> None:
        """Add one line of the stream. Lines without `data:`, such as comments, are ignored.

        Raises:
            Unmeasured: the server reports an error.
        """
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or self.has_ended:
            return
        if data == b"[DONE]":
            self.has_ended = True
            return
        event = json.loads(data)
        if "error" in event:
            raise Unmeasured(f"the server broke the reply off: {_one_line(json.dumps(event['error']))}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            self.finish = choice.get("finish_reason") or self.finish
            self._add(choice.get("delta") or {})

    def _add(self, delta: Mapping[str, Any]) -> None:
        texts = {name: delta.get(name) for name in ("content", "reasoning_content", "reasoning")}
        if self.first_s is None and (any(texts.values()) or delta.get("tool_calls")):
            self.first_s = time.perf_counter() - self.began
        for name, text in texts.items():
            if text:
                self.texts[name] = self.texts.get(name, "") + text
        for part in delta.get("tool_calls") or []:
            self._add_to_call(part)

    def _add_to_call(self, part: Mapping[str, Any]) -> None:
        new = {"id": part.get("id") or "", "function": {"name": "", "arguments": ""}}
        function = self.calls.setdefault(part.get("index", 0), new)["function"]
        for name in ("name", "arguments"):
            function[name] += (part.get("function") or {}).get(name) or ""

    def reply(self) -> Reply:
        """Return the reply.

        Raises:
            Unmeasured: the stream has no end, or no `usage.prompt_tokens`.
        """
        if not self.has_ended:
            raise Unmeasured("the stream ended without [DONE]")
        if not self.usage.get("prompt_tokens"):
            raise Unmeasured("the reply has no usage.prompt_tokens: nothing can be measured")
        is_renamed = "reasoning" in self.texts and "reasoning_content" not in self.texts
        reasoning_field = "reasoning" if is_renamed else "reasoning_content"
        details = self.usage.get("prompt_tokens_details") or {}
        return Reply(
            content=self.texts.get("content", ""),
            reasoning=self.texts.get(reasoning_field, ""),
            reasoning_field=reasoning_field,
            calls=[self.calls[index] for index in sorted(self.calls)],
            finish=self.finish,
            first_s=time.perf_counter() - self.began if self.first_s is None else self.first_s,
            prompt=self.usage["prompt_tokens"],
            cached=details.get("cached_tokens") or 0,
            completion=self.usage.get("completion_tokens") or 0,
        )


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server that is probed.

    Attributes:
        url, stats_url: addresses without the API's path. `/stats` may be that of one of several servers.
        timeout_s: the longest silence, in seconds.
    """

    url: str
    stats_url: str
    model: str = "local-model"
    api_key: str = ""
    timeout_s: float = 600

    def reach(self) -> Server:
        """Return this server.

        Raises:
            Unmeasured: nothing listens at its address.
        """
        place = urlsplit(self.url)
        port = place.port or (443 if place.scheme == "https" else 80)
        try:
            socket.create_connection((place.hostname, port), self.timeout_s).close()
        except OSError as error:
            raise Unmeasured(f"nothing answers at {self.url}: {error}") from error
        return self

    def ask(self, body: Mapping[str, Any]) -> Reply:
        """Stream a chat completion.

        Raises:
            Unmeasured: the server does not send a complete reply.
        """
        asked = {"stream": True, "stream_options": {"include_usage": True}}
        stream = _Stream(time.perf_counter())
        url = f"{self.url}/v1/chat/completions"
        with self._answer(url, json.dumps({"model": self.model, **body, **asked})) as lines:
            for line in lines:
                stream.feed(line)
        return stream.reply()

    def stats(self) -> Mapping[str, Any]:
        """Return the content of `/stats`.

        Raises:
            Unmeasured: there is no `/stats`, or it has no prompt cache, or is of several servers.
        """
        url = f"{self.stats_url}/stats"
        try:
            with self._answer(url) as lines:
                body = json.loads(b"".join(lines))
        except Unmeasured as error:
            raise Unmeasured(f"{error} (--stats-url says where it is)") from error
        if not isinstance(body, dict) or not isinstance(body.get("prompt_cache"), dict):
            raise Unmeasured(f"{url} tells of no prompt cache")
        if "servers" in body:
            raise Unmeasured(f"{url} is of several servers: --stats-url says whose is meant")
        return body

    @contextmanager
    def _answer(self, url: str, body: str | None = None) -> Generator[Iterable[bytes]]:
        """Yield the lines of an answer with status 200. Raise Unmeasured for every other answer."""
        place = urlsplit(url)
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        connection = kind(place.hostname or "", place.port, timeout=self.timeout_s)
        try:
            connection.request("GET" if body is None else "POST", place.path, body, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(2000).decode(errors="replace")
                raise Unmeasured(f"{url} answers {answer.status}: {_one_line(text)}")
            yield answer
        except TimeoutError as error:
            raise Unmeasured(f"{url} says nothing for {self.timeout_s:g} seconds") from error
        except json.JSONDecodeError as error:
            raise Unmeasured(f"{url} says what is no JSON: {_one_line(error.doc)}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unmeasured(f"{url} does not answer: {_one_line(str(error) or repr(error))}") from error
        finally:
            connection.close()

    @property
    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_ERROR]
