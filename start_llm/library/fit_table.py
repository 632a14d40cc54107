"""Twenty well-known models on eight machines, as `docs/fit.md` shows them."""

from collections.abc import Iterable, Sequence

from start_llm.core.columns import columns
from start_llm.core.model_listing import Machine
from start_llm.library.fit import AGENT_CONTEXT, report
from start_llm.library.well_known import WELL_KNOWN, WellKnown
from start_llm.models.machines import gib, machine_named

_MACHINES = (
    *("M1 16 GB", "M4 24 GB", "M3 Pro 36 GB", "M4 Pro 48 GB"),
    *("M1 Max 64 GB", "M5 Max 128 GB", "M2 Ultra 192 GB", "M3 Ultra 512 GB"),
)

_FEWEST = 1024
"""Tokens below which a model is of no use."""


def as_markdown() -> str:
    """Return the tables: each model's figures, and each model on each machine."""
    return "\n".join(_markdown(head, rows) for head, rows in (_figure_table(), _machine_table(_MACHINES)))


def as_text(width: int) -> str:
    """Return the tables for a terminal of this width, the second one in as many parts as it needs."""
    half, quarter = len(_MACHINES) // 2, len(_MACHINES) // 4
    parts = [_figure_table()]
    for count in (len(_MACHINES), half, quarter):
        groups = [_MACHINES[start : start + count] for start in range(0, len(_MACHINES), count)]
        tables = [_machine_table(group) for group in groups]
        if count == quarter or max(map(len, map(_first_line, tables))) <= width:
            parts += tables
            break
    return "\n".join("".join(f"{line}\n" for line in columns([head, *rows])) for head, rows in parts)


type _Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _first_line(table: _Table) -> str:
    return next(iter(columns([table[0], *table[1]])))


def _figure_table() -> _Table:
    head = ("model", "weights", "a token reads", "bytes a token", "32,768 tokens", "computing", "made for")
    return head, [_figures(known) for known in WELL_KNOWN]


def _machine_table(names: Sequence[str]) -> _Table:
    return ("model", *names), [*_verdicts([machine_named(name) for name in names])]


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
    fit = report(known.shape, machine, AGENT_CONTEXT)
    if fit.context_tokens < _FEWEST:
        return "-"
    return f"{fit.context_tokens // 1024:,}k, {fit.decode_tps:,.0f}, {fit.prefill_tps:,.0f}"


def _name(known: WellKnown) -> str:
    return known.repository.partition("/")[2]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
