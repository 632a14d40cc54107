"""What KV bits lose and save: next tokens behind quantised pages, beside those behind exact ones.

    python benchmarks/kv_bits.py
    python benchmarks/kv_bits.py --real FOLDER      a model with real weights, on four texts

The demo model reads 400 tokens at 12 places of each text and says what comes next, 80 times. Tiny random
models read random tokens. A real model reads 800 tokens at 4 places of each text: prose, code, JSON, and a
mix. The first page is exact, as it always is; all else is quantised. `QUANTIZED_KV_START`, which keeps the
first 5000 tokens exact, is 0 here.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import mlx.core as mx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.servers import machine  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.cache.kv_format import KVFormat, first_quantized  # noqa: E402
from start_llm.cache.layers import Layers  # noqa: E402
from start_llm.config.paths import DEMO_MODEL  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.models.loader import LoadedModel, load  # noqa: E402
from tests.cache.conversations import layers_of, tokens  # noqa: E402
from tests.cache.quantised_prompts import Loss, PromptBehindPages, loss  # noqa: E402

TEXTS = ("LICENSE", "docs/demo-model.md", "docs/prompt-cache.md", "start_llm/engine/loop.py")
REAL_TEXTS = (
    *("docs/prompt-cache.md", "start_llm/engine/loop.py", "tests/transcripts/echoes/codex.json"),
    "docs/ARCHITECTURE.md",
)
FAMILIES = ("qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite")
_PAGE = 256


class Sizes(NamedTuple):
    """Tokens that are restored and said, places in each text, and tokens of a page."""

    known: int
    said: int
    places: int
    page: int


SMALL, REAL = Sizes(400, 80, 12, 32), Sizes(800, 96, 4, _PAGE)


class Subject(NamedTuple):
    name: str
    network: Any
    prompts: Sequence[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, metavar="FOLDER", help="a model with real weights")
    real: Path | None = parser.parse_args().real
    sizes = REAL if real else SMALL
    formats = formats_of(sizes.page)
    print(machine("mlx", "mlx-lm"))
    print(f"\nMean KL divergence in nats (lowest to highest of {sizes.places} places), and the share of top")
    print(f"tokens that stay. {sizes.known} tokens restored, {sizes.said} said\n")
    print(f"{'':<38}" + "".join(f"{name:<40}" for name in formats))
    with tempfile.TemporaryDirectory() as folder:
        for subject in real_subjects(real) if real else small_subjects(Path(folder)):
            print(f"{subject.name:<38}" + "".join(f"{told:<40}" for told in losses(subject, sizes, formats)))
            sys.stdout.flush()
    print_costs()


def formats_of(page: int) -> Mapping[str, KVFormat]:
    start = first_quantized(0, page)
    return {
        "8 bits": KVFormat(8, 64, start),
        "4 bits": KVFormat(4, 64, start),
        "turboquant, 4 bits": KVFormat(4, 64, start, "turboquant"),
        "turboquant, 3.5 bits": KVFormat(3.5, 64, start, "turboquant"),
    }


def real_subjects(folder: Path) -> Iterator[Subject]:
    yield from documents(load(folder), folder.name, REAL_TEXTS, REAL)


def small_subjects(folder: Path) -> Iterator[Subject]:
    yield from documents(load(DEMO_MODEL), "demo", TEXTS, SMALL)
    length = SMALL.known + SMALL.said
    for family in FAMILIES:
        model = load(tiny_models.build(family, folder / family, hidden=128, layers=2))
        prompts = [tokens(random.Random(place), length, length) for place in range(SMALL.places)]
        yield Subject(f"tiny {family}", model.network, prompts)


def documents(model: LoadedModel, name: str, texts: Sequence[str], sizes: Sizes) -> Iterator[Subject]:
    """Yield parts of texts, each behind the token that begins a document, if the tokenizer has one."""
    length = sizes.known + sizes.said
    beginning = tuple(model.tokenizer.encode("", as_document=True))
    for text in texts:
        ids = tuple(model.tokenizer.encode((ROOT / text).read_text(encoding="utf-8"), as_document=False))
        starts = [place * (len(ids) - length) // sizes.places for place in range(sizes.places)]
        prompts = [(*beginning, *ids[start : start + length])[:length] for start in starts]
        yield Subject(f"{name}, {Path(text).name}", model.network, prompts)


def losses(subject: Subject, sizes: Sizes, formats: Mapping[str, KVFormat]) -> Iterator[str]:
    pages = [PromptBehindPages.read(subject.network, prompt, sizes.known) for prompt in subject.prompts]
    for form in formats.values():
        yield _told([loss(one.exact, one.behind(form)) for one in pages])


def _told(found: Sequence[Loss]) -> str:
    lost = [one.divergence for one in found]
    same = fmean(one.same_top for one in found)
    return f"{fmean(lost):.1e} ({min(lost):.1e} to {max(lost):.1e}) {same:.3f}"


# ----------------------------------------------------------------------------------------- bytes and seconds


def print_costs() -> None:
    print(f"\nA page of {_PAGE} tokens, 8 layers of 8 heads, bfloat16: share of bytes, and CPU ms\n")
    print(f"{'':<24} {'64':<26} {'128':<26} 256 elements a head")
    for name in formats_of(_PAGE):
        told = [cost(name, width) for width in (64, 128, 256)]
        print(f"{name:<24} " + " ".join(f"{one:<26}" for one in told), flush=True)


def cost(name: str, width: int) -> str:
    """Return bytes beside those of bfloat16, and CPU milliseconds to quantise and to restore."""
    form = formats_of(_PAGE)[name]
    network = _Heads(width)
    layers = layers_of(network, form)
    exact = network.filled(layers)
    page = layers.page(layers.borrow(exact, 0, _PAGE), form.start)
    share = page.nbytes / layers.cut(exact, 0, _PAGE).nbytes
    pack_ms = _cpu_ms(lambda: layers.page(layers.borrow(exact, 0, _PAGE), form.start))
    restore_ms = _cpu_ms(lambda: layers.assemble([page], None, _PAGE))
    return f"{share:.3f}  {pack_ms:5.1f}  {restore_ms:5.1f}"


class _Heads:
    """Stands for a network of 8 layers with 8 heads of keys and values."""

    def __init__(self, width: int) -> None:
        self._width = width

    def make_cache(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache  # noqa: PLC0415 - start_llm.models has to be first (lesson 2)

        return [KVCache() for _ in range(8)]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> None:
        shape = (1, 8, ids.shape[1], self._width)
        for one in cache:
            one.update_and_fetch(*(mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)))

    def filled(self, layers: Layers) -> list[Any]:
        caches = layers.fresh()
        self(mx.zeros((1, _PAGE)), caches)
        mx.eval([one.state for one in caches])
        return caches


def _cpu_ms(work: Callable[[], object], times: int = 5) -> float:
    """Return the median; `work` evaluates what it makes."""
    spent: list[float] = []
    for _ in range(times):
        began = time.process_time()
        work()
        spent.append((time.process_time() - began) * 1000)
    return sorted(spent)[times // 2]


if __name__ == "__main__":
    run_with_openblas()
    main()
