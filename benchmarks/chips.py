"""The engine on chips that are not here: how it paces prompts and replies, in virtual time.

    python benchmarks/chips.py [--only WORD ...] [--assumptions]

Runs the real scheduler, pacer and cache over a network that computes nothing and whose steps last what a cost
model says (`benchmarks/chip_costs.py`). So it shows what the engine makes of a chip's speed, and not how
fast that chip is: figures are worth as much as the table of assumptions, which is printed first.

- *alone*: the first prompt of an engine, and another one like it, beside bare chunks of 2,048: at least 0.95
  of their speed.
- *running*: eight replies are there when a prompt of 20,000 tokens comes (half of all that, or a quarter,
  where there is no memory for it). While it is computed, each keeps at least the engine's `DECODE_SHARE` of
  the speed that it had, and none stands still for longer than a chunk may last and a step takes. A chunk may
  last `STALL_S`, or as long as the shortest chunk that makes sense: one that has `PACED_EFFICIENCY` of the
  speed of 2,048 (a latent cache, MLA, is decompressed for each chunk, however short). The prompt has the rest
  of the time. A tenth is allowed for, since a chunk's time is predicted.
- *agents*: 1, 4 and 16 of them with one system text of 12,000 tokens, three turns of 500 tokens, replies of
  200 and a tool between them, as many at once as there is memory for; beside it the same scheduler with
  chunks of 2,048. Every turn has to be answered, and one agent alone has 0.95 of bare speed; the rest is to
  be read.

`--only` keeps what has each of its words in its name: `--only "M3 Max" Flash alone`. The exit status is 1 if
a demand does not hold. Takes a few minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import chip_costs  # noqa: E402 - found through the line above
from benchmarks.chip_costs import CHIPS, GB, MODELS, ChipSpec, Cost, ModelSpec  # noqa: E402
from benchmarks.chip_scenarios import Outcome, Scenario, scenarios  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One scenario on one chip with one model."""

    chip: ChipSpec
    model: ModelSpec
    scenario: Scenario

    @property
    def name(self) -> str:
        return f"{self.chip.name} · {self.model.name} · {self.scenario.name}"

    @property
    def cost(self) -> Cost:
        return Cost(self.chip, self.model)

    def play(self) -> Outcome | None:
        """None if there is no memory for it."""
        return self.scenario.play(self.cost) if self.cost.free_bytes > 0 else None


def cases(words: Sequence[str]) -> Iterator[Case]:
    """Those that have every word in their name, table by table."""
    for scenario in scenarios():
        for chip in CHIPS:
            for model in MODELS:
                case = Case(chip, model, scenario)
                if all(word.lower() in case.name.lower() for word in words):
                    yield case


def assumptions() -> Iterator[str]:
    """Chips, models, and what holds for all."""
    yield "| chip | memory | for the model | peak bandwidth | prefill | a layer's launch | source |"
    yield _rule(7)
    for chip in CHIPS:
        yield _row(
            chip.name,
            f"{chip.memory / GB:.0f} GB",
            f"{chip.memory * chip.usable / GB:.1f} GB",
            f"{chip.bandwidth / GB:.0f} GB/s",
            f"{chip.flops / chip_costs.T:.1f} TFLOPs",
            f"{1e6 * chip.launch_s:.0f} µs",
            chip.source,
        )
    yield ""
    yield "| model, 4 bits | shape | layers | parameters | for a token | weights | cache of a token | state |"
    yield _rule(8)
    for model in MODELS:
        yield _model_row(model)
    yield ""
    yield (
        f"Bandwidth: {chip_costs.BANDWIDTH_SHARE} of the peak. Attention multiplies at "
        f"{chip_costs.ATTENTION_SHARE} of the speed of prefill. Tiles of {chip_costs.TILE} rows; a single "
        f"row costs {chip_costs.VECTOR_COST}. {chip_costs.WORK_BYTES / GB:.0f} GB are set aside for what a "
        "chunk computes. The engine thread's own work takes no time."
    )


def _model_row(model: ModelSpec) -> str:
    experts = model.experts
    active = (
        model.dense + model.head + (experts.parameters * experts.chosen / experts.count if experts else 0)
    )
    return _row(
        model.name,
        model.family + (f", {experts.chosen} of {experts.count} experts" if experts else ""),
        f"{model.layers}, {model.attention.layers} keep every token",
        f"{model.parameters / GB:.1f} B",
        f"{active / GB:.1f} B",
        f"{model.weight_bytes / GB:.1f} GB",
        f"{model.attention.token_bytes / 1000:.0f} kB",
        f"{model.state_bytes / 1e6:.0f} MB",
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def play_all(chosen: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """Print the tables. Returns what there was no memory for, and what did not hold."""
    left_out, failed, table = list[Case](), list[str](), ""
    for case in chosen:
        outcome = case.play()
        if outcome is None:
            left_out.append(case)
            continue
        if case.scenario.table != table:
            table = case.scenario.table
            print(f"\n{table} mark |\n{_rule(table.count('|'))}")
        mark = "**fails**" if outcome.failed else "holds"
        print(_row(case.chip.name, case.model.name, *outcome.cells, mark), flush=True)
        failed += [f"{case.name}: {demand}" for demand in outcome.failed]
    return left_out, failed


def _names(left_out: Sequence[Case]) -> list[str]:
    """Of cases; one name for all scenarios of a model that does not even fit."""
    return list(
        dict.fromkeys(
            one.name if one.cost.free_bytes > 0 else f"{one.chip.name} · {one.model.name}" for one in left_out
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--assumptions", action="store_true", help="print them and end")
    options = parser.parse_args()
    print("\n".join(assumptions()))
    if options.assumptions:
        return 0
    began = time.monotonic()
    left_out, failed = play_all(list(cases(options.only)))
    for title, lines in (("No memory for", _names(left_out)), ("Does not hold", failed)):
        if lines:
            print(f"\n{title}:\n" + "\n".join(f"- {line}" for line in lines))
    print(f"\n{len(failed)} demands do not hold. {time.monotonic() - began:.0f} s.")
    return 1 if failed else 0


if __name__ == "__main__":
    run_with_openblas()
    sys.exit(main())
