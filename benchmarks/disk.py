"""The disk tier: its speed on this disk, restarts, and a server that is killed again and again."""

import atexit
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from benchmarks import disk_kills, disk_restarts
from benchmarks.harness import Part, row, table
from benchmarks.networks import resources_of
from scripts import tiny_models
from start_llm.cache.buffers import KVShape
from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_index import DiskIndex, scan
from start_llm.cache.disk.disk_tier import DiskAccess, DiskTier
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.engine.inbox import DiskNews
from start_llm.models.loader import load
from start_llm.storage.disk_thread import DiskThread
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics
from tests.engine.harness import Stepper, engine_request
from tests.serving import Server, serving

PAGE = PIECE = 256
PLENTY = 10**12
NEW, REPLY, ROUNDS = 64, 300, 5
"""Tokens of a question and of a reply, and how often they are measured."""
BEHIND = 32768
"""Tokens of a prompt that is written beside a reply."""


class Kept:
    """A prompt cache with a disk tier."""

    def __init__(self, network: Any, folder: Path, shape: KVShape, idle_s: float = 30) -> None:
        self.shape = shape
        self.metrics = DiskMetrics()
        self.thread = DiskThread(lambda error: print(f"  PROBLEM  {error!r}"))
        self.tier = DiskTier(folder, DiskLimits(PLENTY), self.thread, self.metrics, print)
        self.layers = Layers(network)
        limits = EvictionLimits(budget_bytes=PLENTY)
        self.cache = PromptCache(self.layers, limits=limits, page_size=PAGE, metrics=CacheMetrics())
        self.cache.attach_disk(DiskAccess(self.tier, shape, idle_s=idle_s))
        self.thread.start()
        self.tier.start()

    def fill(self, ids: tuple[int, ...]) -> None:
        """Keep a prompt with random KV."""
        opened = self.cache.opener.open(ids, b"", (), 0, len(ids))
        for start in range(0, len(ids) - 1, 2048):
            chunk = ids[start : min(start + 2048, len(ids) - 1)]
            append_random(self.shape, opened.seq_cache.caches, len(chunk))
            self.cache.record_chunk(opened.seq_cache, chunk, keep_state=False)
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, ids[:-1])

    def restore(self, ids: tuple[int, ...]) -> tuple[float, int]:
        """Restore a prompt from the disk. Returns seconds, and the tokens that were restored."""
        began = time.perf_counter()
        while wait := self.cache.disk.wait_for(ids, b"", len(ids), speed=1.0):
            while not wait.is_over:
                time.sleep(0.0005)
                self.cache.disk.collect()
        opened = self.cache.opener.open(ids, b"", (), 0, len(ids))
        seconds, tokens = time.perf_counter() - began, len(opened.seq_cache.tokens)
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, ids[:tokens])
        return seconds, tokens

    def write_all(self) -> float:
        """Write what is not on the disk yet. Returns seconds."""
        began = time.perf_counter()
        self.cache.disk.flush(600)
        while self.metrics.queue:
            time.sleep(0.001)
        return time.perf_counter() - began

    def close(self) -> None:
        self.thread.close(600)
        self.tier.close()


def shape_of(network: Any) -> KVShape:
    layers = Layers(network)
    probe = layers.fresh()
    network(mx.array([[1, 2]]), cache=probe)
    mx.eval([cache.state for cache in probe])
    return KVShape.of(layers, probe)


def append_random(shape: KVShape, caches: list[Any], tokens: int) -> None:
    """Append random KV of so many tokens to caches."""
    layouts = shape.tensors(tokens)
    for leaf, cache in enumerate(caches):
        pair = (mx.random.normal(layouts[f"kv.{leaf}.{index}"].shape) for index in range(2))
        cache.update_and_fetch(*pair)
    mx.eval([cache.state for cache in caches])


def computing_s(network: Any, shape: KVShape, tokens: int) -> float:
    """Return the seconds in which a prompt is computed, from pieces at five places."""
    seconds: list[float] = []
    for place in range(5):
        caches = Layers(network).fresh()
        if before := (tokens - PIECE) * place // 4:
            append_random(shape, caches, before)
        seconds.append(piece_s(network, caches))
    return (sum(seconds) - (seconds[0] + seconds[-1]) / 2) / 4 * tokens / PIECE


def piece_s(network: Any, caches: list[Any]) -> float:
    began = time.perf_counter()
    network(mx.array([[7] * PIECE]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return time.perf_counter() - began


def reply_s(stepper: Stepper, number: int) -> float:
    """Return the seconds of a reply, without its prompt."""
    watched = stepper.submit(engine_request((number, *range(60)), REPLY + 10))
    stepper.step_until(lambda: len(watched.tokens) >= 5)
    began, already = time.perf_counter(), len(watched.tokens)
    stepper.step_until(lambda: len(watched.tokens) >= already + REPLY, max_steps=10 * REPLY)
    seconds = time.perf_counter() - began
    stepper.finish(watched)
    return seconds


def measure(network: Any, shape: KVShape, folder: Path, tokens: int) -> None:
    """Print a row: a cache writes a prompt, another one restores it."""
    ids = tuple(random.Random(tokens).randrange(1000) for _ in range(tokens + 1))
    computing = computing_s(network, shape, tokens)
    with closing(Kept(network, folder, shape)) as kept:
        kept.fill(ids)
        writing, written = kept.write_all(), kept.metrics.written_bytes
    ideal, page = (sum(tensor.nbytes for tensor in shape.tensors(count).values()) for count in (tokens, PAGE))
    with closing(Kept(network, folder, shape)) as kept:
        mx.clear_cache()
        mx.reset_peak_memory()
        restoring, restored = kept.restore(ids)
        beyond = mx.get_peak_memory() - mx.get_active_memory()
    if restored != tokens:
        raise SystemExit(f"{restored} tokens were restored, not {tokens}")
    row(
        f"{tokens:,}",
        f"{ideal / 2**20:,.0f} MiB",
        f"{computing:.2f} s",
        f"{ideal / writing / 1e9:.2f}",
        f"{ideal / restoring / 1e9:.2f}",
        f"{100 * restoring / computing:.2f} %",
        f"{written / ideal:.3f}",
        f"{beyond / page:.1f}",
    )


def restore(
    folder: Path,
    *,
    tokens: Sequence[int] = (4096, 16384, 32768, 102400),
    disk: Path | None = None,
    hidden: int = 512,
    layers: int = 4,
) -> None:
    """A cache writes prompts, another one restores them: speed, memory, and bytes of files beside the KV's.

    The time of a restore is given as a share of computing the prompt. The KV is random: computing 100,000
    tokens takes an hour here. Its time is that of pieces of 256 tokens at five places, taken together as the
    trapezoidal rule does. What is restored comes out of the system's page cache.

    Args:
        disk: a folder on the disk to measure, in place of a temporary one
        hidden: width of the network
    """
    with tempfile.TemporaryDirectory(dir=disk) as place, mx.stream(generation_stream):
        network = load(tiny_models.build("qwen3", folder, hidden=hidden, layers=layers)).network
        shape = shape_of(network)
        kib = sum(tensor.nbytes for tensor in shape.tensors(1).values()) / 1024
        print(f"A token has {kib:.0f} KiB of KV.\n")
        table(
            "tokens | KV | computing | GB/s written | GB/s restored | restore ÷ computing | files ÷ KV | "
            "peak beyond the end, pages"
        )
        for count in tokens:
            measure(network, shape, Path(place) / str(count), count)


def first(
    folder: Path,
    *,
    first: Sequence[int] = (8192, 32768),
    disk: Path | None = None,
    hidden: int = 512,
    layers: int = 4,
) -> None:
    """The time to the first token over HTTP, from memory and from the disk after a restart.

    Args:
        first: tokens that are known
    """
    model = tiny_models.build("qwen3", folder, hidden=hidden, layers=layers)
    for tokens in first:
        with tempfile.TemporaryDirectory(dir=disk) as place:
            memory, restored = map(statistics.median, _first_tokens(model, f"{place}/ssd", tokens))
        print(
            f"First token after {tokens:,} known tokens and {NEW} new ones: {memory:.3f} s from memory, "
            f"{restored:.3f} s from the disk: {restored / memory:.2f}.",
            flush=True,
        )


def _first_tokens(model: Path, ssd_folder: str, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds from memory, and from the disk."""
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(tokens)]
    life = partial(serving, model, ssd_folder=ssd_folder, drain_s=600)

    def seconds(server: Server) -> float:
        began = time.perf_counter()
        asked = [*prompt, *(rng.randrange(1000) for _ in range(NEW))]
        usage = server.post("/v1/completions", {"prompt": asked, "max_tokens": 1})["usage"]
        known = usage["prompt_tokens_details"]["cached_tokens"]
        if known < tokens:
            raise SystemExit(f"{known} of {tokens} tokens were known")
        return time.perf_counter() - began

    disk: list[float] = []
    with life() as server:
        for end in (*range(4096, tokens, 4096), tokens):  # at once it takes longer than a client waits
            server.post("/v1/completions", {"prompt": prompt[:end], "max_tokens": 1})
        memory = [seconds(server) for _ in range(ROUNDS)]
    for _ in range(ROUNDS):
        with life() as server:
            server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
            disk.append(seconds(server))
    return memory, disk


def _wake(stepper: Stepper) -> None:
    stepper.inbox.put(DiskNews())


def beside(folder: Path, *, hidden: int = 512, layers: int = 4) -> None:
    """Tokens per second of a reply alone, and beside a writer that has more to write than it can.

    Both are measured in turn.
    """
    alone, together, written = list[float](), list[float](), list[int]()
    with mx.stream(generation_stream):
        model = load(tiny_models.build("qwen3", folder / "model", hidden=hidden, layers=layers))
        resources = resources_of(model, 2)
        with closing(Kept(model.network, folder / "ssd", shape_of(model.network), idle_s=0)) as kept:
            stepper = Stepper(replace(resources, cache=kept.cache), clock=time.monotonic)
            kept.tier.traffic.notify = partial(_wake, stepper)
            for number in range(ROUNDS):
                kept.cache.disk.flush(600)
                alone.append(reply_s(stepper, number))
                kept.cache.disk.flush(600)
                rng = random.Random(number)
                kept.fill(tuple(rng.randrange(1000) for _ in range(BEHIND)))
                kept.cache.disk.write_due(
                    is_busy=False
                )  # finds what is due; beside a reply it looks now and then
                before = kept.metrics.written_bytes
                together.append(reply_s(stepper, number + ROUNDS))
                written.append(kept.metrics.written_bytes - before)
                if not kept.metrics.queue:
                    raise SystemExit("the writer had nothing left to write")
    mine, other = (REPLY / statistics.median(seconds) for seconds in (alone, together))
    rate = f"{sum(written) / sum(together) / 1e6:.0f} MB/s"
    print(f"A reply alone has {mine:.0f} tokens/s, {other:.0f} beside a writer of {rate}: {other / mine:.3f}")


def scan_files(folder: Path, *, files: int = 20_000) -> None:
    """The time to scan a folder with many files."""
    rng = random.Random(1)
    for _ in range(files):
        key = rng.randbytes(16).hex()
        path = folder / "pages" / key[:2] / f"{rng.randbytes(16).hex()}-{key}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    index = DiskIndex()
    began = time.perf_counter()
    for scanned in scan(folder):
        if scanned.cached:
            index.add(scanned.cached)
    print(f"A scan of {len(index):,} files took {1000 * (time.perf_counter() - began):.0f} ms.")


atexit.register(mx.clear_streams)  # else the process aborts when it ends (lesson 4)

PARTS: Mapping[str, Part] = {
    "restore": restore,
    "first": first,
    "beside": beside,
    "scan": scan_files,
    "restarts": disk_restarts.restarts,
    "kills": disk_kills.kills,
}
