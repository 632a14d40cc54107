"""More than one machine: agents on a simulated fleet, conversations on real servers, killed ranks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from benchmarks import fleet
from benchmarks.fleet import ROUTERS, Machine
from benchmarks.harness import Part, row, table
from benchmarks.scale_ranks import ranks
from scripts import tiny_models
from tests.agents.agent_account import Rendering
from tests.agents.server_fleet import LEAST_EFFICIENCY, Conversations, ServerFleet

PACKAGES = ("mlx", "mlx-lm", "litellm")
AGENTS, SERVERS = (10, 100, 1000), (1, 4, 16, 64)


def simulation(
    _: Path,
    *,
    agents: Sequence[int] = AGENTS,
    servers: Sequence[int] = SERVERS,
    routers: Annotated[Sequence[str], ROUTERS] = tuple(ROUTERS),
    budget: int = 2_000_000,
    prefill: float = 1500.0,
    decode: float = 40.0,
) -> None:
    """Hit rate and efficiency of agents on a fleet, in virtual time, by how requests are routed.

    Each agent plays one of 40 recorded sessions of a coding agent to the end, 62 requests on average, with
    texts of its own; tools and system text are those of all who play the same session. `docs/scale.md` states
    what is assumed. Efficiency is unavoidable / computed tokens, where unavoidable is what no server of the
    fleet has computed before.

    Args:
        agents: numbers of agents
        servers: numbers of servers
        routers: how requests find their server
        budget: tokens of KV that each server keeps
        prefill: prompt tokens that a server reads a second
        decode: tokens a second of each reply
    """
    sessions, machine = fleet.recorded_sessions(), Machine(budget=budget, prefill=prefill, decode=decode)
    table("agents | servers | routed by | hit rate | efficiency | wait, median | wait, 95 %")
    for count in agents:
        for size in servers:
            for name in routers:
                outcome = fleet.play(sessions, count, size, machine, ROUTERS[name]())
                waits = (f"{outcome.wait_s(share):,.1f} s" for share in (0.5, 0.95))
                row(count, size, name, f"{outcome.hit_rate:.1%}", f"{outcome.efficiency:.3f}", *waits)


def servers(folder: Path, *, conversations: int = 20, turns: int = 5) -> Iterable[str]:
    """Conversations of coding agents over three servers behind one proxy, all of them in turn.

    Once with session ids and once without; then one server is killed, all conversations go on, it is started
    again, and they go on again. The last row sends each request to a server at random, without the proxy.
    `paid` are the conversations that computed again what they had computed before.

    Args:
        conversations: how many
        turns: of each
    """
    model = tiny_models.build("qwen3", folder / "model", hidden=64, layers=2)
    rendering = Rendering(model)
    table(" | requests | unavoidable | computed | efficiency | paid")
    with ServerFleet.started(model, folder / "state") as running:
        for title, is_named in (("with session ids", True), ("without", False)):
            players = Conversations(title, running.door, rendering, conversations, is_named=is_named)
            played = players.play(turns)
            row(title, *played.cells())
            if played.efficiency < LEAST_EFFICIENCY:
                yield f"{title}: efficiency {played.efficiency:.3f}"
            yield from _killed(running, players)
        chance = Conversations("at random", running.by_chance, rendering, conversations, is_named=True)
        row("at random, without the proxy", *chance.play(turns).cells())


def _killed(running: ServerFleet, conversations: Conversations) -> Iterable[str]:
    """Kill a server between two turns of all conversations, and start it again behind them."""
    held = running.holders(conversations)
    gone = running.kill(1)
    moved = conversations.play(1)
    row(f"{conversations.title}, one server killed", *moved.cells())
    running.start(1)
    back = conversations.play(1)
    row(f"{conversations.title}, started again", *back.cells())
    its_own = {name for name, port in held.items() if port == gone}
    if moved.paid != its_own:
        yield f"{sorted(moved.paid)} have computed again, and {sorted(its_own)} were on the killed server"
    if back.paid:
        yield f"{sorted(back.paid)} have computed again when the server was back"


PARTS: dict[str, Part] = {"simulation": simulation, "servers": servers, "ranks": ranks}
