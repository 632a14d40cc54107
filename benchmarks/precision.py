"""What fewer bits lose and save: quantised pages of the prompt cache, and float32 weights on a CPU."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from benchmarks.harness import ROOT, Part, row, table
from scripts import tiny_models
from start_llm.cache.kv_format import KVFormat, first_quantized
from start_llm.cache.layers import Layers
from start_llm.config.paths import DEMO_MODEL
from start_llm.models.loader import LoadedModel, load
from start_llm.models.machines import gib
from tests.cache.conversations import layers_of, tokens
from tests.cache.quantised_prompts import Loss, PromptBehindPages, loss

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
    generated: int
    places: int
    page: int


SMALL, REAL = Sizes(400, 80, 12, 32), Sizes(800, 96, 4, _PAGE)


class Subject(NamedTuple):
    name: str
    network: Any
    prompts: Sequence[tuple[int, ...]]


def formats_of(page: int) -> Mapping[str, KVFormat]:
    start = first_quantized(0, page)
    return {
        "8 bits": KVFormat(8, 64, start),
        "4 bits": KVFormat(4, 64, start),
        "turboquant, 4 bits": KVFormat(4, 64, start, "turboquant"),
        "turboquant, 3.5 bits": KVFormat(3.5, 64, start, "turboquant"),
    }


def documents(model: LoadedModel, name: str, texts: Sequence[str], sizes: Sizes) -> Iterator[Subject]:
    """Yield parts of texts, each behind the token that begins a document, if the tokenizer has one."""
    length = sizes.known + sizes.generated
    beginning = tuple(model.tokenizer.encode("", as_document=True))
    for text in texts:
        ids = tuple(model.tokenizer.encode((ROOT / text).read_text(encoding="utf-8"), as_document=False))
        starts = [place * (len(ids) - length) // sizes.places for place in range(sizes.places)]
        prompts = [(*beginning, *ids[start : start + length])[:length] for start in starts]
        yield Subject(f"{name}, {Path(text).name}", model.network, prompts)


def losses(subject: Subject, sizes: Sizes, formats: Mapping[str, KVFormat]) -> Iterator[str]:
    pages = [PromptBehindPages.read(subject.network, prompt, sizes.known) for prompt in subject.prompts]
    for form in formats.values():
        yield _summary([loss(page.exact, page.behind(form)) for page in pages])


def _summary(losses: Sequence[Loss]) -> str:
    lost = [page.divergence for page in losses]
    same = fmean(page.same_top for page in losses)
    return f"{fmean(lost):.1e} ({min(lost):.1e} to {max(lost):.1e}) {same:.3f}"


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
    return f"{share:.3f}, {pack_ms:.1f}, {restore_ms:.1f}"


class _Heads:
    """Stands for a network of 8 layers with 8 heads of keys and values."""

    def __init__(self, width: int) -> None:
        self._width = width

    def make_cache(self) -> list[Any]:
        return [KVCache() for _ in range(8)]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> None:
        shape = (1, 8, ids.shape[1], self._width)
        for layer in cache:
            layer.update_and_fetch(*(mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)))

    def filled(self, layers: Layers) -> list[Any]:
        caches = layers.fresh()
        self(mx.zeros((1, _PAGE)), caches)
        mx.eval([layer.state for layer in caches])
        return caches


def _cpu_ms(work: Callable[[], object], times: int = 5) -> float:
    """Return the median; `work` evaluates what it makes."""
    spent: list[float] = []
    for _ in range(times):
        began = time.process_time()
        work()
        spent.append((time.process_time() - began) * 1000)
    return sorted(spent)[times // 2]


# ------------------------------------------------------------------------------------------- float32 weights


PROMPT, TOKENS = 8, 3
NEVER, ALWAYS = 0, 10**15


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds, of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def forward(model: LoadedModel, tokens: list[int], caches: list[Any]) -> None:
    logits = model.network(mx.array([tokens]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])


def measure(folder: Path, most_float32_bytes: int) -> tuple[list[str], float]:
    """Return the cells of a row, and the seconds of a token."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded: list[LoadedModel] = []
    load_s = seconds(lambda: loaded.append(load(folder, most_float32_bytes=most_float32_bytes)))
    peak, (model,) = mx.get_peak_memory() - before, loaded
    caches = make_prompt_cache(model.network)
    forward(model, [2], caches)
    token_s = median(seconds(lambda: forward(model, [7], caches)) for _ in range(TOKENS))
    prompt_s = seconds(lambda: forward(model, [5] * PROMPT, caches))
    kind = "float32" if most_float32_bytes else model.precision.stored
    return [folder.name, kind, f"{load_s:.1f}", gib(peak), f"{token_s:.3f}", f"{prompt_s:.2f}"], token_s


def kv_bits(folder: Path, *, real: Path | None = None) -> None:
    """What quantised pages lose: next tokens behind them, beside those behind exact ones.

    The demo model reads 400 tokens at 12 places of each text and says what comes next, 80 times. Tiny random
    models read random tokens. A real model reads 800 tokens at 4 places of each text: prose, code, JSON, and
    a mix. The first page is exact, as it always is; all else is quantised. `QUANTIZED_KV_START`, which keeps
    the first 5000 tokens exact, is 0 here. A cell has the mean KL divergence in nats (lowest to highest
    place), and the share of top tokens that stay.

    Args:
        real: a model with real weights
    """
    sizes = REAL if real else SMALL
    formats = formats_of(sizes.page)
    size = f"{sizes.known} tokens restored, {sizes.generated} said, {sizes.places} places"
    table(" | ".join((size, *formats)))
    for subject in _subjects(folder, real):
        row(subject.name, *losses(subject, sizes, formats))


def _subjects(folder: Path, real: Path | None) -> Iterator[Subject]:
    if real:
        yield from documents(load(real), real.name, REAL_TEXTS, REAL)
        return
    yield from documents(load(DEMO_MODEL), "demo", TEXTS, SMALL)
    length = SMALL.known + SMALL.generated
    for family in FAMILIES:
        model = load(tiny_models.build(family, folder / family, hidden=128, layers=2))
        prompts = [tokens(random.Random(place), length, length) for place in range(SMALL.places)]
        yield Subject(f"tiny {family}", model.network, prompts)


def kv_costs(_: Path) -> None:
    """What quantised pages save and cost: share of bytes, and CPU ms to quantise and to restore."""
    widths = (64, 128, 256)
    heads = (f"{width} elements a head" for width in widths)
    table(" | ".join((f"{_PAGE} tokens, 8 layers of 8 heads, bfloat16", *heads)))
    for name in formats_of(_PAGE):
        row(name, *(cost(name, width) for width in widths))


def float32(_: Path, *, models: Sequence[Path] = ()) -> None:
    """What float32 weights win on a CPU: the weights of folders as they are stored, beside converted ones.

    CPU seconds to load it, of a token that is decoded and of 8 tokens of a prompt, and the memory at its
    highest while it is loaded. `tests/models/test_float32.py` compares what both say.

    Args:
        models: folders
    """
    table(f"model | weights | load | highest memory | a token | {PROMPT} tokens of a prompt | faster")
    for folder in models:
        (stored, stored_s), (converted, converted_s) = (measure(folder, most) for most in (NEVER, ALWAYS))
        row(*stored, "")
        row(*converted, f"{stored_s / converted_s:.1f} ×")


PARTS: Mapping[str, Part] = {"kv-bits": kv_bits, "kv-costs": kv_costs, "float32": float32}
