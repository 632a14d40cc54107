"""Sampling with a tone curve (HLG): the formula, its neutral values, and its place beside other sequences."""

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from start_llm.core.sampling import Sampling
from start_llm.engine.sampler import BatchSampler, Chooser
from tests.engine.harness import Stepper, engine_request
from tests.engine.test_sampling import DRAWS, OFF, PROMPT, VOCABULARY, draw, sampling

CURVES: list[dict[str, float]] = [
    {},
    {"hlg_width": 0, "hlg_shoulder": 0.01, "hlg_toe": 0.01},
    {"hlg_width": 1, "hlg_shoulder": 2, "hlg_toe": 0.5, "hlg_pivot_offset": 3},
    {"hlg_width": 0.5, "hlg_pivot_offset": 0},
]


@pytest.fixture
def logits() -> np.ndarray:
    """[vocabulary], over 20 nats."""
    return np.random.default_rng(7).normal(scale=4, size=VOCABULARY).astype(np.float32)


def curved(**values: Any) -> Sampling:
    return sampling(hlg=True, **values)


def reference(chosen: Sampling, logits: np.ndarray) -> np.ndarray:
    """The documented curve in float64, token by token."""
    slope = 1 / chosen.temperature
    pivot = float(logits.max()) - chosen.hlg_pivot_offset

    def gain(logit: float) -> float:
        distance = logit - pivot
        scale = chosen.hlg_shoulder if distance > 0 else chosen.hlg_toe
        beyond = abs(distance) - chosen.hlg_width
        if beyond <= 0:
            return slope * distance
        return math.copysign(slope * (chosen.hlg_width + scale * math.log1p(beyond / scale)), distance)

    weights = np.exp(np.array([gain(float(logit)) for logit in logits]))
    return weights / weights.sum()


def chances(chosen: Sampling, logits: np.ndarray, draws: int = 2000) -> dict[int, float]:
    """The chance that each drawn token is said to have had."""
    rows = mx.array(np.tile(logits, (draws, 1)))
    drawn = BatchSampler([Chooser(chosen)] * draws, len(logits))(rows, range(draws))
    return dict(zip(np.array(drawn.ids).tolist(), np.array(drawn.chances).tolist(), strict=True))


@pytest.mark.sample(6)
@pytest.mark.parametrize("values", CURVES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_from_the_curve_with_the_chances_that_are_reported(logits, values, temperature):
    chosen = curved(temperature=temperature, seed=1, **values)
    wanted = reference(chosen, logits)
    counts = np.bincount(draw(chosen, logits), minlength=VOCABULARY)
    off = np.abs(counts / DRAWS - wanted) / np.sqrt(wanted * (1 - wanted) / DRAWS + 1e-12)
    assert off[wanted * DRAWS > 5].max() < 5, "a token comes too often or too seldom"
    for token, chance in chances(chosen, logits).items():
        assert chance == pytest.approx(wanted[token], rel=1e-3)


def test_a_choice_says_as_many_bits_as_it_was_unlikely_on_the_curve(logits):
    chosen = curved()
    wanted = reference(chosen, logits)
    for token, chance in chances(chosen, logits).items():
        assert Chooser(chosen).surprisal(chance) == pytest.approx(-math.log2(wanted[token]), rel=1e-3)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("kind", [mx.float32, mx.bfloat16])
def test_an_infinite_width_is_temperature_alone_to_the_bit(logits, temperature, kind):
    rows = mx.array(np.tile(logits, (500, 1))).astype(kind)
    rows[:, 3] = -math.inf

    def drawn_by(chosen: Sampling) -> list[Any]:
        sampler = BatchSampler([Chooser(chosen)] * 500, VOCABULARY)
        return [np.array(array).tolist() for array in sampler(rows, range(500))]

    def drawn(**values: Any) -> list[Any]:
        chosen: dict[str, Any] = {**OFF, "temperature": temperature, "seed": 5, **values}
        return drawn_by(Sampling(**chosen))

    plain = drawn()
    assert drawn(hlg=True, hlg_width=10**6) == plain
    infinite = sampling(hlg=True, temperature=temperature, seed=5)
    object.__setattr__(infinite, "hlg_width", math.inf)
    assert drawn_by(infinite) == plain


@pytest.mark.sample(2)
@pytest.mark.parametrize("values", CURVES)
def test_a_token_with_a_higher_logit_is_never_less_likely(values):
    ordered = np.sort(np.random.default_rng(1).normal(scale=6, size=VOCABULARY)).astype(np.float32)
    frequencies = chances(curved(**values), ordered, draws=20_000)
    by_logit = [frequencies[token] for token in sorted(frequencies)]
    assert len(by_logit) > 10
    assert by_logit == sorted(by_logit)


@pytest.mark.parametrize("values", CURVES)
@pytest.mark.sample(2)
def test_a_masked_token_stays_masked(logits, values):
    masked = logits.copy()
    masked[::2] = -np.inf
    drawn = set(draw(curved(seed=1, temperature=5, **values), masked).tolist())
    assert drawn <= set(range(1, VOCABULARY, 2))
    assert len(drawn) > 3


def test_at_temperature_0_the_best_token_is_taken_for_certain(logits):
    drawn = BatchSampler([Chooser(curved(temperature=0))], VOCABULARY)(mx.array(logits[None]), [0])
    assert (drawn.ids.item(), drawn.chances.item()) == (logits.argmax(), 1)


@pytest.mark.thorough
def test_the_curve_takes_the_place_of_top_k_top_p_and_min_p(logits):
    strict = {"top_k": 1, "top_p": 0.01, "min_p": 1.0}
    assert (draw(curved(seed=3, **strict), logits) == draw(curved(seed=3), logits)).all()


def test_each_sequence_of_a_batch_has_the_curve_of_its_own(logits):
    wanted = [curved(**values) for values in CURVES] + [sampling(), sampling(top_k=3)]
    rows = mx.array(np.tile(logits, (len(wanted), 1)))
    ids, probabilities = map(
        np.array, BatchSampler([Chooser(setting) for setting in wanted], VOCABULARY)(rows, range(len(wanted)))
    )
    for place, chosen in enumerate(wanted[: len(CURVES)]):
        assert probabilities[place] == pytest.approx(reference(chosen, logits)[ids[place]], rel=1e-3)


@pytest.mark.thorough
def test_seeded_choices_are_the_same_alone_and_in_a_batch(resources):
    seeded = engine_request(PROMPT, 40, Sampling(temperature=1.0, hlg=True, seed=11))
    alone = Stepper(resources)
    by_itself = alone.submit(seeded)
    alone.finish(by_itself)

    together = Stepper(resources)
    settings = [Sampling(temperature=0), Sampling(temperature=2.0, hlg=True, hlg_width=0), Sampling(seed=11)]
    others = [together.submit(engine_request((n, 2, 3), 60, chosen)) for n, chosen in enumerate(settings)]
    together.step(3)
    in_company = together.submit(seeded)
    together.finish(in_company, *others)
    assert in_company.tokens == by_itself.tokens
    assert len(set(by_itself.tokens)) > 10
