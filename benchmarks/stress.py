"""Random requests, trouble, and sessions with the same words: does anything break, leak or get mixed up?"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import stress_fuzz
from benchmarks.harness import Part
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


def print_outcome(outcome: Outcome) -> None:
    """Print the result of a stretch."""
    engine = outcome.stats.get("engine", {})
    print(f"\n{outcome.name}: {outcome.seconds:.0f} s, {outcome.stats.get('requests', {}).get('endings')}")
    print(f"  clients        {dict(sorted(outcome.counts.items()))}")
    print(f"  faults         {dict(sorted(outcome.fired.items()))}, deaths of the proxy {outcome.kills}")
    print(f"  preemptions  {engine.get('preemptions')}, steps that failed {engine.get('failures')}")
    print(f"  heard          {outcome.heard} replies, each as it was written")
    print(f"  truth          {compared([outcome])}")
    print(f"  MLX bytes      {outcome.active[0]:,} before, {outcome.active[1]:,} after")
    print(f"  resident       {outcome.resident / 2**20:.1f} MB, with the server closed")
    sys.stdout.flush()


def compared(outcomes: Sequence[Outcome]) -> str:
    """How much was compared with the truth."""
    figures = [(outcome.compared, outcome.tally.tokens, outcome.tally.ties) for outcome in outcomes]
    replies, tokens, ties = (sum(column) for column in zip(*figures, strict=True))
    return f"{replies} replies, {tokens} tokens, {ties} ties"


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
    """Print all stretches together, and yield what was wrong."""
    endings, fired = Counter[str](), Counter[str]()
    for outcome in outcomes:
        endings.update(outcome.stats.get("requests", {}).get("endings", {}))
        fired.update(outcome.fired)
    growth = grown(outcomes)
    print(
        f"\n{len(outcomes)} stretches, {sum(part.seconds for part in outcomes) / 60:.1f} minutes of trouble"
    )
    print(f"  requests       {endings.total()}: {dict(endings)}")
    print(f"  faults         {fired.total()}, proxy killed {sum(part.kills for part in outcomes)} times")
    print(f"  heard          {sum(part.heard for part in outcomes)}")
    print(f"  truth          {compared(outcomes)}")
    change = "no three rounds" if growth is None else f"{growth:+.1%} since the second round"
    print(f"  resident       {change}")
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
    while time.monotonic() - began < 60 * minutes:
        number = len(outcomes)
        model = folders[(number + number // len(TROUBLES)) % len(folders)]
        trouble = TROUBLES[number % len(TROUBLES)]
        outcomes.append(play(model, trouble, crowd, stretch_s, rng, folder / "scratch"))
        print_outcome(outcomes[-1])
    yield from summary(outcomes)


# ---------------------------------------------------------------------------------------------------- foreign


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
    with opened_endpoints(folder) as endpoints:
        for number in range(first, -(-requests // stretch)):
            model, rng = models[number % len(models)], random.Random(f"{seed} {number}")
            at_once = AT_ONCE[number // len(models) % len(AT_ONCE)]
            sessions: Sessions | None = None
            for half in ("before", "after"):
                with serving(
                    model, traces=True, log_root=str(folder / f"{number}-{half}"), **TRACED
                ) as server:
                    proxy = None if no_proxy else urlsplit(endpoints.of(server, PROXIED).url).port
                    ports, newest = (server.port, proxy), Trace(folder / f"{number}-{half}").newest
                    if sessions is None:
                        sessions = Sessions(ports, newest, rng, at_once, are_bare=model.name == BARE)
                    else:
                        sessions.restarted(ports, newest)
                    sessions.play(stretch // 2)
            asked.update(sessions.counts if sessions else {})
            print(
                f"{number:4} {model.name:12} {dict(sorted(sessions.counts.items() if sessions else []))}",
                flush=True,
            )
    made, seconds = requests - first * stretch, time.monotonic() - began
    print(f"\n{made} requests in {seconds:.0f} s, no prompt wrong: {dict(sorted(asked.items()))}")


PARTS: Mapping[str, Part] = {"fuzz": stress_fuzz.fuzz, "chaos": chaos, "foreign": foreign}


BARE = "option_without_tools"
"""A template for sessions without a system text and tools."""
AT_ONCE = (2, 3, 8)
