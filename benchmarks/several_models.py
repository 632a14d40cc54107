"""Check that models which take each other's place lose nothing, and that memory comes back.

    python benchmarks/several_models.py [--requests 500] [--clients 8] [--models 2 5]

Builds tiny random float32 models of several families, and serves them in this process from one folder: once
with room for all of them, and once with room for one. Clients ask for one of them at random, each going on
with a conversation of its own with that model.

Half of the replies are streamed, and one in ten is long, so that models are named while streams run.

Checked: each reply is what the model says when it is the only one; none is lost, and no stream is cut; after
each of fifty switches MLX's memory is at most 1 % above the base, the memory with the first model loaded
before them; of a conversation, only what is new is computed, where its model stayed loaded. What must not be
is printed, and the status is then 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402 - found through the line above

from benchmarks import servers  # noqa: E402
from scripts import tiny_models  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.serving import AS_JSON, Server, serving  # noqa: E402

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
    cut: int = 0
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
        said = answer["choices"][0]["token_ids"]
        if said != right["choices"][0]["token_ids"]:
            self._account.wrong.append(f"{model} after {len(prompt)} tokens: {said}")
        self._account.replies += 1
        self._account.prompt_tokens += len(prompt)
        self._account.new_tokens += len(prompt) - max(len(history) - 1, 0)
        self._account.computed_tokens += (
            len(prompt) - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        )
        self._histories[model] = [*prompt, *said]

    def _streamed(self, server: Server, model: str, prompt: Sequence[int], length: int) -> Any:
        """Return what `asked` returns, from a stream."""
        body = body_of(model, prompt, length) | {"stream": True, "stream_options": {"include_usage": True}}
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=600)) as connection:
            connection.request("POST", "/v1/completions", json.dumps(body), AS_JSON)
            reply = connection.getresponse()
            lines = [line.removeprefix(b"data: ").strip() for line in reply if line.startswith(b"data: ")]
        self._account.streams += 1
        self._account.cut += lines[-1:] != [b"[DONE]"]
        chunks: list[Any] = [json.loads(line) for line in lines if line != b"[DONE]"]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice.get("token_ids", ())]
        return {"choices": [{"token_ids": tokens}], "usage": chunks[-1]["usage"]}


def body_of(model: str, prompt: Sequence[int], length: int) -> dict[str, Any]:
    body = {"model": model, "prompt": list(prompt), "max_tokens": length, "temperature": 0}
    return body | {"return_token_ids": True}


def asked(server: Server, model: str, prompt: Sequence[int], length: int) -> Any:
    return server.post("/v1/completions", body_of(model, prompt, length))


def play(folder: Path, families: Sequence[str], loaded: int, requests: int, clients: int) -> Iterator[str]:
    """Play all requests, print a row, and yield what must not be.

    Args:
        loaded: number of models that may be loaded at once; 0 is all of them.
    """
    account, began = Account(), time.perf_counter()
    options: dict[str, Any] = {"model_dir": str(folder), "max_kv_size": 4096}
    with ExitStack() as stack:
        alone = {
            family: stack.enter_context(serving(folder / family, max_kv_size=4096)) for family in families
        }
        server = stack.enter_context(serving(Path(families[0]), max_loaded=loaded, **options))
        everyone = [Client(number, server, alone, account) for number in range(clients)]
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda one: one.ask(requests // clients), everyone))
        switches = server.printed().count("Unloaded ")
        memory = switched(server, families) if loaded else []
    growth = max(memory) / memory[0] if memory else 0.0
    print(
        f"| {len(families)} | {loaded or 'all'} | {account.replies} | {account.streams} | {account.cut} "
        f"| {switches} | {len(account.wrong)} | {account.new_tokens / account.computed_tokens:.2f} "
        f"| {f'{growth:.4f}' if memory else '-'} | {time.perf_counter() - began:.0f} |",
        flush=True,
    )
    yield from account.wrong
    if account.replies != requests // clients * clients:
        yield f"{account.replies} of {requests} replies came"
    if account.cut:
        yield f"{account.cut} of {account.streams} streams were cut"
    if growth > MOST_MEMORY:
        yield f"memory grew: {memory}"
    if not loaded and account.new_tokens / account.computed_tokens < LEAST_EFFICIENCY:
        yield "something was computed twice"


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--models", type=int, nargs="+", choices=range(2, 6), default=[2, 5])
    options = parser.parse_args()
    print(f"{servers.machine('mlx', 'mlx-lm')}, float32, {options.clients} clients\n")
    columns = ("models", "at once", "replies", "streams", "cut", "switches", "wrong", "efficiency", "memory")
    print(f"| {' | '.join(columns)} | seconds |\n|{'---|' * (len(columns) + 1)}")
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        os.environ["STATE_ROOT"] = f"{root}/state"
        for family in FAMILIES:
            tiny_models.build(family, Path(root) / "models" / family, hidden=128, layers=2)
        for count in options.models:
            for loaded in (0, 1):
                families = FAMILIES[:count]
                problems += play(Path(root) / "models", families, loaded, options.requests, options.clients)
    for problem in problems:
        print(f"NOT AS IT HAS TO BE: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
