"""Says before the first download on a Mac what the default model needs, what there is, and what else fits."""

from start_llm.core.model_listing import FitReport, Machine
from start_llm.library.download import on_disk
from start_llm.library.fit import AGENT_CONTEXT, report
from start_llm.library.hub import Hub
from start_llm.library.well_known import DEFAULT_APPLE_MODEL, WELL_KNOWN, WellKnown, well_known
from start_llm.models.machines import GIB, gib

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
    fit = report(default.shape, machine, AGENT_CONTEXT)
    usable = f"{machine.name} lets models use {gib(fit.usable_bytes)}"
    lines = [
        f"The first start downloads {default.repository}: {default.shape.weights.total / 1e9:,.1f} GB.",
        f"  memory   {_needed(fit)} with {AGENT_CONTEXT:,} tokens; {usable}",
        f"  disk     {hub.free_space() / 1e9:,.1f} GB are free in {hub.cache}",
        f"  verdict  {fit.verdict}{_speed(fit)}",
        "Ctrl-C ends it; what has come is kept. Others that fit this machine (--model NAME):",
    ]
    return [*lines, *(_line(model, machine) for model in suggestions(machine))]


def suggestions(machine: Machine) -> list[WellKnown]:
    """Return up to three models that fit, the largest first, with at least the context that an agent needs.

    Models that this machine would run too slowly come last.
    """
    judged = [(model, report(model.shape, machine, AGENT_CONTEXT)) for model in WELL_KNOWN]
    fitting = [(model, fit) for model, fit in judged if fit.fits and model.repository != DEFAULT_APPLE_MODEL]
    fitting.sort(key=lambda pair: (_is_slow(pair[1]), -pair[0].billions))
    return [model for model, _ in fitting[:_SUGGESTIONS]]


def _is_slow(fit: FitReport) -> bool:
    return fit.decode_tps is not None and fit.decode_tps < _FEWEST_TPS


def _needed(fit: FitReport) -> str:
    return f"{fit.total_bytes / GIB:,.1f} GiB"


def _speed(fit: FitReport) -> str:
    return f", about {fit.decode_tps:,.0f} tokens a second" if fit.decode_tps is not None else ""


def _line(known: WellKnown, machine: Machine) -> str:
    fit = report(known.shape, machine, AGENT_CONTEXT)
    return f"  {known.repository:<52}  {_needed(fit):>9}{_speed(fit)}"
