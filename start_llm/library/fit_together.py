"""Judges whether a model fits several equal machines that compute it together (docs/scale.md)."""

from collections.abc import Iterator
from dataclasses import replace

from start_llm.core.model_listing import Machine
from start_llm.library.fit import ModelShape, report
from start_llm.models.layer_costs import LayerGroup, comes_out_even
from start_llm.models.machines import gib
from start_llm.models.weight_files import WeightBytes

TOGETHER = (2, 4)
"""Numbers of machines that are judged."""
_WHOLE = "latent attention"
"""The kind of layer whose cache each machine keeps whole."""


def divided(shape: ModelShape, ranks: int) -> ModelShape | None:
    """Return the figures of the part that each of several machines has; None if it cannot be divided.

    Embeddings, head and latent caches stay whole. Norms and routers do, too, but hardly count. The machine is
    the first one: of a model that sees, it alone has the tower.
    """
    if not shape.heads or not all(comes_out_even(heads, ranks) for heads in shape.heads):
        return None
    converted = shape.in_float32
    return replace(
        shape,
        groups=tuple(_divided_group(group, ranks) for group in shape.groups),
        weights=_divided_weights(shape.weights, shape.whole_bytes, ranks),
        in_float32=divided(converted, ranks) if converted else None,
    )


def _divided_weights(weights: WeightBytes, whole: int, ranks: int) -> WeightBytes:
    text = weights.total - weights.tower
    kept = min(whole, text)
    total = kept + (text - kept) // ranks + weights.tower
    return replace(weights, total=total, experts=weights.experts // ranks)


def _divided_group(group: LayerGroup, ranks: int) -> LayerGroup:
    if group.kind == _WHOLE:
        return group
    return replace(
        group,
        token_bytes=-(-group.token_bytes // ranks),
        window_bytes=-(-group.window_bytes // ranks),
        state_bytes=-(-group.state_bytes // ranks),
    )


def together_lines(shape: ModelShape, machine: Machine) -> Iterator[str]:
    """Yield a line for each number of machines like this one."""
    for ranks in TOGETHER:
        part = divided(shape, ranks)
        if part is None:
            yield f"{ranks} machines cannot divide it"
            continue
        fit = report(part, machine)
        yield (
            f"{ranks} machines like it: {fit.verdict}; each has {gib(fit.weights_bytes)} of weights"
            f" and {gib(fit.kv_bytes)} of cache for {fit.typical_context_tokens:,} tokens"
        )
