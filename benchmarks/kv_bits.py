"""What KV bits lose and save: next tokens behind quantised pages, beside those behind exact ones.

    python benchmarks/kv_bits.py

The demo model reads 400 tokens at 12 places of each text and says what comes next, 80 times. Tiny random
models read random tokens. All of it is quantised: `QUANTIZED_KV_START`, which keeps the first 5000 tokens
exact, is 0 here.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.servers import machine  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.cache.kv_format import KVFormat  # noqa: E402
from start_llm.config.paths import DEMO_MODEL  # noqa: E402
from start_llm.engine.resources import EngineResources  # noqa: E402
from start_llm.models.loader import LoadedModel, load  # noqa: E402
from tests.cache.conversations import tokens  # noqa: E402
from tests.cache.quantised_prompts import behind, divergence  # noqa: E402

KNOWN, SAID, PLACES = 400, 80, 12
TEXTS = ("LICENSE", "docs/demo-model.md", "docs/prompt-cache.md", "start_llm/engine/loop.py")
FAMILIES = ("qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite")


class Subject(NamedTuple):
    name: str
    resources: EngineResources
    prompts: Sequence[tuple[int, ...]]


def main() -> None:
    print(machine("mlx", "mlx-lm"))
    print(f"\nKL divergence in nats, mean of {PLACES} places (lowest to highest)\n")
    print(f"{'':<40} {'8 bits':<30} 4 bits")
    with tempfile.TemporaryDirectory() as folder:
        for subject in subjects(Path(folder)):
            print(f"{subject.name:<40} {lost(subject, 8):<30} {lost(subject, 4)}", flush=True)


def subjects(folder: Path) -> Iterator[Subject]:
    model = load(DEMO_MODEL)
    resources = resources_of(model)
    for text in TEXTS:
        ids = tuple(model.tokenizer.encode((ROOT / text).read_text(encoding="utf-8"), as_document=False))
        starts = [place * (len(ids) - KNOWN - SAID) // PLACES for place in range(PLACES)]
        yield Subject(f"demo, {text}", resources, [ids[start : start + KNOWN + SAID] for start in starts])
    for family in FAMILIES:
        model = load(tiny_models.build(family, folder / family, hidden=128, layers=2))
        prompts = [tokens(random.Random(place), KNOWN + SAID, KNOWN + SAID) for place in range(PLACES)]
        yield Subject(f"tiny {family}", resources_of(model), prompts)


def resources_of(model: LoadedModel) -> EngineResources:
    return EngineResources(
        model.network, model.tokenizer.token_bytes, frozenset(), max_sequences=1, batches=True
    )


def lost(subject: Subject, bits: int) -> str:
    form = KVFormat(bits, 64, 0)
    found = [
        divergence(*(behind(subject.resources, prompt, KNOWN, kv) for kv in (None, form)))
        for prompt in subject.prompts
    ]
    return f"{fmean(found):.1e} ({min(found):.1e} to {max(found):.1e})"


if __name__ == "__main__":
    main()
