"""Models that take each other's place: a part of `truth.py`."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx

from benchmarks import servers
from benchmarks.harness import row, table
from scripts import tiny_models
from tests.serving import Server, serving

FAMILIES = ("qwen3", "llama", "gemma3_text", "glm4_moe_lite", "qwen3_5")
REPLY, LONG_REPLY = 8, 120
LONGEST = 1500
MOST_MEMORY = 1.01
LEAST_EFFICIENCY = 0.9
"""Models with state go on from checkpoints, which prompts of mere tokens do not have at their ends."""


@dataclass
class Account:
    """What happened."""

    replies: int = 0
    streams: int = 0
    wrong: list[str] = field(default_factory=list[str])
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0


class Client:
    """Goes on with a conversation over token ids, one for each model.

    Args:
        alone: servers that hold one model each; their replies are right.
    """

    def __init__(self, number: int, server: Server, alone: dict[str, Server], account: Account) -> None:
        self._rng = random.Random(number)
        self._server, self._alone, self._account = server, alone, account
        self._histories: dict[str, list[int]] = {}

    def ask(self, count: int) -> None:
        for _ in range(count):
            self._turn(self._rng.choice(list(self._alone)))

    def _turn(self, model: str) -> None:
        history = self._histories.get(model, [])
        if len(history) > LONGEST:
            history = []
        prompt = [*history, *(self._rng.randrange(5, 200) for _ in range(self._rng.randint(20, 120)))]
        length = LONG_REPLY if self._rng.random() < 0.1 else REPLY
        ask = self._streamed if self._rng.random() < 0.5 else asked
        answer = ask(self._server, model, prompt, length)
        right = asked(self._alone[model], model, prompt, length)
        tokens = answer["choices"][0]["token_ids"]
        if tokens != right["choices"][0]["token_ids"]:
            self._account.wrong.append(f"{model} after {len(prompt)} tokens: {tokens}")
        self._account.replies += 1
        self._account.prompt_tokens += len(prompt)
        self._account.new_tokens += len(prompt) - max(len(history) - 1, 0)
        self._account.computed_tokens += (
            len(prompt) - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        )
        self._histories[model] = [*prompt, *tokens]

    def _streamed(self, server: Server, model: str, prompt: Sequence[int], length: int) -> Any:
        """Return what `asked` returns, from a stream."""
        body = body_of(model, prompt, length) | {"stream_options": {"include_usage": True}}
        chunks = list(servers.events(server.port, "/v1/completions", body))
        self._account.streams += 1
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids", ())]
        return {"choices": [{"token_ids": tokens}], "usage": chunks[-1]["usage"]}


def body_of(model: str, prompt: Sequence[int], length: int) -> dict[str, Any]:
    body = {"model": model, "prompt": list(prompt), "max_tokens": length, "temperature": 0}
    return body | {"return_token_ids": True}


def asked(server: Server, model: str, prompt: Sequence[int], length: int) -> Any:
    return server.post("/v1/completions", body_of(model, prompt, length))


def switched(server: Server, families: Sequence[str]) -> list[int]:
    """Return MLX's bytes with the first model loaded: before fifty switches, and after every second one."""
    sizes: list[int] = []
    for number in range(51):
        asked(server, families[number % 2], range(5, 25), REPLY)
        if number % 2 == 0:
            gc.collect()
            sizes.append(settled_memory())
    return sizes


def settled_memory() -> int:
    """Return the least of some readings: the engine may still hold the step behind the last token."""
    readings: list[int] = []
    for _ in range(10):
        readings.append(mx.get_active_memory())
        time.sleep(0.02)
    return min(readings)


def several(
    folder: Path,
    *,
    requests: int = 500,
    clients: int = 8,
    models: Annotated[Sequence[int], range(2, 6)] = (2, 5),
) -> Iterator[str]:
    """Models that take each other's place lose nothing, and memory comes back.

    Tiny random float32 models of several families are served in this process from one folder: once with room
    for all of them, and once with room for one. Clients ask for one of them at random, each going on with a
    conversation of its own with that model. Half of the replies are streamed, and one in ten is long, so that
    models are named while streams run.

    Checked: each reply is what the model says when it is the only one; none is lost, and no stream is cut;
    after each of fifty switches MLX's memory is at most 1 % above the base, the memory with the first model
    loaded before them; of a conversation, only what is new is computed, where its model stayed loaded.
    """
    for family in FAMILIES:
        tiny_models.build(family, folder / family, hidden=128, layers=2)
    table("models | at once | replies | streams | switches | wrong | efficiency | memory | seconds")
    for count in models:
        for loaded in (0, 1):
            yield from play(folder, FAMILIES[:count], loaded, requests // clients, clients)


def play(folder: Path, families: Sequence[str], loaded: int, requests: int, clients: int) -> Iterator[str]:
    """Play all requests, print a row, and yield what must not be.

    Args:
        loaded: number of models that may be loaded at once; 0 is all of them.
        requests: of each client.
    """
    account, began = Account(), time.perf_counter()
    options: dict[str, Any] = {"model_dir": str(folder), "max_loaded": loaded, "max_kv_size": 4096}
    with ExitStack() as stack:
        alone = {
            family: stack.enter_context(serving(folder / family, max_kv_size=4096)) for family in families
        }
        server = stack.enter_context(serving(Path(families[0]), **options))
        everyone = [Client(number, server, alone, account) for number in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda client: client.ask(requests), everyone))
        switches = server.printed().count("Unloaded ")
        memory = switched(server, families) if loaded else []
    growth = max(memory) / memory[0] if memory else 0.0
    efficiency = account.new_tokens / account.computed_tokens
    row(
        *(len(families), loaded or "all", account.replies, account.streams, switches, len(account.wrong)),
        *(f"{efficiency:.2f}", f"{growth:.4f}" if memory else "-", f"{time.perf_counter() - began:.0f}"),
    )
    yield from account.wrong
    if account.replies != requests * clients:
        yield f"{account.replies} of {requests * clients} replies came"
    if growth > MOST_MEMORY:
        yield f"memory grew: {memory}"
    if not loaded and efficiency < LEAST_EFFICIENCY:
        yield "something was computed twice"
