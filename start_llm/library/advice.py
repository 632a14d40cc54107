"""Says before the first download on a Mac what the default model needs, what there is, and what else fits."""

from start_llm.core.model_listing import FitReport
from start_llm.library.download import on_disk
from start_llm.library.fit import AGENT_CONTEXT, report
from start_llm.library.hub import Hub
from start_llm.library.well_known import DEFAULT_APPLE_MODEL, WELL_KNOWN, WellKnown, well_known
from start_llm.models.machines import GIB, Machine, gib

_SUGGESTIONS = 3
_FEWEST_TPS = 8.0
"""Tokens a second below which an agent is no pleasure."""


def is_first_start(chosen: str | None, hub: Hub) -> bool:
    """Return True if the default model was not replaced and is not on disk yet.

    Args:
        chosen: the model that the user wants, or the folder that holds it.
    """
    return not chosen and on_disk(DEFAULT_APPLE_MODEL, hub) is None


def advice(machine: Machine, hub: Hub) -> list[str]:
    """Return the lines to print."""
    default = well_known(DEFAULT_APPLE_MODEL)
    found = report(default.shape, machine, AGENT_CONTEXT)
    usable = f"{machine.name} lets models use {gib(found.usable_bytes)}"
    lines = [
        f"The first start downloads {default.repository}: {default.shape.weights.total / 1e9:,.1f} GB.",
        f"  memory   {_needed(found)} with {AGENT_CONTEXT:,} tokens; {usable}",
        f"  disk     {hub.free_space() / 1e9:,.1f} GB are free in {hub.cache}",
        f"  verdict  {found.verdict}{_speed(found)}",
        "Ctrl-C ends it; what has come is kept. Others that fit this machine (--model NAME):",
    ]
    return [*lines, *(_line(one, machine) for one in suggestions(machine))]


def suggestions(machine: Machine) -> list[WellKnown]:
    """Return up to three models that fit, the largest first, with at least the context that an agent needs.

    Models that this machine would run too slowly come last.
    """
    judged = [(one, report(one.shape, machine, AGENT_CONTEXT)) for one in WELL_KNOWN]
    fitting = [(one, found) for one, found in judged if found.fits and one.repository != DEFAULT_APPLE_MODEL]
    fitting.sort(key=lambda pair: (_is_slow(pair[1]), -pair[0].billions))
    return [one for one, _ in fitting[:_SUGGESTIONS]]


def _is_slow(found: FitReport) -> bool:
    return found.decode_tps is not None and found.decode_tps < _FEWEST_TPS


def _needed(found: FitReport) -> str:
    return f"{found.total_bytes / GIB:,.1f} GiB"


def _speed(found: FitReport) -> str:
    return f", about {found.decode_tps:,.0f} tokens a second" if found.decode_tps is not None else ""


def _line(known: WellKnown, machine: Machine) -> str:
    found = report(known.shape, machine, AGENT_CONTEXT)
    return f"  {known.repository:<52}  {_needed(found):>9}{_speed(found)}"
