"""What the disk tier costs and saves, on this disk.

    python benchmarks/ssd.py [--folder FOLDER] [--tokens 4096 16384 32768] [--files 20000]

A network with random weights computes prompts, its cache writes them, and another cache restores them, in one
process, so that the two are compared under the same conditions. Printed: GB/s written and restored; the time
of a restore as a share of computing the prompt, and of a copy in memory; bytes of the files as a share of the
bytes of KV; memory while restoring beyond what is there at the end, in pages; the time to scan a folder with
many files; the time to the first token over HTTP, from memory and from the disk. What is restored comes out
of the system's page cache unless `--cold` empties it before (root only). `--hidden` and `--layers` make
another network.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402 - found through the line above
from mlx_lm.generate import generation_stream  # noqa: E402

from benchmarks import servers  # noqa: E402
from scripts import tiny_models  # noqa: E402
from start_llm.cache.buffers import KVShape  # noqa: E402
from start_llm.cache.disk_index import DiskIndex, scan  # noqa: E402
from start_llm.cache.disk_tier import DiskAccess, DiskLimits, DiskTier  # noqa: E402
from start_llm.cache.eviction import EvictionLimits  # noqa: E402
from start_llm.cache.layers import Layers  # noqa: E402
from start_llm.cache.prompt_cache import PromptCache  # noqa: E402
from start_llm.core.disk_thread import DiskThread  # noqa: E402
from start_llm.models.loader import load  # noqa: E402
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics  # noqa: E402
from tests.serving import Server, serving  # noqa: E402

PAGE = 256
PLENTY = 10**12


class Kept:
    """A prompt cache with a disk tier."""

    def __init__(self, network: Any, folder: Path, shape: KVShape) -> None:
        self.metrics = DiskMetrics()
        self.thread = DiskThread(lambda error: print(f"  PROBLEM  {error!r}"))
        self.tier = DiskTier(folder, DiskLimits(PLENTY), self.thread, self.metrics, print)
        self.layers = Layers(network)
        limits = EvictionLimits(budget_bytes=PLENTY)
        self.cache = PromptCache(self.layers, limits=limits, page_size=PAGE, metrics=CacheMetrics())
        self.cache.attach_disk(DiskAccess(self.tier, shape))
        self.thread.start()
        self.tier.start()

    def compute(self, network: Any, ids: tuple[int, ...]) -> float:
        """Compute a prompt and keep it. Returns the seconds of computing."""
        opened = self.cache.open(ids, b"", (), 0, len(ids))
        began = time.perf_counter()
        for start in range(0, len(ids) - 1, 2048):
            chunk = ids[start : min(start + 2048, len(ids) - 1)]
            network(mx.array([chunk]), cache=opened.seq_cache.caches)
            mx.eval([cache.state for cache in opened.seq_cache.caches])
            self.cache.record_chunk(opened.seq_cache, chunk, keep_state=False)
        seconds = time.perf_counter() - began
        self.cache.close(opened.seq_cache, opened.seq_cache.caches, ids[:-1])
        return seconds

    def restore(self, ids: tuple[int, ...]) -> tuple[float, int]:
        """Restore a prompt from the disk. Returns seconds, and the tokens that were restored."""
        began = time.perf_counter()
        while wait := self.cache.wait_for_disk(ids, b"", len(ids)):
            while not wait.is_over:
                time.sleep(0.0005)
                self.cache.collect_from_disk()
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
def kept(network: Any, folder: Path, shape: KVShape) -> Generator[Kept]:
    one = Kept(network, folder, shape)
    try:
        yield one
    finally:
        one.close()


def measure(network: Any, shape: KVShape, folder: Path, tokens: int, *, cold: bool) -> None:
    ids = tuple(random.Random(tokens).randrange(1000) for _ in range(tokens + 1))
    with kept(network, folder, shape) as one:
        computing = one.compute(network, ids)
        began = time.perf_counter()
        one.cache.flush_to_disk(600)
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
        f"{100 * restoring / computing:.1f} %",
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
    prompts = [[rng.randrange(1000) for _ in range(tokens)] for _ in range(3)]
    os.environ["STATE_ROOT"] = f"{folder}/state"

    def seconds(server: Server, prompt: list[int]) -> float:
        began = time.perf_counter()
        usage = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})["usage"]
        known = usage["prompt_tokens_details"]["cached_tokens"]
        if len(prompt) > tokens and known < tokens - 1:
            raise SystemExit(f"{known} of {tokens} tokens were known")
        return time.perf_counter() - began

    times: list[list[float]] = []
    for number in range(2):
        with serving(model, ssd_folder=f"{folder}/ssd", drain_s=600) as server:
            if not number:
                for prompt in prompts:
                    seconds(server, prompt)
            times.append([seconds(server, [*prompt, *range(20 * (number + 1))]) for prompt in prompts])
    memory, disk = map(statistics.median, times)
    ratio = f"{disk / memory:.2f}"
    print(f"\nFirst token after {tokens:,}: {memory:.3f} s from memory, {disk:.3f} s from the disk: {ratio}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 32768])
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cold", action="store_true", help="empty the system's page cache before a restore")
    options = parser.parse_args()
    print(f"{servers.machine('mlx', 'mlx-lm')}\n")
    print("| tokens | KV | computing | GB/s written | GB/s restored | restore ÷ computing | ÷ copy in memory "
          "| files ÷ KV | peak beyond the end, pages |\n|" + "---|" * 9)  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as name, mx.stream(generation_stream):
        folder = Path(name)
        (folder / "model").mkdir()
        built = tiny_models.build("qwen3", folder / "model", hidden=options.hidden, layers=options.layers)
        network = load(built).network
        layers = Layers(network)
        probe = layers.fresh()
        network(mx.array([[1, 2]]), cache=probe)
        mx.eval([cache.state for cache in probe])
        shape = KVShape.of(layers, probe)
        for tokens in options.tokens:
            measure(network, shape, folder / str(tokens), tokens, cold=options.cold)
        measure_scan(folder / "many", options.files)
        measure_first_token(built, folder, max(options.tokens))
    mx.clear_streams()


if __name__ == "__main__":
    main()
