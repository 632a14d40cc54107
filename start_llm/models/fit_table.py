"""Twenty well-known models on eight machines, as `docs/fit.md` shows them."""

from __future__ import annotations

from collections.abc import Iterable

from start_llm.models.fit import AGENT_CONTEXT, report
from start_llm.models.machines import Machine, gib, machine_named
from start_llm.models.well_known import WELL_KNOWN, WellKnown

_MACHINES = (
    *("M1 16 GB", "M4 24 GB", "M3 Pro 36 GB", "M4 Pro 48 GB"),
    *("M1 Max 64 GB", "M5 Max 128 GB", "M2 Ultra 192 GB", "M3 Ultra 512 GB"),
)

_FEWEST = 1024
"""Tokens below which a model is of no use."""


def as_markdown() -> str:
    """Return the tables: each model's figures, and each model on each machine."""
    machines = [machine_named(name) for name in _MACHINES]
    shown = ("model", "weights", "a token reads", "bytes a token", "32,768 tokens", "computing", "made for")
    blocks = (_table(shown, map(_figures, WELL_KNOWN)), _table(("model", *_MACHINES), _verdicts(machines)))
    return "\n".join(blocks)


def _figures(known: WellKnown) -> tuple[str, ...]:
    shape = known.shape
    context = min(AGENT_CONTEXT, shape.window)
    return (
        _name(known),
        gib(shape.weights.total),
        gib(shape.active_bytes),
        f"{shape.cost.token_bytes:,}",
        gib(shape.cost.bytes_of(context)),
        gib(shape.transient_bytes),
        f"{shape.window:,}",
    )


def _verdicts(machines: list[Machine]) -> Iterable[tuple[str, ...]]:
    for known in WELL_KNOWN:
        yield (_name(known), *(_verdict(known, machine) for machine in machines))


def _verdict(known: WellKnown, machine: Machine) -> str:
    """Return the window that fits, and tokens a second for decoding and for prefill; - if it does not fit."""
    found = report(known.shape, machine, AGENT_CONTEXT)
    if found.context_tokens < _FEWEST:
        return "-"
    return f"{found.context_tokens // 1024:,}k, {found.decode_tps:,.0f}, {found.prefill_tps:,.0f}"


def _name(known: WellKnown) -> str:
    return known.repository.partition("/")[2]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
