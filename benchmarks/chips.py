"""The engine on chips that are not here: how it paces prompts and replies, in virtual time.

Runs the real scheduler, pacer and cache over a network that computes nothing and whose steps last what a cost
model says. So it shows what the engine makes of a chip's speed, and not how fast that chip is: figures are
worth as much as the assumptions in `tests/chips/chip_costs.py`, which has their sources.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Part, row, table
from tests.chips.chip_costs import CHIPS, MODELS, ChipSpec, Cost, ModelSpec
from tests.chips.chip_scenarios import Outcome, Scenario, scenarios


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


def play(_: Path, *, words: Sequence[str] = ()) -> Iterator[str]:
    """Prompts alone, prompts beside replies, and agents on each chip with each model.

    - *alone*: the first prompt of an engine, and another one like it, beside bare chunks of 2,048: at least
      0.95 of their speed.
    - *running*: eight replies are there when a prompt of 20,000 tokens comes (half of all that, or a quarter,
      where there is no memory for it). While it is computed, each keeps at least the engine's `DECODE_SHARE`
      of the speed that it had, and none stands still for longer than a chunk may last and a step takes. A
      chunk may last `STALL_S`, or as long as the shortest chunk that makes sense: one that has
      `PACED_EFFICIENCY` of the speed of 2,048 (a latent cache, MLA, is decompressed for each chunk, however
      short). The prompt has the rest of the time. A tenth is allowed for, since a chunk's time is predicted.
    - *agents*: 1, 4 and 16 of them with one system text of 12,000 tokens, three turns of 500 tokens, replies
      of 200 and a tool between them, as many at once as there is memory for; beside it the same scheduler
      with chunks of 2,048. Every turn has to be answered, and one agent alone has 0.95 of bare speed.

    What there is no memory for is left out.

    Args:
        words: what has each of them in its name: "M3 Max" Flash alone
    """
    columns = tuple[str, ...]()
    for case in cases(words):
        outcome = case.play()
        if outcome is None:
            continue
        if case.scenario.columns != columns:
            columns = case.scenario.columns
            print()
            table(" | ".join((*columns, "mark")))
        row(case.chip.name, case.model.name, *outcome.cells, "**fails**" if outcome.failed else "holds")
        yield from (f"{case.name}: {demand}" for demand in outcome.failed)


PARTS: Mapping[str, Part] = {"play": play}
