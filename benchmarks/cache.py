"""The speed and the memory of the prompt cache, beside its marks.

    python benchmarks/cache.py [--only SECTION ...] [--family NAME ...] [--lengths N ...] [--rounds N]
                               [--conversations N]

- `ttft`: a conversation grows turn by turn. Time to its first token through the engine loop, beside what
  mlx_lm needs for as many new tokens on a cache that is ready, in chunks as long as the engine's longest one.
  Both take turns; the median of their ratios.
- `restore`: another conversation copies n tokens out of pages; beside computing them, and for each token. And
  the next turn of the same one, which is handed its caches.
- `lookup`: planning a restore of a long prompt, without copying; what taking it in costs for each token.
- `cut`: the longest time for which the engine stands still when a long sequence cache becomes a run, when one
  leaf of that is cut, and when caches are put together from it. Tiny arrays: overhead alone.
- `stored`: bytes after many sessions on one system prompt, beside KV of distinct tokens and kept states.
- `peak`: highest MLX memory of a growing conversation, weights left out, over the KV that it ends with; less
  a chunk's work, which is what the same chunks take beyond their KV in mlx_lm's own caches. Then over the
  budget, if that is 1.1 conversations: of one that goes on from pages, of rows that join and leave a batch.
- `budget`: after every step of a random run with little room, MLX memory beside the weights over the budget
  and the caches of live rows, each row counted once: with rows that take turns, and with rows in a batch.
- `texts`: prompts without messages that are repeated, extended and edited: tokens that were unavoidable over
  those that were computed.
- `growth`: resident memory of the process along a random run: the median of the end of each quarter.

Everything runs in this process, on random models. --lengths replaces the prompt lengths of every section but
the random runs, for a quick look.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlx_lm.generate import generation_stream  # noqa: E402

from benchmarks import cache_cut, cache_memory, cache_speed, cache_texts, servers  # noqa: E402 - found through the line above
from benchmarks.cache_engine import PAGE, Model, Row, Size, build  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402

FAMILIES = {"dense": "qwen3", "hybrid": "qwen3_5", "sliding": "gemma3_text"}
ALL_FAMILIES = {**FAMILIES, "latent": "glm4_moe_lite"}
USUAL = Size(256, 4)
FOUR_LAYERS = Size(64, 4)
SMALL = Size(64, 2)


@dataclass(frozen=True)
class Bench:
    """The arguments of the command line, and the models that it takes."""

    folder: Path
    lengths: Sequence[int]
    rounds: int
    conversations: int

    def model(self, family: str, size: Size) -> Model:
        return build(self.folder / f"{family} {size}", family, size)

    def lengths_or(self, *usual: int) -> Sequence[int]:
        return self.lengths or usual

    def ttft(self, family: str) -> Iterator[Row]:
        for length in self.lengths_or(8192, 32_768):
            yield from cache_speed.ttft(self.model(family, USUAL), length, self.rounds)

    def restore(self, family: str) -> Iterator[Row]:
        yield from cache_speed.restore(self.model(family, SMALL), self.lengths_or(4096, 8192, 16_384, 32_768))

    def lookup(self, _: str) -> Iterator[Row]:
        for length in self.lengths_or(100_000):
            yield from cache_speed.lookup(length)

    def cut(self, _: str) -> Iterator[Row]:
        for length in self.lengths_or(100_000):
            yield from cache_cut.cut(length)

    def stored(self, family: str) -> Iterator[Row]:
        for length in self.lengths_or(8192):
            yield from cache_memory.stored(self.model(family, FOUR_LAYERS), length)

    def peak(self, family: str) -> Iterator[Row]:
        for length in self.lengths_or(32_768):
            yield from cache_memory.peak(
                self.model(family, cache_memory.DEEP.get(family, cache_memory.DEEPER)), length
            )
            yield from cache_memory.tight(self.model(family, cache_memory.DEEPER), length)

    def budget(self, family: str) -> Iterator[Row]:
        yield from cache_memory.budget(self.model(family, SMALL), self.conversations)

    def texts(self, family: str) -> Iterator[Row]:
        for length in self.lengths_or(1024, 2048, 4096):
            yield from cache_texts.texts(self.model(family, SMALL), length)

    def growth(self, family: str) -> Iterator[Row]:
        yield from cache_memory.growth(self.model(family, SMALL), self.conversations)


SECTIONS: dict[str, Callable[[Bench, str], Iterator[Row]]] = {
    "ttft": Bench.ttft,
    "restore": Bench.restore,
    "lookup": Bench.lookup,
    "cut": Bench.cut,
    "stored": Bench.stored,
    "peak": Bench.peak,
    "budget": Bench.budget,
    "texts": Bench.texts,
    "growth": Bench.growth,
}
FOR_ANY_FAMILY = ["lookup", "cut"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--family", nargs="+", choices=ALL_FAMILIES)
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="tokens; a multiple of 256")
    parser.add_argument("--rounds", type=int, default=10, help="turns of ttft")
    parser.add_argument(
        "--conversations", type=int, default=2000, help="requests of budget and growth, 40 or more"
    )
    return parser.parse_args()


def main() -> None:
    options = parsed()
    machine = servers.machine("mlx", "mlx-lm")
    print(f"{machine}, {mx.default_device()}; float32, pages of {PAGE}\n")
    print(f"    {shlex.join(['python', 'benchmarks/cache.py', *sys.argv[1:]])}\n")
    print("| mark | family | size | measured | limit |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, mx.stream(generation_stream):
        bench = Bench(Path(name), options.lengths, options.rounds, options.conversations)
        for section in options.only:
            usual = ALL_FAMILIES if section == "texts" else FAMILIES
            for family in [""] if section in FOR_ANY_FAMILY else options.family or usual:
                for row in SECTIONS[section](bench, ALL_FAMILIES.get(family, "")):
                    print(row, flush=True)


if __name__ == "__main__":
    run_with_openblas()
    main()
