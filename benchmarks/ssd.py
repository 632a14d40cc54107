"""Measure the costs and savings of the disk tier, on this disk.

    python benchmarks/ssd.py [--only PART ...] [--folder FOLDER] [--tokens 4096 16384 32768 102400]

The parts, all with a network with random weights, in one process, so that what is compared is measured under
the same conditions:

restore  a cache writes prompts, another one restores them. GB/s written and restored; the time of a restore
         as a share of computing the prompt, and of a copy in memory; bytes of the files as a share of the
         bytes of KV; memory while restoring beyond what is there at the end, in pages. The KV of these
         prompts is random: computing 100,000 tokens takes an hour here. Its time is that of pieces of 256
         tokens at five places, taken together as the trapezoidal rule does, and is compared with the time
         of a whole prompt for the shortest one.
first    the time to the first token over HTTP, from memory and from the disk after a restart
beside   tokens per second of a reply alone, and beside a writer that has more to write than it can
scan     the time to scan a folder with many files

What is restored comes out of the system's page cache unless `--cold` empties it before (root only).
`--hidden` and `--layers` make another network.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402 - found through the line above
from mlx_lm.generate import generation_stream  # noqa: E402

from benchmarks import servers  # noqa: E402
from scripts import tiny_models  # noqa: E402
from start_llm.cache.buffers import KVShape  # noqa: E402
from start_llm.cache.disk.disk_folder import DiskLimits  # noqa: E402
from start_llm.cache.disk.disk_index import DiskIndex, scan  # noqa: E402
from start_llm.cache.disk.disk_tier import DiskAccess, DiskTier  # noqa: E402
from start_llm.cache.eviction import EvictionLimits  # noqa: E402
from start_llm.cache.layers import Layers  # noqa: E402
from start_llm.cache.prompt_cache import PromptCache  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.engine.inbox import DiskNews  # noqa: E402
from start_llm.models.loader import LoadedModel, load  # noqa: E402
from start_llm.storage.disk_thread import DiskThread  # noqa: E402
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics  # noqa: E402
from tests.engine.harness import Stepper, engine_request, uncached_resources  # noqa: E402
from tests.serving import Server, serving  # noqa: E402

PAGE = PIECE = 256
PLENTY = 10**12
NEW, REPLY, ROUNDS = 64, 300, 5
"""Tokens of a question and of a reply, and how often they are measured."""
PARTS = ["restore", "first", "beside", "scan"]


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
        opened = self.cache.open(ids, b"", (), 0, len(ids))
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
        opened = self.cache.open(ids, b"", (), 0, len(ids))
        seconds, tokens = time.perf_counter() - began, len(opened.seq_cache.tokens)
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, ids[:tokens])
        return seconds, tokens

    def copied(self, ids: tuple[int, ...]) -> float:
        """Restore from memory what a running sequence holds, which is a copy. Returns seconds."""
        first = self.cache.open(ids, b"", (), 0, len(ids))
        began = time.perf_counter()
        second = self.cache.open(ids, b"", (), 0, len(ids))
        seconds = time.perf_counter() - began
        self.cache.discard(second.seq_cache)
        self.cache.close(first.seq_cache, first.seq_cache.caches, first.seq_cache.tokens)
        return seconds

    def close(self) -> None:
        self.thread.close(600)
        self.tier.close()


@contextmanager
def kept(network: Any, folder: Path, shape: KVShape, idle_s: float = 30) -> Generator[Kept]:
    one = Kept(network, folder, shape, idle_s)
    try:
        yield one
    finally:
        one.close()


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


def whole_s(network: Any, tokens: int) -> float:
    """Return the seconds in which a whole prompt was computed."""
    caches = Layers(network).fresh()
    return sum(piece_s(network, caches) for _ in range(tokens // PIECE))


def measure(network: Any, shape: KVShape, folder: Path, tokens: int, *, cold: bool) -> None:
    ids = tuple(random.Random(tokens).randrange(1000) for _ in range(tokens + 1))
    computing = computing_s(network, shape, tokens)
    with kept(network, folder, shape) as one:
        one.fill(ids)
        began = time.perf_counter()
        one.cache.disk.flush(600)
        while one.metrics.queue:
            time.sleep(0.001)
        writing = time.perf_counter() - began
        in_memory = one.copied(ids)
        written = one.metrics.written_bytes
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    ideal = sum(layout.nbytes for layout in shape.tensors(tokens).values())
    with kept(network, folder, shape) as one:
        mx.clear_cache()
        mx.reset_peak_memory()
        restoring, restored = one.restore(ids)
        beyond = mx.get_peak_memory() - mx.get_active_memory()
    if restored != tokens:
        raise SystemExit(f"{restored} tokens were restored, not {tokens}")
    page = sum(layout.nbytes for layout in shape.tensors(PAGE).values())
    cells = [
        f"{tokens:,}",
        f"{ideal / 2**20:,.0f} MiB",
        f"{computing:.2f} s",
        f"{ideal / writing / 1e9:.2f}",
        f"{ideal / restoring / 1e9:.2f}",
        f"{100 * restoring / computing:.2f} %",
        f"{restoring / in_memory:.2f}",
        f"{written / ideal:.3f}",
        f"{beyond / page:.1f}",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)


def measure_scan(folder: Path, count: int) -> None:
    rng = random.Random(1)
    for _ in range(count):
        key = rng.randbytes(16).hex()
        path = folder / "pages" / key[:2] / f"{rng.randbytes(16).hex()}-{key}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    index = DiskIndex()
    began = time.perf_counter()
    for found in scan(folder):
        if found.cached:
            index.add(found.cached)
    seconds = time.perf_counter() - began
    print(f"\nA scan of {len(index):,} files took {seconds * 1000:.0f} ms.")


def measure_first_token(model: Path, folder: Path, tokens: int) -> None:
    """Print the time to the first token over HTTP: from memory, and after a restart from the disk."""
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(tokens)]
    os.environ["STATE_ROOT"] = f"{folder}/state"

    def seconds(server: Server) -> float:
        began = time.perf_counter()
        asked = [*prompt, *(rng.randrange(1000) for _ in range(NEW))]
        usage = server.post("/v1/completions", {"prompt": asked, "max_tokens": 1})["usage"]
        known = usage["prompt_tokens_details"]["cached_tokens"]
        if known < tokens:
            raise SystemExit(f"{known} of {tokens} tokens were known")
        return time.perf_counter() - began

    def life() -> AbstractContextManager[Server]:
        return serving(model, ssd_folder=f"{folder}/ssd", drain_s=600)

    disk: list[float] = []
    with life() as server:
        for end in (*range(4096, tokens, 4096), tokens):  # at once it takes longer than a client waits
            server.post("/v1/completions", {"prompt": prompt[:end], "max_tokens": 1})
        memory = [seconds(server) for _ in range(ROUNDS)]
    for _ in range(ROUNDS):
        with life() as server:
            server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 1})
            disk.append(seconds(server))
    one, other = statistics.median(memory), statistics.median(disk)
    print(f"\nFirst token after {tokens:,} known tokens and {NEW} new ones: {one:.3f} s from memory, "
          f"{other:.3f} s from the disk: {other / one:.2f}.", flush=True)  # fmt: skip


def measure_beside(model: LoadedModel, shape: KVShape, folder: Path, tokens: int) -> None:
    """Print the speed of a reply alone and beside a writer, measured in turn."""
    resources = uncached_resources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=2, batches=True
    )
    alone: list[float] = []
    beside: list[float] = []
    written: list[int] = []
    with kept(model.network, folder, shape, idle_s=0) as one:
        stepper = Stepper(replace(resources, cache=one.cache), clock=time.monotonic)

        def notify() -> None:
            stepper.inbox.put(DiskNews())

        one.tier.traffic.notify = notify
        for number in range(ROUNDS):
            one.cache.disk.flush(600)
            alone.append(reply_s(stepper, number))
            one.cache.disk.flush(600)
            rng = random.Random(number)
            one.fill(tuple(rng.randrange(1000) for _ in range(tokens)))
            one.cache.disk.write_due(is_busy=False)  # finds what is due; beside a reply it looks now and then
            before = one.metrics.written_bytes
            beside.append(reply_s(stepper, number + ROUNDS))
            written.append(one.metrics.written_bytes - before)
            if not one.metrics.queue:
                raise SystemExit("the writer had nothing left to write")
    mine, other = REPLY / statistics.median(alone), REPLY / statistics.median(beside)
    rate = sum(written) / sum(beside) / 1e6
    print(f"\nA reply alone has {mine:.0f} tokens/s, and {other:.0f} beside a writer of {rate:.0f} MB/s: "
          f"{other / mine:.3f}.", flush=True)  # fmt: skip


def reply_s(stepper: Stepper, number: int) -> float:
    """Return the seconds of a reply, without its prompt."""
    watched = stepper.submit(engine_request((number, *range(60)), REPLY + 10))
    stepper.step_until(lambda: len(watched.tokens) >= 5)
    began, already = time.perf_counter(), len(watched.tokens)
    stepper.step_until(lambda: len(watched.tokens) >= already + REPLY, max_steps=10 * REPLY)
    seconds = time.perf_counter() - began
    stepper.finish(watched)
    return seconds


def measure_restores(network: Any, shape: KVShape, folder: Path, options: argparse.Namespace) -> None:
    shortest = min(options.tokens)
    whole, pieces = whole_s(network, shortest), computing_s(network, shape, shortest)
    print(f"Computing {shortest:,} tokens takes {whole:.2f} s, {pieces:.2f} s as it is told here.\n")
    print("| tokens | KV | computing | GB/s written | GB/s restored | restore ÷ computing | ÷ copy in memory "
          "| files ÷ KV | peak beyond the end, pages |\n|" + "---|" * 9)  # fmt: skip
    for tokens in options.tokens:
        measure(network, shape, folder / str(tokens), tokens, cold=options.cold)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768, 102400])
    parser.add_argument("--first", type=int, nargs="+", default=[8192, 32768], help="for the first token")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cold", action="store_true", help="empty the system's page cache before a restore")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    print(f"{servers.machine('mlx', 'mlx-lm')}\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as name, mx.stream(generation_stream):
        folder = Path(name)
        (folder / "model").mkdir()
        built = tiny_models.build("qwen3", folder / "model", hidden=options.hidden, layers=options.layers)
        model = load(built)
        shape = shape_of(model.network)
        print(f"A token has {sum(one.nbytes for one in shape.tensors(1).values()) / 1024:.0f} KiB of KV.\n")
        if "restore" in options.only:
            measure_restores(model.network, shape, folder, options)
        if "first" in options.only:
            for tokens in options.first:
                measure_first_token(built, folder / f"first{tokens}", tokens)
        if "beside" in options.only:
            measure_beside(model, shape, folder / "beside", 32768)
        if "scan" in options.only:
            measure_scan(folder / "many", options.files)
    mx.clear_streams()


if __name__ == "__main__":
    run_with_openblas()
    main()
