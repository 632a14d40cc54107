"""Prompt tokens that are computed twice in conversations of coding agents: any server, any model folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from benchmarks import agent_budgets, agent_idle, agent_traces, servers
from benchmarks.agent_servers import HttpServer, Restarted
from benchmarks.harness import Part, refuse, row, table
from benchmarks.networks import FAMILIES
from tests.agents.agent_account import Rendering
from tests.agents.agent_shapes import (
    FULL,
    QUICK,
    SHAPES,
    Model,
    Player,
    Server,
    ServerFailed,
    Size,
    build_model,
)

PACKAGES = ("mlx", "mlx-lm")


@contextmanager
def _ours(folder: Path) -> Generator[Server]:
    with TemporaryDirectory() as logs, servers.served("--model", folder, log=Path(logs) / "log") as server:
        yield HttpServer(f"http://127.0.0.1:{server.port}/v1", "default_model")


@contextmanager
def _theirs(folder: Path, *options: str) -> Generator[Server]:
    """It takes this name for the model it was given, too."""
    with (
        TemporaryDirectory() as logs,
        servers.served_by_mlx_lm(folder, *options, log=Path(logs) / "log") as server,
    ):
        yield HttpServer(f"http://127.0.0.1:{server.port}/v1", "default_model")


@contextmanager
def _restarted(folder: Path) -> Generator[Server]:
    with TemporaryDirectory() as disk:
        os.environ["STATE_ROOT"] = f"{disk}/state"
        server = Restarted(folder, Path(disk) / "ssd")
        try:
            yield server
        finally:
            server.close()


CONTENDERS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "start_llm": _ours,
    "mlx_lm.server": _theirs,
    "no cache": lambda folder: _theirs(folder, "--prompt-cache-size", "0"),
    "restarted": _restarted,
}


def turns(
    folder: Path,
    *,
    shapes: Annotated[Sequence[str], SHAPES] = tuple(SHAPES),
    family: Annotated[Sequence[str], FAMILIES] = tuple(FAMILIES)[:3],
    servers: Annotated[Sequence[str], CONTENDERS] = tuple(CONTENDERS)[:3],
    quick: bool = False,
    own: bool = False,
    base_url: str = "",
    model: Path | None = None,
    model_name: str = "",
    api_key: str = "",
) -> None:
    """Prefill efficiency with the shapes of coding agents, for any server that speaks OpenAI's protocol.

    `new` are a fresh rendering's tokens for the messages that no earlier request had, the generation tail,
    and one token. What no server can avoid is more where a client changes what it sends again, and what that
    is follows from the client alone (`agent_clients.Change`): lines that say how things are now have to be
    noted; what was computed behind a message that is gone, or behind a spelling that nothing proves to be
    this conversation's, has to be computed again. Efficiency is unavoidable / computed tokens; 1.00 means
    that nothing else was read twice. Computed tokens are the prompt's without those that the server's usage
    calls cached; `engine` is a server's own count of prefilled tokens, where its `/stats` has one (start_llm
    counts what it reads between requests too, and leaves the last token of a prompt to the first decode
    step). `again` is what was computed and not unavoidable: after a branch of a hybrid model, the distance
    to the nearest checkpoint; `worst` is that of the worst request, with a sign above 64 tokens. A server
    that compares tokens also saves the opening of a new message that equals an old one, and may reach 1.01.

    In many shapes a client changes what it sends again, at every request anew: see `tests/agents`. Where
    the server's own reasoning and calls are sent again, a scripted model says them. A server that cannot play
    a shape fails in it, in words, and goes on with the next. "restarted" is stopped and started again before
    each request, with a disk tier; "no cache" is mlx_lm.server that keeps nothing (the floor).

    The servers are started one after the other on the same models, or on `--model`, which has to say by
    itself what a shape is about. Counts depend on no machine, times do, and so does the moment at which the
    cancelled prefill is left: half of the time that another one like it took. What it had computed until then
    comes from the engine's count, and is estimated (≈) where there is none.

    Args:
        quick: few turns
        own: assistant turns are the server's own replies, not fixed texts
        base_url: measure this running server; ends in /v1, and needs --model, to count tokens
        model: a model's folder
        model_name: with --base-url, its name there (default: the first)
        api_key: with --base-url
    """
    plan = Plan(shapes, QUICK if quick else FULL, own)
    table(
        "family | shape | server | requests | prompt tokens | new | unavoidable | computed | again | "
        "worst | engine | efficiency | new / computed | TTFT mean | TTFT max | wall"
    )
    if base_url:
        if model is None:
            refuse("--base-url needs --model, to count tokens")
        server = HttpServer(base_url.rstrip("/"), model_name, api_key).named()
        for shape, cells in plan.rows(server, Rendering(model)):
            row(model.name, SHAPES[shape].title, server.base_url, *cells)
    elif model is not None:
        _print_sorted(plan, model.name, _rows_of(plan, model, model.name, servers))
    else:
        for name in family:
            rows: list[Row] = []
            for kind in plan.models:
                built = build_model(kind, FAMILIES[name], folder / f"{name}-{kind}")
                rows += _rows_of(plan.of_model(kind), built, f"{name}, {kind}", servers)
            _print_sorted(plan, name, rows)


type Row = tuple[str, str, list[str]]
"""Shape, contender, and the cells of both."""


@dataclass(frozen=True)
class Plan:
    """The arguments of the command line."""

    shapes: Sequence[str]
    size: Size
    own: bool

    @property
    def models(self) -> list[Model]:
        """The models that the shapes take, in their order."""
        return list(dict.fromkeys(SHAPES[shape].model for shape in self.shapes))

    def of_model(self, model: Model) -> Plan:
        return replace(self, shapes=[shape for shape in self.shapes if SHAPES[shape].model == model])

    def rows(self, server: Server, rendering: Rendering) -> Generator[tuple[str, list[str]]]:
        """Shape and cells; a server that fails in one shape goes on with the next."""
        player: Player | None = None
        for shape in self.shapes:
            try:
                player = player or Player(server, rendering, own=self.own)
                yield shape, player.play(SHAPES[shape], self.size).row()
            except ServerFailed as error:
                yield shape, [f"failed: {error}".replace("\n", " ").replace("|", "/")]


def _rows_of(plan: Plan, folder: Path, title: str, names: Sequence[str]) -> Generator[Row]:
    """All contenders on one model."""
    rendering = Rendering(folder)
    for contender in names:
        print(f"{title}: {contender}", file=sys.stderr)
        with CONTENDERS[contender](folder) as server:
            for shape, cells in plan.rows(server, rendering):
                yield shape, contender, cells


def _print_sorted(plan: Plan, family: str, rows: Iterable[Row]) -> None:
    """By shape, when everybody is done."""
    for shape, contender, cells in sorted(rows, key=lambda row: plan.shapes.index(row[0])):
        row(family, SHAPES[shape].title, contender, *cells)


PARTS: Mapping[str, Part] = {
    "turns": turns,
    "traces": agent_traces.traces,
    "budgets": agent_budgets.budgets,
    "idle": agent_idle.idle,
    "receipts": agent_idle.receipts,
}
