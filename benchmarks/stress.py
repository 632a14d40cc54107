"""Random requests, trouble, and sessions with the same words: does anything break, leak or get mixed up?"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import stress_fuzz
from benchmarks.harness import Part, row, table
from scripts import tiny_models
from start_llm.core.allocator import limit_malloc_retention
from tests.chaos.play import TROUBLES, Crowd, Outcome, play
from tests.foreign.sessions import Sessions, Trace
from tests.proxy.conftest import SECRET
from tests.sdk.endpoints import PROXIED, opened_endpoints
from tests.serving import serving
from tests.templates.traits import trait_folder

PACKAGES = ("mlx", "mlx-lm", "litellm")
FAMILIES = ("qwen3", "qwen3_5", "gemma3_text")

# ------------------------------------------------------------------------------------------------------ chaos


MAX_GROWTH = 0.02


def print_row(outcome: Outcome) -> None:
    """Print the result of a stretch."""
    engine, (before, after) = outcome.stats.get("engine", {}), outcome.active
    row(
        *(outcome.name, f"{outcome.seconds:.0f}", outcome.stats.get("requests", {}).get("endings")),
        *(dict(sorted(outcome.counts.items())), dict(sorted(outcome.fired.items())), outcome.kills),
        *(engine.get("preemptions"), engine.get("failures"), outcome.heard, outcome.compared),
        *(
            outcome.tally.tokens,
            outcome.tally.ties,
            f"{after - before:+,}",
            f"{outcome.resident / 2**20:.1f}",
        ),
    )


def grown(outcomes: Sequence[Outcome]) -> float | None:
    """By how much more is resident in the last round than in the second; None if there are no three.

    In the first everything is done for the first time. What the allocator cannot give back goes up and
    down; a leak raises the lowest.
    """
    size = len(TROUBLES)
    if len(outcomes) < 3 * size:
        return None
    second, last = (
        min(outcome.resident for outcome in part) for part in (outcomes[size : 2 * size], outcomes[-size:])
    )
    return last / second - 1


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Print what all stretches had together, and yield what was wrong."""
    endings = [outcome.stats.get("requests", {}).get("endings", {}) for outcome in outcomes]
    requests = sum(sum(counts.values()) for counts in endings)
    faults = sum(outcome.fired.total() for outcome in outcomes)
    kills = sum(outcome.kills for outcome in outcomes)
    minutes, growth = sum(outcome.seconds for outcome in outcomes) / 60, grown(outcomes)
    change = "no three rounds" if growth is None else f"{growth:+.1%} since the second round"
    print(f"\n{requests} requests, {faults} faults, {kills} kills of the proxy in {minutes:.1f} minutes.")
    print(f"Resident: {change}.")
    yield from (problem for outcome in outcomes for problem in outcome.problems)
    if (growth or 0) > MAX_GROWTH:
        yield f"resident memory grew: {change}"


def chaos(
    folder: Path, *, minutes: float = 30, seed: int = 1, stretch_s: float = 70, no_proxy: bool = False
) -> Iterator[str]:
    """Half an hour of trouble: is anything broken, lost or wrong afterwards? Linux only.

    The application runs in this process, with the proxy as its child, one stretch after the other: each with
    another model and other limits (small caches, little memory, short deadlines, short queues). Conversations
    grow in all four protocols on both ports; other clients leave at any moment, read slowly, say nothing, or
    send what breaks the network. Faults are planted in prefill, in steps of a row and of a batch, and in the
    text; the proxy is killed again and again.

    After each stretch: nothing runs, the cache does not contradict itself, threads, descriptors, children and
    temporary files are those of before, MLX holds what it held; every failure has a planted reason, and no
    fault has failed more than one request; clients heard what the engine wrote; and of that a sample is
    compared with what mlx_lm says alone.

    Args:
        stretch_s: seconds of each
    """
    limit_malloc_retention()
    rng, outcomes = random.Random(seed), list[Outcome]()
    crowd = Crowd(kill_s=0 if no_proxy else 45)
    folders = [tiny_models.build(name, folder / name, hidden=64, layers=2) for name in FAMILIES]
    began = time.monotonic()
    table(
        "stretch | seconds | endings | clients | faults | deaths of the proxy | preemptions | failed steps | "
        "replies heard | compared with the truth | tokens | ties | MLX's bytes | resident MB, server closed"
    )
    while time.monotonic() - began < 60 * minutes:
        number = len(outcomes)
        model = folders[(number + number // len(TROUBLES)) % len(folders)]
        trouble = TROUBLES[number % len(TROUBLES)]
        outcomes.append(play(model, trouble, crowd, stretch_s, rng, folder / "scratch"))
        print_row(outcomes[-1])
    yield from summary(outcomes)


# ---------------------------------------------------------------------------------------------------- foreign


BARE = "option_without_tools"
"""A template for sessions without a system text and tools."""
AT_ONCE = (2, 3, 8)
TRACED: dict[str, Any] = {"thinking": False, "traces_prompts": True, "backend_secret": SECRET.text}


def foreign(
    folder: Path,
    *,
    requests: int = 20_000,
    seed: int = 1,
    stretch: int = 250,
    first: int = 0,
    no_proxy: bool = False,
) -> None:
    """Sessions of one user that say the same words at once: does any of them read what another one says?

    Two, three and eight sessions interleaved at random (`tests/foreign`), on the server and through the
    proxy, in three protocols: named, unnamed, with a bucket for a name, all with one name; forks, sessions
    that come from elsewhere with the same replies, replies that clients write themselves; git status, inbound
    context, instructions, message ids, dates, seconds and white space that change; ids that are long, and
    words in their place; lines of metadata that are exchanged, carriers, thoughts that clients keep, drop or
    edit beside their seals, and a template whose option acts without tools alone. The server is another one
    after each stretch and remembers nothing, so a run can be made in parts. Each prompt is read from the
    trace: nothing foreign may be in it, and nothing missing. The clocks of others are counted, which a
    conversation may read that has no tokens of its own: one that has, and reads another one, is wrong. Ends
    at the first prompt that is wrong.

    Args:
        stretch: requests between two restarts
        first: stretches that an earlier run has made
    """
    began, asked = time.monotonic(), Counter[str]()
    built = [tiny_models.build(name, folder / name, hidden=64, layers=2) for name in FAMILIES]
    models = [*built, trait_folder(BARE, folder, hidden=64)]
    table("stretch | model | sessions at once | counts")
    with opened_endpoints(folder) as endpoints:
        for number in range(first, -(-requests // stretch)):
            model, rng = models[number % len(models)], random.Random(f"{seed} {number}")
            at_once = AT_ONCE[number // len(models) % len(AT_ONCE)]
            sessions: Sessions | None = None
            for log_root in (folder / f"{number}-before", folder / f"{number}-after"):
                with serving(model, traces=True, log_root=str(log_root), **TRACED) as server:
                    proxy = None if no_proxy else urlsplit(endpoints.of(server, PROXIED).url).port
                    ports, newest = (server.port, proxy), Trace(log_root).newest
                    if sessions is None:
                        sessions = Sessions(ports, newest, rng, at_once, are_bare=model.name == BARE)
                    else:
                        sessions.restarted(ports, newest)
                    sessions.play(stretch // 2)
            counts = sessions.counts if sessions else Counter[str]()
            asked.update(counts)
            row(number, model.name, at_once, dict(sorted(counts.items())))
    made, seconds = requests - first * stretch, time.monotonic() - began
    print(f"\n{made} requests in {seconds:.0f} s, no prompt wrong: {dict(sorted(asked.items()))}")


PARTS: Mapping[str, Part] = {"fuzz": stress_fuzz.fuzz, "chaos": chaos, "foreign": foreign}
