"""A small request beside large ones, and beside images that are refused: a part of `serving.py`."""

import itertools
import json
import os
import shutil
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image as Pillow

from benchmarks import servers
from benchmarks.harness import row, table
from scripts import tiny_models, tiny_vision_models
from tests.images.files import data_url, empty_png, saved

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


def text(size: int, turn: int) -> str:
    return f"{turn} {words(size)}"


def to_talker(field: str, megabytes: int, turn: int, **more: Any) -> Mapping[str, Any]:
    return {"model": "talker", field: text(megabytes * MEGABYTE, turn), **more}


def chat(content: object, model: str = "talker", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, **more}


def long_chat(megabytes: int, turn: int) -> Mapping[str, Any]:
    return chat(text(megabytes * MEGABYTE, turn))


def many_messages(turn: int) -> Mapping[str, Any]:
    texts = (text(200, turn + at) for at in range(100_001))
    messages = [{"role": ("user", "assistant")[at % 2], "content": words} for at, words in enumerate(texts)]
    return {"model": "talker", "messages": messages}


def tools(turn: int) -> Mapping[str, Any]:
    about = "Reads a file, and tells what it holds."
    properties = {"path": {"type": "string", "description": "of the file"}}
    shared = {"description": about, "parameters": {"type": "object", "properties": properties}}
    names = (f"tool_{turn}_{number}" for number in range(10_000))
    return chat(
        "Which?", tools=[{"type": "function", "function": {"name": name, **shared}} for name in names]
    )


def grammar(turn: int) -> Mapping[str, Any]:
    properties = {f"p{turn}_{at}": {"type": "string", "maxLength": at % 50 + 1} for at in range(5000)}
    named = {"name": "form", "schema": {"type": "object", "properties": properties}}
    return chat("Fill it in.", response_format={"type": "json_schema", "json_schema": named})


def huge(turn: int) -> bytes:
    small = Pillow.frombytes("L", (70, 70), bytes((turn * 31 + at * at) % 256 for at in range(4900)))
    large = small.resize((7000, 7000), Pillow.Resampling.BICUBIC).convert("RGB")
    return saved(large, "PNG", compress_level=1)


@cache
def photo(kind: str, **how: int) -> bytes:
    return saved(Pillow.effect_noise((4000, 3000), 60).convert("RGB"), kind, **how)


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def see(make: Callable[[int], bytes], turn: int) -> Mapping[str, Any]:
    image = {"type": "image_url", "image_url": {"url": data_url(make(turn))}}
    return chat([image, {"type": "text", "text": "What is it?"}], "seer")


def counted(turn: int) -> Mapping[str, Any]:
    image = Pillow.effect_noise((3150, 3180 + turn % 2), 90).convert("RGB")
    content = [{"type": "input_image", "image_url": data_url(saved(image, "BMP"))}]
    return {"model": "seer", "input": [{"role": "user", "content": content}]}


IMAGES: Mapping[str, Callable[[int], bytes]] = {
    "49 megapixels": huge,
    **{
        f"12 megapixels, {kind}": lambda _, kind=kind: photo(kind) for kind in ("JPEG", "PNG", "WEBP", "AVIF")
    },
    "10,000 x 10,000 pixels": lambda _: empty_png(10_000, 10_000, bytes(10**7)),
    "1 x 100,000 pixels": lambda _: empty_png(1, 100_000),
    "half a PNG of 12 megapixels": lambda _: half(photo("PNG", compress_level=1)),
    "half a JPEG of 12 megapixels": lambda _: half(photo("JPEG", quality=90)),
}
"""Each made for a turn. Those of 12 megapixels are known in the second one."""


class Large(NamedTuple):
    """A large request. `body` makes what it sends; turns differ, so that nothing is known from before."""

    name: str
    path: str
    body: Callable[[int], Mapping[str, Any]]


LARGE = (
    Large("chat of 20 MB", CHAT, partial(long_chat, 20)),
    Large("messages of 20 MB", "/v1/messages", partial(long_chat, 20)),
    Large("responses of 20 MB", "/v1/responses", partial(to_talker, "input", 20, store=False)),
    Large("completions of 20 MB", COMPLETIONS, partial(to_talker, "prompt", 20, max_tokens=1)),
    Large("20 MB in 100,000 messages", CHAT, many_messages),
    Large("chat of 3 MB, which might fit", CHAT, partial(long_chat, 3)),
    Large(
        "12 MB of token ids",
        COMPLETIONS,
        lambda turn: {"model": "talker", "prompt": [turn + 5] * 4_000_000, "max_tokens": 1},
    ),
    Large("30 MB of empty objects", CHAT, lambda turn: chat(f"{turn}", metadata=[{}] * (7 * MEGABYTE))),
    Large("/tokenize of 30 MB", "/tokenize", partial(to_talker, "prompt", 30)),
    Large("10,000 tools", CHAT, tools),
    Large("a grammar of 5,000 fields", CHAT, grammar),
    Large("tokens of an image of 40 MB", "/v1/responses/input_tokens", counted),
    *(Large(f"an image: {name}", CHAT, partial(see, make)) for name, make in IMAGES.items()),
)


class Clients:
    """One server, and its clients."""

    def __init__(self, server: servers.Served) -> None:
        self._server, self._port = server, server.port
        self._asked = 0
        servers.ask(self._port, "/v1/models/seer/load", {})
        self.usual_s = statistics.median(self._first_token_s() for _ in range(UNDISTURBED))

    def _first_token_s(self) -> float:
        """Seconds until the first token of a reply to a chat that nobody had before."""
        self._asked += 1
        began = time.perf_counter()
        for event in servers.events(self._port, CHAT, chat(f"Hi, {self._asked}")):
            if event["choices"][0]["delta"].get("content"):
                break
        return time.perf_counter() - began  # also where the token is no text yet

    def beside(self, large: Large, turn: int, leavers: int) -> float:
        """Small requests beside a client that waits for its answer, or beside some that hang up.

        Prints a row. Returns the longest delay of a small request, in seconds.
        """
        bodies = [json.dumps(large.body(turn + leaver)).encode() for leaver in range(max(leavers, 1))]
        before, began = self._server.resident_bytes(), time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            send = self._send_and_leave if leavers else self._status
            sent = [pool.submit(send, large.path, body) for body in bodies]
            delays = self._delays(lambda: not all(client.done() for client in sent) or self._is_busy())
        lasted_s, after = time.perf_counter() - began, self._settled(before)
        outcome = f"{leavers} left" if leavers else sent[0].result()
        figures = (f"{figure:.2f}" for figure in (lasted_s, statistics.median(delays), max(delays)))
        row(large.name, outcome, *figures, f"{before / MEGABYTE:.0f} to {after / MEGABYTE:.0f}")
        return max(delays)

    def _status(self, path: str, data: bytes) -> int:
        with closing(servers.send(self._port, path, data)) as connection:
            reply = connection.getresponse()
            reply.read()
            return reply.status

    def _send_and_leave(self, path: str, data: bytes) -> None:
        with suppress(OSError):
            connection = servers.send(self._port, path, data)
            time.sleep(STAY_S)
            connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _delays(self, goes_on: Callable[[], bool]) -> list[float]:
        delays = list[float]()
        time.sleep(QUIET_S)
        while len(delays) < AT_LEAST or goes_on():
            delays.append(max(self._first_token_s() - self.usual_s, 0))
            time.sleep(QUIET_S)
        return delays

    def _is_busy(self) -> bool:
        return any(model["in_flight"] for model in servers.ask(self._port, "/stats")["models"])

    def _settled(self, before: int) -> int:
        """Return the memory once it is back, or after a while."""
        deadline, most = time.monotonic() + SETTLED_S, 1.1 * before + 64 * MEGABYTE
        while (now := self._server.resident_bytes()) > most and time.monotonic() < deadline:
            time.sleep(0.5)
        return now


def build(root: Path) -> Path:
    """Two models: one that talks, one that sees."""
    wide = replace(tiny_models.CHATML, markup=(*tiny_models.CHATML.markup, LONGEST))
    shutil.move(
        tiny_models.build("qwen3", root / "talker-made", hidden=128, layers=2, added=wide), root / "talker"
    )
    shutil.move(tiny_vision_models.build("qwen3_vl", root / "seer-made"), root / "seer")
    return root


def fairness(folder: Path, *, rounds: int = 3, words: Sequence[str] = ()) -> Iterator[str]:
    """A small request beside large ones: how long does its first token wait for what is no computing?

    One token of a reply to "Hi" is asked for, again and again, while one client sends something large, and
    while four clients send it and hang up. The delay is what the first token took, less the median without
    anybody else. Memory is the server's, before and after each row; seconds are those until all is answered.

    Args:
        rounds: of each row
        words: rows with one of these words
    """
    wanted = [case for case in LARGE if not words or any(word in case.name for word in words)]
    models = build(folder)
    os.environ |= {"MODEL_DIR": str(models), "MAX_KV_SIZE": str(WINDOW), "IMAGE_MAX_TOKENS": IMAGE_TOKENS}
    with servers.served("--model", models / "talker", log=folder / "log") as server:
        clients = Clients(server)
        print(f"undisturbed: {clients.usual_s:.3f} s, median of {UNDISTURBED}\n")
        table("beside | outcome | seconds | delay, median | delay, worst | server's MB")
        for large, leavers, turn in itertools.product(wanted, (0, LEAVERS), range(rounds)):
            if clients.beside(large, 100 * turn, leavers) > ALLOWED_S:
                yield f"{large.name}: more than {ALLOWED_S:g} s"
