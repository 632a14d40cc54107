"""What float32 weights win on a CPU: the weights of a folder as they are stored, beside converted ones.

    python benchmarks/cpu_weights.py FOLDER ...

Of each folder: CPU seconds to load it, of a token that is decoded and of 8 tokens of a prompt; the memory at
its highest while it is loaded; and how far the next tokens' distributions behind some texts are apart.

MLX adds up in the type of the numbers that it multiplies. So the converted weights are compared with the
stored ones once more, while scales, norms and the numbers between the layers are float32 (`exactly`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlx.core as mx  # noqa: E402 - found through the line above
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from benchmarks.servers import machine  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.models.loader import LoadedModel, load  # noqa: E402
from start_llm.models.machines import gib  # noqa: E402

PROMPT, TOKENS, COMPARED = 8, 3, 8
TEXTS = ("LICENSE", "docs/prompt-cache.md", "start_llm/engine/loop.py")
NEVER, ALWAYS = 0, 10**15


def seconds(work: Callable[[], Any]) -> float:
    """CPU seconds, of all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def forward(model: LoadedModel, tokens: list[int], caches: list[Any]) -> mx.array:
    logits = model.network(mx.array([tokens]), cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    return logits[0].astype(mx.float32)


def distributions(model: LoadedModel) -> list[mx.array]:
    """Logarithms of probabilities [tokens, vocabulary] of each text."""
    found: list[mx.array] = []
    for text in TEXTS:
        tokens = model.tokenizer.encode((ROOT / text).read_text(encoding="utf-8"), as_document=True)
        logits = forward(model, tokens[:COMPARED], make_prompt_cache(model.network))
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    mx.eval(found)
    return found


def measure(folder: Path, most_float32_bytes: int) -> tuple[list[str], float, list[mx.array]]:
    """Return the cells of a row, the seconds of a token, and distributions."""
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
    cells = [folder.name, kind, f"{load_s:.1f}", gib(peak), f"{token_s:.3f}", f"{prompt_s:.2f}"]
    return cells, token_s, distributions(model)


def exactly(folder: Path) -> list[mx.array]:
    """Distributions by the stored weights, without rounding to 16 bits between the layers."""
    model = load(folder)
    model.network.set_dtype(mx.float32)
    return distributions(model)


def compared(stored: list[mx.array], converted: list[mx.array]) -> tuple[float, float]:
    """Return the mean KL divergence, and the share of places at which the likeliest token is the same."""
    pairs = list(zip(stored, converted, strict=True))
    divergences = [(mx.exp(one) * (one - other)).sum(axis=-1) for one, other in pairs]
    same = [one.argmax(axis=-1) == other.argmax(axis=-1) for one, other in pairs]
    return mean(divergences), mean(same)


def mean(values: list[mx.array]) -> float:
    return cast("float", mx.concatenate(values).astype(mx.float32).mean().item())


def main(folders: list[Path]) -> None:
    print(machine("mlx", "mlx-lm"), "\n", sep="")
    print(
        "| model | weights | load | highest memory | a token | 8 tokens of a prompt "
        "| faster | KL, top-1 | exactly |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for folder in folders:
        cells, stored_s, stored = measure(folder, NEVER)
        print(f"| {' | '.join(cells)} | | | |", flush=True)
        cells, converted_s, converted = measure(folder, ALWAYS)
        divergence, same = compared(stored, converted)
        exact, exact_same = compared(exactly(folder), converted)
        told = [
            f"{stored_s / converted_s:.1f} ×",
            f"{divergence:.1e}, {same:.3f}",
            f"{exact:.1e}, {exact_same:.3f}",
        ]
        print(f"| {' | '.join([*cells, *told])} |", flush=True)


if __name__ == "__main__":
    run_with_openblas()
    main([Path(one) for one in sys.argv[1:]])
