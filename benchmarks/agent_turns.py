"""Prefill efficiency with the shapes of coding agents, for any server that speaks OpenAI's protocol.

    python benchmarks/agent_turns.py [--quick] [--own] [--only SHAPE ...] [--family NAME ...]
    python benchmarks/agent_turns.py --model FOLDER [--servers NAME ...]
    python benchmarks/agent_turns.py --base-url http://127.0.0.1:8080/v1 --model FOLDER

`new` are a fresh rendering's tokens for the messages that no earlier request had, the generation tail, and
one token. What no server can avoid is more where a client changes what it sends again, and what that is
follows from the client alone (`agent_clients.Change`): lines that say how things are now have to be told;
what was computed behind a message that is gone, or behind a spelling that nothing proves to be this
conversation's, has to be computed again. Efficiency is unavoidable / computed tokens; 1.00 means that nothing
else was read twice. Computed tokens are the prompt's without those that the server's usage calls cached;
`engine` is a server's own count of prefilled tokens, where its `/stats` has one (start_llm leaves the last
token of a prompt to the first decode step). `again` is what was computed and not unavoidable: after a branch
of a hybrid model, the distance to the nearest checkpoint; `worst` is that of the worst request, with a sign
if it is more than 64 tokens. A server that compares tokens also saves the opening of a new message that
equals an old one, and may reach 1.01.

In many shapes a client changes what it sends again, at every request anew: see `agent_clients.py`. Where the
server's own reasoning and calls are sent again, a scripted model says them. A server that cannot play a shape
fails in it, in words, and goes on with the next.

With --servers "restarted" it is stopped and started again before each request, with a disk tier.

Without --base-url this starts, one after the other on the same models: start_llm, mlx_lm.server, and mlx_lm
in this process, which keeps nothing (the floor) and reads no reasoning and no call out of a reply. With
--model they all serve that one, which has to say by itself what a shape is about. Counts depend on no
machine, times do, and so does the moment at which the cancelled prefill is left: half of the time that
another one like it took. What it had computed until then comes from the engine's count, and is estimated (≈)
where there is none.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import agent_models, servers  # noqa: E402 - found through the line above
from benchmarks.agent_account import Rendering  # noqa: E402
from benchmarks.agent_models import Model  # noqa: E402
from benchmarks.agent_servers import Bare, HttpServer, Restarted  # noqa: E402
from benchmarks.agent_shapes import (  # noqa: E402
    FULL,
    QUICK,
    SHAPES,
    Player,
    Server,
    ServerFailed,
    Size,
)
from start_llm.core.openblas import run_with_openblas  # noqa: E402

FAMILIES = {"dense": "qwen3", "hybrid": "qwen3_5", "sliding": "gemma3_text", "latent": "glm4_moe_lite"}
COLUMNS = (
    "family | shape | server | requests | prompt tokens | new | unavoidable | computed | again | worst "
    "| engine | efficiency | new / computed | TTFT mean | TTFT max | wall"
)


def _ours(folder: Path, port: int) -> list[str]:
    return servers.start_llm("--no-proxy", "--model", str(folder), "--mlx-port", str(port))


def _mlx_lm_server(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]


@contextmanager
def _served(command: Callable[[Path, int], list[str]], folder: Path, _: Rendering) -> Generator[Server]:
    """A server that `command` starts on a free port. Both take this name for the model they were given."""
    port = servers.free_port()
    with (
        tempfile.TemporaryDirectory() as logs,
        servers.running(
            command(folder, port), lambda: servers.health_seconds(port), log=Path(logs) / "server.log"
        ),
    ):
        yield HttpServer(f"http://127.0.0.1:{port}/v1", "default_model")


@contextmanager
def _bare(folder: Path, rendering: Rendering) -> Generator[Server]:
    bare = Bare(folder, rendering)
    try:
        yield bare
    finally:
        bare.close()


@contextmanager
def _restarted(folder: Path, _: Rendering) -> Generator[Server]:
    with tempfile.TemporaryDirectory() as disk:
        os.environ["STATE_ROOT"] = f"{disk}/state"
        server = Restarted(folder, Path(disk) / "ssd")
        try:
            yield server
        finally:
            server.close()


CONTENDERS: dict[str, Callable[[Path, Rendering], AbstractContextManager[Server]]] = {
    "start_llm": partial(_served, _ours),
    "mlx_lm.server": partial(_served, _mlx_lm_server),
    "bare mlx_lm": _bare,
    "restarted": _restarted,
}


@dataclass(frozen=True)
class Plan:
    """The arguments of the command line."""

    shapes: list[str]
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


def measure_family(plan: Plan, family: str, names: list[str]) -> None:
    """All contenders on the models of a family; rows are sorted by shape when everybody is done."""
    rows: list[tuple[str, str, list[str]]] = []
    for model in plan.models:
        with tempfile.TemporaryDirectory() as name:
            folder = agent_models.build(model, FAMILIES[family], Path(name) / "model")
            rows += _rows_of(plan.of_model(model), folder, f"{family}, {model}", names)
    _print_sorted(plan, family, rows)


def measure_folder(plan: Plan, folder: Path, names: list[str]) -> None:
    """All contenders on one model, whatever the shapes are made for."""
    _print_sorted(plan, folder.name, _rows_of(plan, folder, folder.name, names))


def _print_sorted(plan: Plan, family: str, rows: Iterable[tuple[str, str, list[str]]]) -> None:
    for shape, contender, cells in sorted(rows, key=lambda row: plan.shapes.index(row[0])):
        print_row(family, shape, contender, cells)


def _rows_of(plan: Plan, folder: Path, title: str, names: list[str]) -> Generator[tuple[str, str, list[str]]]:
    """Shape, contender and cells on one model."""
    rendering = Rendering(folder)
    for contender in names:
        print(f"{title}: {contender}", file=sys.stderr)
        with CONTENDERS[contender](folder, rendering) as server:
            for shape, cells in plan.rows(server, rendering):
                yield shape, contender, cells


def measure_running(plan: Plan, server: HttpServer, folder: Path) -> None:
    for shape, cells in plan.rows(server, Rendering(folder)):
        print_row(folder.name, shape, server.base_url, cells)


def print_row(family: str, shape: str, server: str, cells: list[str]) -> None:
    print(f"| {' | '.join([family, SHAPES[shape].title, server, *cells])} |", flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--family", nargs="+", choices=FAMILIES, default=list(FAMILIES)[:3])
    parser.add_argument("--servers", nargs="+", choices=CONTENDERS, default=list(CONTENDERS)[:3])
    parser.add_argument("--quick", action="store_true", help="few turns")
    replies = parser.add_mutually_exclusive_group()
    replies.add_argument("--fixed", action="store_true", help="assistant turns are fixed texts (default)")
    replies.add_argument("--own", action="store_true", help="assistant turns are the server's own replies")
    parser.add_argument("--base-url", help="measure this running server; ends in /v1")
    parser.add_argument("--model", type=Path, help="a model's folder; with --base-url for the counts")
    parser.add_argument(
        "--model-name", default="", help="with --base-url: its name there (default: the first)"
    )
    parser.add_argument("--api-key", default="", help="with --base-url")
    options = parser.parse_args()
    if options.base_url is not None and options.model is None:
        parser.error("--base-url needs --model, to count tokens")
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a clean end: nothing is left running
    options = read_options()
    plan = Plan(options.only, QUICK if options.quick else FULL, options.own)
    print(f"{servers.machine('mlx', 'mlx-lm')}; replies: {'own' if plan.own else 'fixed'}\n")
    print(f"    {shlex.join(['python', *sys.argv])}\n")
    print(f"| {COLUMNS} |\n|{'---|' * len(COLUMNS.split('|'))}")
    if options.base_url is not None:
        server = HttpServer(options.base_url.rstrip("/"), options.model_name, options.api_key)
        measure_running(plan, server.named(), options.model)
        return
    if options.model is not None:
        measure_folder(plan, options.model, options.servers)
        return
    for family in options.family:
        measure_family(plan, family, options.servers)


if __name__ == "__main__":
    run_with_openblas()
    main()
