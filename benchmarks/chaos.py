"""Half an hour of trouble: is anything broken, lost or wrong afterwards?

    python benchmarks/chaos.py [--minutes 30] [--seed 1] [--stretch 70] [--no-proxy]

The application runs in this process, with the proxy as its child, one stretch after the other: each with
another model and other limits (small caches, little memory, short deadlines, short queues). Conversations
grow in all four protocols on both ports; other clients leave at any moment, read slowly, say nothing, or send
what breaks the network. Faults are planted in prefill, in steps of a row and of a batch, and in the text; the
proxy is killed again and again.

After each stretch: nothing runs, the cache does not contradict itself, threads, descriptors, children and
temporary files are those of before, MLX holds what it held; every failure has a planted reason, and no fault
has failed more than one request; clients heard what the engine wrote; and of that a sample is compared with
what mlx_lm says alone. What must not be is printed, and the status is then 1. Linux only.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from scripts import tiny_models  # noqa: E402
from start_llm.core.allocator import limit_malloc_retention  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.chaos.play import TROUBLES, Crowd, Outcome, play  # noqa: E402

FAMILIES = ("qwen3", "qwen3_5", "gemma3_text")
MAX_GROWTH = 0.02


def told(outcome: Outcome) -> None:
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
    for problem in outcome.problems:
        print(f"  PROBLEM        {problem[:2000]}")
    sys.stdout.flush()


def compared(outcomes: Sequence[Outcome]) -> str:
    """How much was compared with the truth."""
    figures = [(one.compared, one.tally.tokens, one.tally.ties) for one in outcomes]
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
        min(one.resident for one in part) for part in (outcomes[size : 2 * size], outcomes[-size:])
    )
    return last / second - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stretch", type=float, default=70, help="seconds of each")
    parser.add_argument("--no-proxy", action="store_true")
    options = parser.parse_args()
    limit_malloc_retention()
    rng, outcomes = random.Random(options.seed), list[Outcome]()
    crowd = Crowd(kill_s=0 if options.no_proxy else 45)
    print(servers.machine("mlx", "mlx-lm", "litellm"), flush=True)
    with tempfile.TemporaryDirectory() as root:
        os.environ["STATE_ROOT"] = root
        folders = [tiny_models.build(name, Path(root) / name, hidden=64, layers=2) for name in FAMILIES]
        began = time.monotonic()
        while time.monotonic() - began < 60 * options.minutes:
            number = len(outcomes)
            folder = folders[(number + number // len(TROUBLES)) % len(folders)]
            trouble = TROUBLES[number % len(TROUBLES)]
            outcomes.append(play(folder, trouble, crowd, options.stretch, rng, Path(root) / "scratch"))
            told(outcomes[-1])
    summary(outcomes)


def summary(outcomes: Sequence[Outcome]) -> None:
    """All stretches together. Ends with status 1 if anything was wrong."""
    endings, fired = Counter[str](), Counter[str]()
    for outcome in outcomes:
        endings.update(outcome.stats.get("requests", {}).get("endings", {}))
        fired.update(outcome.fired)
    growth, problems = grown(outcomes), sum(len(outcome.problems) for outcome in outcomes)
    print(f"\n{len(outcomes)} stretches, {sum(one.seconds for one in outcomes) / 60:.1f} minutes of trouble")
    print(f"  requests       {endings.total()}: {dict(endings)}")
    print(f"  faults         {fired.total()}, proxy killed {sum(one.kills for one in outcomes)} times")
    print(f"  heard          {sum(one.heard for one in outcomes)}")
    print(f"  truth          {compared(outcomes)}")
    told_growth = (
        "not told, there were no three rounds" if growth is None else f"{growth:+.1%} since the second round"
    )
    print(f"  resident       {told_growth}")
    print(f"  problems       {problems}")
    raise SystemExit(1 if problems or (growth or 0) > MAX_GROWTH else 0)


if __name__ == "__main__":
    run_with_openblas()
    main()
