"""Train a demo model from scratch, on two cores of a CPU.

    pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0 tokenizers==0.23.3
    python scripts/train_demo_model.py FOLDER

The server needs none of these packages. `scripts/demo_model` generates the training data during the training,
from the source of Python's standard library; nothing is downloaded. Every 50 steps the script prints the loss
of the copied tokens. Every 500 steps it prints the share of right answers to held-out words, and writes the
folder.
"""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.demo_model.conversations import Author, Kind, Mix  # noqa: E402 - found through the line above
from scripts.demo_model.files import write_model  # noqa: E402
from scripts.demo_model.network import Past, Qwen3, Shape  # noqa: E402
from scripts.demo_model.rows import Rows, make_rows  # noqa: E402
from scripts.demo_model.tokenizer import make_tokenizer  # noqa: E402

STEPS = 12_000
RATE = 0.02
EMBEDDING_RATE = 0.003
SHORTEST_PREFIX = 200
LONGEST_PREFIX = 6000
TOO_LONG_PREFIX = 14_000
"""Tokens before a conversation. Above `LONGEST_PREFIX` the right answer is that the prompt is too long."""
FIXED_WEIGHT = 0.25
"""The loss weight of a token that is always the same; a copied token has weight 1."""
_PLACES = 512
_WARM_UP = 20
_STEPS_A_LINE, _STEPS_A_TEST, _BATCHES_A_TEST = 50, 500, 6


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        until: share of all steps at which it ends.
        length, rows: tokens per row and rows per step. After a long prefix there are fewer rows, so that all
            steps take about the same time.
        prefixes: share of steps with a long prefix.
        too_long: share of steps with a prefix that is too long.
    """

    until: float
    length: int
    rows: int
    mix: Mix
    prefixes: float = 0.0
    too_long: float = 0.0


STAGES = (
    Stage(0.03, 192, 20, Mix(tools=0.3, fillers=0.2, longest_filler=200)),
    Stage(0.15, 512, 8, Mix()),
    Stage(1.00, 512, 8, Mix(longest_filler=900), prefixes=0.3, too_long=0.03),
)


class Lessons:
    """Generates the rows of each step."""

    def __init__(self, tokenizer: Tokenizer, steps: int, seed: int) -> None:
        self._tokenizer = tokenizer
        self._steps = steps
        self._author = Author(seed, STAGES[0].mix)
        self._rng = torch.Generator().manual_seed(seed)

    def rows(self, step: int) -> Rows:
        stage = next(stage for stage in STAGES if step < stage.until * self._steps)
        chance, size = torch.rand(2, generator=self._rng).tolist()
        prefix, mix, count = 0, stage.mix, stage.rows
        if chance < stage.too_long:
            prefix = round(LONGEST_PREFIX + size * (TOO_LONG_PREFIX - LONGEST_PREFIX))
            mix, count = replace(mix, long=1.0), count // 4
        elif chance < stage.too_long + stage.prefixes:
            prefix = round(SHORTEST_PREFIX * (LONGEST_PREFIX / SHORTEST_PREFIX) ** size)
            count //= 2
        self._author.mix = mix
        return make_rows(self._author, self._tokenizer, count, stage.length, prefix)


class Optimizers:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""

    def __init__(self, network: Qwen3, steps: int) -> None:
        named = list(network.named_parameters())
        is_matrix = {name: value.ndim == 2 and "embed" not in name for name, value in named}
        matrices = [value for name, value in named if is_matrix[name]]
        others = [value for name, value in named if not is_matrix[name]]
        self._all = (
            torch.optim.Muon(matrices, lr=RATE, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=EMBEDDING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._parameters = matrices + others
        self._rates = [group["lr"] for optimizer in self._all for group in optimizer.param_groups]
        self._steps = steps

    def step(self, number: int) -> None:
        """Update the parameters. The rate rises for 20 steps, and falls to 0 from 40 % of the steps on."""
        factor = min(1.0, (number + 1) / _WARM_UP, (self._steps - number) / (0.6 * self._steps))
        groups = [group for optimizer in self._all for group in optimizer.param_groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate * factor
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._all:
            optimizer.step()
            optimizer.zero_grad()


def train(network: Qwen3, tokenizer: Tokenizer, steps: int, seed: int, folder: Path) -> None:
    """Train the network and write it to `folder`."""
    lessons = Lessons(tokenizer, steps, seed)
    optimizers = Optimizers(network, steps)
    begun = time.monotonic()
    losses: list[float] = []
    for step in range(steps):
        loss, copied = loss_of(network, lessons.rows(step))
        loss.backward()
        optimizers.step(step)
        losses.append(copied)
        done = step + 1
        if done % _STEPS_A_LINE == 0:
            mean = sum(losses) / len(losses)
            print(
                f"{time.monotonic() - begun:6.0f} s  step {done}  copied {mean:.4f}",
                flush=True,
            )
            losses.clear()
        if done % _STEPS_A_TEST == 0 or done == steps:
            for prefix in (0, 2500):
                print(f"   after {prefix} tokens: {right_answers(network, tokenizer, prefix)}", flush=True)
            write_model(network, tokenizer, folder)


def loss_of(network: Qwen3, rows: Rows) -> tuple[Tensor, float]:
    """Return the weighted loss of a step, and the mean loss of its copied tokens."""
    hidden = _hidden(network, rows)
    kinds = rows.kinds.flatten()
    places = (kinds != Kind.READ).nonzero()[:, 0]
    # Pad to a multiple of 512 places, because the CPU's library compiles a kernel for every length.
    padded = functional.pad(places, (0, -len(places) % _PLACES))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network.logits(hidden.flatten(0, 1)[padded])[: len(places)]
    losses = functional.cross_entropy(logits.float(), rows.wanted.flatten()[places], reduction="none")
    is_copied = kinds[places] == Kind.COPIED
    weights = torch.where(is_copied, 1.0, FIXED_WEIGHT)
    return (losses * weights).sum() / weights.sum(), float(losses.detach()[is_copied].mean())


def _hidden(network: Qwen3, rows: Rows) -> Tensor:
    """Return the hidden states. The prefix gets no gradient: the model only has to look past it."""
    past: Past | None = None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if rows.prefix is not None:
            with torch.no_grad():
                _, past = network(rows.prefix)
        hidden, _ = network(rows.ids, past)
    return hidden


@torch.no_grad()
def right_answers(network: Qwen3, tokenizer: Tokenizer, prefix: int) -> str:
    """Return, by behaviour, how many answers to held-out words are right in every token (greedy)."""
    author = Author(977, STAGES[-1].mix, held_out=True)
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for _ in range(_BATCHES_A_TEST):
        rows = make_rows(author, tokenizer, 8, 512, prefix)
        predicted = network.logits(_hidden(network, rows)).argmax(-1)
        is_wrong = (predicted != rows.wanted) & (rows.answers > 0)
        wrong = set(rows.answers[is_wrong].tolist())
        cut = set(rows.answers[:, -2].tolist())
        for number in set(rows.answers.flatten().tolist()) - cut - {0}:
            behaviour = rows.behaviours[int(number) - 1]
            asked[behaviour] += 1
            right[behaviour] += number not in wrong
    return ", ".join(f"{name} {right[name] / asked[name]:.0%} of {asked[name]}" for name in sorted(asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="its files are written anew every 500 steps")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(Shape.vocabulary)
    network = Qwen3(Shape(vocabulary=tokenizer.get_vocab_size()))
    train(network, tokenizer, options.steps, options.seed, options.folder)


if __name__ == "__main__":
    main()
