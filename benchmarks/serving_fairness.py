"""A small request beside large ones: a part of `serving.py`."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks import servers
from benchmarks.harness import row, table
from scripts import tiny_models, tiny_vision_models

MEGABYTE = 2**20
ALLOWED_S = 1.0
UNDISTURBED = 15
"""Requests whose median is the undisturbed one."""
AT_LEAST = 5
"""Small requests beside each large one."""
LEAVERS = 4
STAY_S = 0.5
"""Seconds after which clients hang up."""
QUIET_S = 0.1
"""Seconds between two small requests."""
SETTLED_S = 30
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WINDOW = 32768
LONGEST = "<|" + "x" * 124 + "|>"
"""A token of 128 bytes, as real vocabularies have: a text of 4 MB might fit into the window."""
IMAGE_TOKENS = "256"
"""So that the tower's step, which is computing, is short."""
POOLING = {"word_embedding_dimension": 128, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}
MODULES = [
    {"type": "sentence_transformers.models.Transformer"},
    {"type": "sentence_transformers.models.Pooling"},
]


def words(size: int) -> str:
    """A text of `size` characters, most of which the tokenizer has not read before."""
    lines = (
        f"def f{number}(x): return x * {number}  # as before, and {number} times more\n"
        for number in range(size)
    )
    pieces, length = list[str](), 0
    while length < size:
        pieces.append(next(lines))
        length += len(pieces[-1])
    return "".join(pieces)[:size]


@dataclass(frozen=True)
class Large:
    """A large request. `body` makes what it sends; `rounds` differ, so that nothing is known from before."""

    name: str
    path: str
    body: Callable[[int], Mapping[str, Any]]


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "talker", "messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


def tools(turn: int) -> Mapping[str, Any]:
    about = "Reads a file, and tells what it holds."
    properties = {"path": {"type": "string", "description": "of the file"}}
    shared = {"description": about, "parameters": {"type": "object", "properties": properties}}
    names = (f"tool_{turn}_{number}" for number in range(10_000))
    return chat(
        "Which?", tools=[{"type": "function", "function": {"name": name, **shared}} for name in names]
    )


def picture(turn: int) -> Mapping[str, Any]:
    file = io.BytesIO()
    small = Image.frombytes("L", (70, 70), bytes((turn * 31 + at * at) % 256 for at in range(4900)))
    small.resize((7000, 7000), Image.Resampling.BICUBIC).convert("RGB").save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
    return {"model": "seer", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}


def grammar(turn: int) -> Mapping[str, Any]:
    properties = {f"p{turn}_{at}": {"type": "string", "maxLength": at % 50 + 1} for at in range(5000)}
    named = {"name": "form", "schema": {"type": "object", "properties": properties}}
    return chat("Fill it in.", response_format={"type": "json_schema", "json_schema": named})


def many_messages(turn: int) -> Mapping[str, Any]:
    texts = (text(200, turn + at) for at in range(100_001))
    messages = [{"role": ("user", "assistant")[at % 2], "content": words} for at, words in enumerate(texts)]
    return {"model": "talker", "messages": messages}


def text(size: int, turn: int) -> str:
    return f"{turn} " + words(size)


LARGE = (
    Large("chat of 20 MB", CHAT, lambda turn: chat(text(20 * MEGABYTE, turn))),
    Large("messages of 20 MB", "/v1/messages", lambda turn: chat(text(20 * MEGABYTE, turn))),
    Large(
        "responses of 20 MB",
        "/v1/responses",
        lambda turn: {"model": "talker", "input": text(20 * MEGABYTE, turn), "store": False},
    ),
    Large(
        "completions of 20 MB",
        COMPLETIONS,
        lambda turn: {"model": "talker", "prompt": text(20 * MEGABYTE, turn), "max_tokens": 1},
    ),
    Large("20 MB in 100,000 messages", CHAT, many_messages),
    Large("chat of 3 MB, which might fit", CHAT, lambda turn: chat(text(3 * MEGABYTE, turn))),
    Large(
        "12 MB of token ids",
        COMPLETIONS,
        lambda turn: {"model": "talker", "prompt": [turn + 5] * (4_000_000), "max_tokens": 1},
    ),
    Large(
        "30 MB of empty objects",
        CHAT,
        lambda turn: {**chat(f"{turn}"), "metadata": [{}] * (7 * MEGABYTE)},
    ),
    Large(
        "/tokenize of 30 MB",
        "/tokenize",
        lambda turn: {"model": "talker", "prompt": text(30 * MEGABYTE, turn)},
    ),
    Large(
        "/v1/embeddings of 30 MB",
        "/v1/embeddings",
        lambda turn: {"model": "embedder", "input": text(30 * MEGABYTE, turn)},
    ),
    Large("10,000 tools", CHAT, tools),
    Large("an image of 49 megapixels", CHAT, picture),
    Large("a grammar of 5,000 fields", CHAT, grammar),
)


@dataclass(frozen=True)
class Row:
    """What a row saw: delays in seconds, and the server's memory in bytes.

    Attributes:
        lasted_s: how long the large request took.
        outcome: the status of the large one, or how many hung up.
    """

    name: str
    outcome: str
    lasted_s: float
    delays: Sequence[float]
    before: int
    after: int

    @property
    def is_fair(self) -> bool:
        return max(self.delays) <= ALLOWED_S

    def print(self) -> None:
        median, worst = statistics.median(self.delays), max(self.delays)
        memory = f"{self.before / MEGABYTE:.0f} to {self.after / MEGABYTE:.0f}"
        row(self.name, self.outcome, f"{self.lasted_s:.1f}", f"{median:.2f}", f"{worst:.2f}", memory)


class Bench:
    """One server, and its clients."""

    def __init__(self, server: servers.Served) -> None:
        self._server, self._port = server, server.port
        self._asked = 0
        self.usual_s = 0.0

    def first_token_s(self) -> float:
        """Seconds until the first token of a reply to a chat that nobody had before."""
        self._asked += 1
        began = time.perf_counter()
        for event in servers.events(self._port, CHAT, chat(f"Hi, {self._asked}")):
            if event["choices"][0]["delta"].get("content"):
                break
        return time.perf_counter() - began  # also where the token is no text yet

    def warm_up(self) -> None:
        for model in ("embedder", "seer"):
            servers.ask(self._port, f"/v1/models/{model}/load", {})
        self.usual_s = statistics.median(self.first_token_s() for _ in range(UNDISTURBED))

    def beside(self, large: Large, turn: int) -> Row:
        """Small requests beside a client that waits for its answer."""
        data, before = json.dumps(large.body(turn)).encode(), self._server.resident_bytes()
        began = time.perf_counter()
        with ThreadPoolExecutor(1) as pool:
            status = pool.submit(self._status, large.path, data)
            delays = self._delays(lambda: not status.done())
        lasted_s = time.perf_counter() - began
        return Row(large.name, str(status.result()), lasted_s, delays, before, self._settled(before))

    def _status(self, path: str, data: bytes) -> int:
        with closing(servers.send(self._port, path, data)) as connection:
            reply = connection.getresponse()
            reply.read()
            return reply.status

    def beside_leavers(self, large: Large, turn: int) -> Row:
        """Small requests beside four clients that hang up, and after they did."""
        bodies = [json.dumps(large.body(turn + leaver)).encode() for leaver in range(LEAVERS)]
        before, began = self._server.resident_bytes(), time.perf_counter()
        with ThreadPoolExecutor(LEAVERS) as pool:
            for body in bodies:
                pool.submit(self._send_and_leave, large.path, body)
            delays = self._delays(self._is_busy)
        lasted_s = time.perf_counter() - began
        return Row(large.name, f"{LEAVERS} left", lasted_s, delays, before, self._settled(before))

    def _delays(self, goes_on: Callable[[], bool]) -> list[float]:
        delays = list[float]()
        time.sleep(QUIET_S)
        while len(delays) < AT_LEAST or goes_on():
            delays.append(max(self.first_token_s() - self.usual_s, 0))
            time.sleep(QUIET_S)
        return delays

    def _is_busy(self) -> bool:
        return any(model["in_flight"] for model in servers.ask(self._port, "/stats")["models"])

    def _settled(self, before: int) -> int:
        """Return the memory once it is back, or after a while."""
        deadline = time.monotonic() + SETTLED_S
        while (
            now := self._server.resident_bytes()
        ) > 1.1 * before + 64 * MEGABYTE and time.monotonic() < deadline:
            time.sleep(0.5)
        return now

    def _send_and_leave(self, path: str, data: bytes) -> None:
        with suppress(OSError):
            connection = servers.send(self._port, path, data)
            time.sleep(STAY_S)
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def build(root: Path) -> Path:
    """Three models: one that talks, one that makes vectors, one that sees."""
    wide = replace(tiny_models.CHATML, markup=(*tiny_models.CHATML.markup, LONGEST))
    for name in ("talker", "embedder"):
        made = tiny_models.build("qwen3", root / f"{name}-made", hidden=128, layers=2, added=wide)
        shutil.move(made, root / name)
    (root / "embedder" / "modules.json").write_text(json.dumps(MODULES))
    (root / "embedder" / "1_Pooling").mkdir()
    (root / "embedder" / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    shutil.move(tiny_vision_models.build("qwen3_vl", root / "seer-made"), root / "seer")
    return root


def fairness(folder: Path, *, rounds: int = 3, words: Sequence[str] = ()) -> Iterator[str]:
    """A small request beside large ones: how long does its first token wait for what is no computing?

    One token of a reply to "Hi" is asked for, again and again, while one client sends something large, and
    while four clients send it and hang up. The delay is what the first token took, less the median without
    anybody else. Memory is the server's, before and after each row.

    Args:
        rounds: of each row
        words: rows with one of these words
    """
    wanted = [case for case in LARGE if not words or any(word in case.name for word in words)]
    models = build(folder)
    os.environ |= {"MODEL_DIR": str(models), "MAX_KV_SIZE": str(WINDOW), "IMAGE_MAX_TOKENS": IMAGE_TOKENS}
    with servers.served("--model", models / "talker", log=folder / "log") as server:
        bench = Bench(server)
        bench.warm_up()
        print(f"undisturbed: {bench.usual_s:.3f} s, median of {UNDISTURBED}\n")
        table("beside | outcome | seconds | delay, median | delay, worst | server's MB")
        for large in wanted:
            for see in (bench.beside, bench.beside_leavers):
                for turn in range(rounds):
                    seen = see(large, 100 * turn)
                    seen.print()
                    if not seen.is_fair:
                        yield f"{seen.name}: more than {ALLOWED_S:g} s"
