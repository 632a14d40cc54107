"""A small request beside large ones: how long does its first token wait for something that is no computing?

    python benchmarks/fairness.py [--rounds 3] [--only WORD ...]

Starts the server on tiny models and asks for one token of a reply to "Hi", again and again, while one client
sends something large, and while four clients send it and hang up. The delay is what the first token took,
less the median without anybody else. Memory is the server's, before and after each row.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models, tiny_vision_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

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
PATIENCE_S = 600
WINDOW = 32768
LONGEST = "<|" + "x" * 124 + "|>"
"""A token of 128 bytes, as real vocabularies have: a text of 4 MB might fit into the window."""
IMAGE_TOKENS = "256"
"""So that the tower's step, which is computing, is short."""
PAGE = os.sysconf("SC_PAGE_SIZE")
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
    made = [
        {
            "name": f"tool_{turn}_{number}",
            "description": about,
            "parameters": {"type": "object", "properties": properties},
        }
        for number in range(10_000)
    ]
    return chat("Which?", tools=[{"type": "function", "function": one} for one in made])


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


def text(size: int, turn: int) -> str:
    return f"{turn} " + words(size)


LARGE = (
    Large("chat of 20 MB", "/v1/chat/completions", lambda turn: chat(text(20 * MEGABYTE, turn))),
    Large("messages of 20 MB", "/v1/messages", lambda turn: chat(text(20 * MEGABYTE, turn))),
    Large(
        "responses of 20 MB",
        "/v1/responses",
        lambda turn: {"model": "talker", "input": text(20 * MEGABYTE, turn), "store": False},
    ),
    Large(
        "completions of 20 MB",
        "/v1/completions",
        lambda turn: {"model": "talker", "prompt": text(20 * MEGABYTE, turn), "max_tokens": 1},
    ),
    Large(
        "20 MB in 100,000 messages",
        "/v1/chat/completions",
        lambda turn: {
            "model": "talker",
            "messages": [
                {"role": ("user", "assistant")[at % 2], "content": text(200, turn + at)}
                for at in range(100_001)
            ],
        },
    ),
    Large(
        "chat of 3 MB, which might fit", "/v1/chat/completions", lambda turn: chat(text(3 * MEGABYTE, turn))
    ),
    Large(
        "12 MB of token ids",
        "/v1/completions",
        lambda turn: {"model": "talker", "prompt": [turn + 5] * (4_000_000), "max_tokens": 1},
    ),
    Large(
        "30 MB of empty objects",
        "/v1/chat/completions",
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
    Large("10,000 tools", "/v1/chat/completions", tools),
    Large("an image of 49 megapixels", "/v1/chat/completions", picture),
    Large("a grammar of 5,000 fields", "/v1/chat/completions", grammar),
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

    def line(self) -> str:
        median, worst = statistics.median(self.delays), max(self.delays)
        memory = f"{self.before / MEGABYTE:.0f} to {self.after / MEGABYTE:.0f}"
        return (
            f"| {self.name} | {self.outcome} | {self.lasted_s:.1f} | {median:.2f} | {worst:.2f} | {memory} |"
        )


class Bench:
    """One server, and its clients."""

    def __init__(self, port: int, process: int) -> None:
        self._port = port
        self._process = process
        self._asked = 0
        self.usual_s = 0.0

    def resident(self) -> int:
        return int(Path(f"/proc/{self._process}/statm").read_text().split()[1]) * PAGE

    def first_token_s(self) -> float:
        """Seconds until the first token of a reply to a chat that nobody had before."""
        self._asked += 1
        body = chat(f"Hi, {self._asked}", stream=True)
        began = time.perf_counter()
        connection = self._send("/v1/chat/completions", json.dumps(body).encode())
        try:
            for line in connection.getresponse():
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    return time.perf_counter() - began
        finally:
            connection.close()
        return time.perf_counter() - began  # the token is no text yet

    def warm_up(self) -> None:
        for model in ("embedder", "seer"):
            servers.ask(self._port, f"/v1/models/{model}/load", {})
        self.usual_s = statistics.median(self.first_token_s() for _ in range(UNDISTURBED))

    def beside(self, large: Large, turn: int) -> Row:
        """Small requests beside a client that waits for its answer."""
        data, before, answers = json.dumps(large.body(turn)).encode(), self.resident(), list[int]()
        began = time.perf_counter()

        def ask() -> None:
            connection = self._send(large.path, data)
            reply = connection.getresponse()
            reply.read()
            answers.append(reply.status)
            connection.close()

        thread = threading.Thread(target=ask)
        thread.start()
        delays = self._delays(thread.is_alive)
        thread.join()
        lasted_s = time.perf_counter() - began
        return Row(large.name, str(answers[0]), lasted_s, delays, before, self._settled(before))

    def beside_leavers(self, large: Large, turn: int) -> Row:
        """Small requests beside four clients that hang up, and after they did."""
        bodies = [json.dumps(large.body(turn + leaver)).encode() for leaver in range(LEAVERS)]
        before, began = self.resident(), time.perf_counter()
        threads = [threading.Thread(target=self._send_and_leave, args=(large.path, one)) for one in bodies]
        for thread in threads:
            thread.start()
        delays = self._delays(self._is_busy)
        for thread in threads:
            thread.join()
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
        while (now := self.resident()) > 1.1 * before + 64 * MEGABYTE and time.monotonic() < deadline:
            time.sleep(0.5)
        return now

    def _send(self, path: str, data: bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection

    def _send_and_leave(self, path: str, data: bytes) -> None:
        with suppress(OSError):
            connection = self._send(path, data)
            time.sleep(STAY_S)
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()


def build(root: Path) -> Path:
    """Three models: one that talks, one that makes vectors, one that sees."""
    wide = tiny_models.AddedTokens(
        special=tiny_models.CHATML.special,
        markup=(*tiny_models.CHATML.markup, LONGEST),
        ends=tiny_models.CHATML.ends,
        bos=tiny_models.CHATML.bos,
        padding=tiny_models.CHATML.padding,
    )
    for name in ("talker", "embedder"):
        shutil.move(
            tiny_models.build("qwen3", root / f"{name}-made", hidden=128, layers=2, added=wide), root / name
        )
    (root / "embedder" / "modules.json").write_text(json.dumps(MODULES))
    (root / "embedder" / "1_Pooling").mkdir()
    (root / "embedder" / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    shutil.move(tiny_vision_models.build("qwen3_vl", root / "seer-made"), root / "seer")
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="of each row")
    parser.add_argument("--only", nargs="+", help="rows with one of these words")
    options = parser.parse_args()
    wanted = [one for one in LARGE if not options.only or any(word in one.name for word in options.only)]
    with tempfile.TemporaryDirectory() as root:
        folder, port = build(Path(root)), servers.free_port()
        asked = ["--model", str(folder / "talker"), "--no-proxy", "--mlx-port", str(port)]
        os.environ |= {"MODEL_DIR": str(folder), "MAX_KV_SIZE": str(WINDOW), "IMAGE_MAX_TOKENS": IMAGE_TOKENS}
        log = Path(root) / "log"
        with servers.running(
            servers.start_llm(*asked), partial(servers.health_seconds, port), log=log
        ) as process:
            bench = Bench(port, process)
            bench.warm_up()
            print(f"{servers.machine('mlx', 'mlx-lm', 'tokenizers')}\n")
            print(f"undisturbed: {bench.usual_s:.3f} s, median of {UNDISTURBED}\n")
            print("| beside | outcome | seconds | delay, median | delay, worst | server's MB |")
            print("|---|---|---|---|---|---|")
            unfair = list[str]()
            for large in wanted:
                for see in (bench.beside, bench.beside_leavers):
                    rounds = [see(large, 100 * turn) for turn in range(options.rounds)]
                    for row in rounds:
                        print(row.line(), flush=True)
                    unfair += [row.name for row in rounds if not row.is_fair]
    if unfair:
        raise SystemExit(f"more than {ALLOWED_S:g} s: {', '.join(unfair)}")


if __name__ == "__main__":
    run_with_openblas()
    main()
