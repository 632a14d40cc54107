"""The next token is chosen as asked, by each request for itself."""

import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from start_llm.core.events import TokenLogprobs
from start_llm.core.sampling import RANGES, Sampling, SamplingChoice, first_set
from start_llm.engine.sampler import BatchSampler, Chooser, make_processors, top_k_ids
from start_llm.engine.scores import Scores
from tests.engine.harness import Stepper, engine_request

VOCABULARY = 50
DRAWS = 20_000
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = (5, 17, 300, 42, 7, 8, 9, 23, 5, 17)


def sampling(**values: Any) -> Sampling:
    return Sampling(**(OFF | values))


@pytest.fixture
def logprobs() -> np.ndarray:
    """[vocabulary], no two alike, some far less likely than others."""
    logits = np.random.default_rng(7).normal(scale=2, size=VOCABULARY).astype(np.float32)
    return logits - np.log(np.exp(logits).sum())


def draw(chosen: Sampling, logprobs: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    """`draws` tokens, as the sequences of one batch."""
    sampler = BatchSampler([Chooser(chosen)] * draws, len(logprobs))
    return np.array(sampler(mx.array(np.tile(logprobs, (draws, 1))), range(draws)).ids)


def distribution(chosen: Sampling, logprobs: np.ndarray) -> np.ndarray:
    """Reference: temperature, top-k, top-p, min-p, each on what the one before has left."""
    probabilities = np.exp(logprobs.astype(np.float64) / chosen.temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities)
    if 0 < chosen.top_k < len(order):
        probabilities[order[chosen.top_k :]] = 0
        probabilities /= probabilities.sum()
    if 0 < chosen.top_p < 1:
        enough = int(np.searchsorted(np.cumsum(probabilities[order]), chosen.top_p)) + 1
        probabilities[order[enough:]] = 0
    probabilities[probabilities < chosen.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


# ---------------------------------------------------------------------------------------------------- filters


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCABULARY - 1},
        {"top_p": 0.05},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.7, "top_k": 30, "top_p": 0.5},
    ],
)
def test_tokens_are_drawn_from_the_reference_distribution(logprobs, values):
    chosen = sampling(seed=1, **values)
    wanted = distribution(chosen, logprobs)
    counts = np.bincount(draw(chosen, logprobs), minlength=VOCABULARY)
    assert counts[wanted == 0].sum() == 0, "a token that was filtered out"
    off = np.abs(counts / DRAWS - wanted) / np.sqrt(wanted * (1 - wanted) / DRAWS + 1e-12)
    assert off[wanted > 0].max() < 5, "a token comes too often or too seldom"


@pytest.mark.sample(4)
@pytest.mark.parametrize("top_k", [0, VOCABULARY, VOCABULARY + 1, 100_000, 2**31 - 1])
def test_a_top_k_of_the_whole_vocabulary_and_more_is_off(logprobs, top_k):
    everything = draw(sampling(seed=3), logprobs)
    assert (draw(sampling(seed=3, top_k=top_k), logprobs) == everything).all()


@pytest.mark.sample(4)
@pytest.mark.parametrize("values", [{"top_p": 0.0}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_a_filter_at_its_neutral_value_is_off(logprobs, values):
    assert (draw(sampling(seed=3, **values), logprobs) == draw(sampling(seed=3), logprobs)).all()


def test_tokens_that_are_equally_likely_at_the_edge_of_the_nucleus_all_stay():
    even = np.log(np.full(4, 0.25, np.float32))
    assert set(draw(sampling(seed=1, top_p=0.5), even)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-20, 1e-39, 1e-300])
def test_a_temperature_of_almost_nothing_is_greedy(temperature):
    unsure = np.log(np.array([0.1, 0.19, 0.2, 0.18, 0.17, 0.16], np.float32)) - 50
    assert set(draw(sampling(temperature=temperature), unsure, draws=100)) == {2}


def test_greedy_takes_the_best(logprobs):
    assert draw(Sampling(temperature=0), logprobs, draws=2).tolist() == [logprobs.argmax()] * 2


def test_masked_tokens_are_never_drawn(logprobs):
    masked = logprobs.copy()
    masked[::2] = -np.inf
    assert not set(draw(sampling(seed=1), masked)) & set(range(0, VOCABULARY, 2))


SIZES = [VOCABULARY, 8192, 9_000, 50_021, 49_155, 151_936]
"""Divisible by much, by little and, as a prime, by nothing."""


def of_size(vocabulary: int, *, spread: float = 2.5) -> np.ndarray:
    logits = np.random.default_rng(vocabulary).normal(scale=spread, size=vocabulary).astype(np.float32)
    return logits - np.log(np.exp(logits.astype(np.float64)).sum()).astype(np.float32)


@pytest.mark.sample(12)
@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 1},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
        {"top_k": 40, "temperature": 0.3},
        {"top_k": 3000, "top_p": 0.6},
        {"top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.05},
        {"top_p": 0.999},
        {"min_p": 0.05},
    ],
)
def test_each_number_draws_the_token_in_whose_share_it_lies(vocabulary, values):
    """The most likely first with top-k, else in the order of the ids."""
    logits, chosen = of_size(vocabulary), sampling(seed=5, **values)
    wanted = distribution(chosen, logits)
    order = np.argsort(-wanted, kind="stable") if 0 < chosen.top_k < vocabulary else np.arange(vocabulary)
    ends = np.empty(vocabulary)
    ends[order] = np.cumsum(wanted[order])
    chooser = Chooser(chosen)
    sampler = BatchSampler([chooser] * 16, vocabulary)
    ids, chances = map(np.array, sampler(mx.array(np.tile(logits, (16, 1))), range(16)))
    numbers = np.array([chooser.uniform(at) for at in range(16)])
    assert (wanted[ids] > 0).all()
    assert chances == pytest.approx(wanted[ids], rel=1e-3)
    assert (numbers < ends[ids] + 1e-4).all()
    assert (numbers > ends[ids] - wanted[ids] - 1e-4).all()


@pytest.mark.parametrize("values", [{"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"hlg": True}])
def test_a_draw_that_raised_leaves_the_next_ones_as_they_were(logprobs, values):
    """What is compiled is traced at the first call: then, too (lesson 335)."""
    rows = mx.array(np.tile(logprobs, (3, 1)))
    sampler = BatchSampler([Chooser(sampling(seed=seed, **values)) for seed in range(3)], VOCABULARY)
    fresh = np.tile(logprobs, (3, 1))[:, : VOCABULARY - 7]
    with pytest.raises(ValueError, match="broadcast"):
        sampler(rows[:2], range(3))
    before = np.array(sampler(rows, range(3)).ids)
    with pytest.raises(ValueError, match="broadcast"):
        sampler(mx.array(fresh[:2]), range(3))
    assert (np.array(sampler(rows, range(3)).ids) == before).all()
    assert (np.array(sampler(mx.array(fresh), range(3)).ids) < VOCABULARY - 7).all()


@pytest.mark.long
def test_several_threads_draw_at_once_each_on_its_own_stream():
    logits = of_size(9_000)

    def of_each() -> list[list[int]]:
        return [draw(sampling(seed=1, top_k=top_k), logits, 4).tolist() for top_k in (5, 40, 0)]

    expected = of_each()
    drawn: list[list[list[int]]] = []

    def work() -> None:
        with mx.stream(mx.new_stream(mx.default_device())):
            drawn.extend(of_each() for _ in range(5))
        mx.clear_streams()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [expected] * 20


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("k", [1, 7, 49])
def test_the_highest_scores_are_found_wherever_they_stand(vocabulary, k):
    """In one block or in many; and where all others are masked."""
    rng = np.random.default_rng(k)
    scores = rng.normal(size=(5, vocabulary)).astype(np.float32)
    scores[0, :k] += 100
    scores[1, -k:] += 100
    scores[2] = -np.inf
    scores[2, rng.choice(vocabulary, k, replace=False)] = 1
    scores[3, :: max(vocabulary // k, 1)] += 100
    top_ids = np.array(top_k_ids(mx.array(scores), k))
    for row, ids in zip(scores, top_ids, strict=True):
        assert len(set(ids)) == k
        assert sorted(row[ids]) == sorted(np.sort(row)[-k:])


# ---------------------------------------------------------------------------------------------------- chances


@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.3}, {"top_k": 7}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}],
)
def test_the_chance_of_a_token_is_that_of_what_it_was_drawn_from(logprobs, values):
    chosen = sampling(**values)
    sequences = mx.array(np.tile(logprobs, (200, 1)))
    ids, chances = map(np.array, BatchSampler([Chooser(chosen)] * 200, VOCABULARY)(sequences, range(200)))
    assert chances == pytest.approx(distribution(chosen, logprobs)[ids], rel=1e-3)


def test_sequences_that_are_sampled_differently_have_the_chances_of_their_own(logprobs):
    wanted = [sampling(temperature=0.5), Sampling(temperature=0), sampling(top_k=3)]
    sequences = mx.array(np.tile(logprobs, (3, 1)))
    ids, chances = map(
        np.array, BatchSampler([Chooser(choice) for choice in wanted], VOCABULARY)(sequences, [0, 0, 0])
    )
    first, _, last = (distribution(choice, logprobs) for choice in (wanted[0], wanted[0], wanted[2]))
    assert chances == pytest.approx([first[ids[0]], 1.0, last[ids[2]]], rel=1e-3)


def test_a_choice_says_as_many_bits_as_it_was_unlikely():
    assert Chooser(sampling()).surprisal(1 / 8) == 3


def test_a_choice_that_the_client_can_make_again_says_nothing():
    assert Chooser(sampling(seed=1)).surprisal(1 / 8) == 0


# ------------------------------------------------------------------------------------------------------ seeds


def sequence(seed: int | None, logprobs: np.ndarray) -> list[int]:
    """Twenty draws, one after the other."""
    sampler = BatchSampler([Chooser(sampling(seed=seed))], len(logprobs))
    return [int(np.array(sampler(mx.array(logprobs[None]), [at]).ids)[0]) for at in range(20)]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_seed_gives_the_same_choices_again(logprobs, seed):
    assert sequence(seed, logprobs) == sequence(seed, logprobs)


def test_other_seeds_give_other_choices(logprobs):
    assert len({tuple(sequence(seed, logprobs)) for seed in (0, 1, 2, -1, 2**63 - 1, -(2**63))}) == 6


def test_without_a_seed_every_request_chooses_differently(logprobs):
    assert len({tuple(sequence(None, logprobs)) for _ in range(5)}) == 5


def test_the_choices_of_a_request_change_from_step_to_step(logprobs):
    assert len(set(sequence(1, logprobs))) > 1


def test_the_global_random_state_is_neither_used_nor_changed(logprobs):
    mx.random.seed(5)
    first = sequence(1, logprobs)
    after = mx.random.uniform().item()
    mx.random.seed(5)
    assert mx.random.uniform().item() == after
    mx.random.seed(6)
    assert sequence(1, logprobs) == first


def test_a_number_depends_on_the_seed_and_the_position_alone():
    first, second = Chooser(sampling(seed=3)), Chooser(sampling(seed=3))
    numbers = [first.uniform(at) for at in range(1000)]
    assert [second.uniform(at) for at in reversed(range(1000))] == numbers[::-1]
    assert len(set(numbers)) > 990
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 1000 - 0.5) < 0.03


@pytest.mark.thorough
def test_seeded_choices_are_the_same_alone_and_in_a_batch(resources):
    seeded = engine_request(PROMPT, 40, Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=11))
    alone = Stepper(resources)
    by_itself = alone.submit(seeded)
    alone.finish(by_itself)

    together = Stepper(resources)
    others = [
        together.submit(engine_request((n, 2, 3), 60, sampling))
        for n, sampling in enumerate([Sampling(temperature=0), Sampling(temperature=2.0), Sampling(seed=11)])
    ]
    together.step(3)
    in_company = together.submit(seeded)
    together.finish(in_company, *others)
    assert in_company.tokens == by_itself.tokens
    assert len(set(by_itself.tokens)) > 10


# -------------------------------------------------------------------------------------------- penalties, bias


def repeated(logits: np.ndarray, tokens: list[int], penalty: float, window: int) -> np.ndarray:
    out = logits.copy()
    for token in set(tokens[-window:]):
        out[token] = out[token] * penalty if out[token] < 0 else out[token] / penalty
    return out


def counted(logits: np.ndarray, reply: list[int], presence: float, frequency: float) -> np.ndarray:
    out = logits.copy()
    for token, count in Counter(reply).items():
        out[token] -= presence + frequency * count
    return out


def processed(chosen: Sampling, tokens: list[int], prompt_length: int, logits: np.ndarray) -> np.ndarray:
    out = mx.array(logits[None])
    for processor in make_processors(chosen, prompt_length):
        out = processor(mx.array(tokens, dtype=mx.uint32), out)
    return np.array(out)[0]


TOKENS = [3, 4, 5, 3, 9, 9, 9, 4, 12, 3]


@pytest.mark.parametrize(("penalty", "window"), [(1.3, 256), (1.3, 4), (0.5, 2), (10.0, 1)])
def test_the_repetition_penalty_weakens_each_recent_token_once(logprobs, penalty, window):
    logits = logprobs + 3
    chosen = sampling(repetition_penalty=penalty, repetition_context_size=window)
    got = processed(chosen, TOKENS, 4, logits)
    np.testing.assert_allclose(got, repeated(logits, TOKENS, penalty, window), rtol=1e-6)


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 2.0), (0.3, -0.3)])
@pytest.mark.parametrize("prompt_length", [0, 4, 9, 10])
def test_presence_and_frequency_count_the_reply_and_not_the_prompt(
    logprobs, presence, frequency, prompt_length
):
    chosen = sampling(presence_penalty=presence, frequency_penalty=frequency)
    got = processed(chosen, TOKENS, prompt_length, logprobs)
    wanted = counted(logprobs, TOKENS[prompt_length:], presence, frequency)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_bias_is_added_to_its_tokens_alone(logprobs):
    wanted = logprobs.copy()
    wanted[[0, 7, 49]] += np.array([100, -100, 0.5], np.float32)
    got = processed(sampling(logit_bias={0: 100, 7: -100, 49: 0.5}), TOKENS, 0, logprobs)
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_nothing_asked_for_needs_no_processor():
    assert make_processors(sampling(), 3) == []
    assert make_processors(sampling(repetition_penalty=1.5, repetition_context_size=0), 3) == []


BIAS = dict.fromkeys(range(20, 28), 30.0)
"""So strong that the reply is made of these eight tokens, and the penalties decide between them."""
PENALTIES = Sampling(
    temperature=0,
    repetition_penalty=1.05,
    repetition_context_size=6,
    presence_penalty=0.4,
    frequency_penalty=0.8,
    logit_bias=BIAS,
)


def penalised_by_hand(network: Any, prompt: tuple[int, ...], length: int) -> list[int]:
    """Greedy with penalties: every step reads everything anew, and numpy does the rest."""
    tokens = list(prompt)
    for _ in range(length):
        logits = np.array(network(mx.array([tokens]), cache=make_prompt_cache(network)))[0, -1]
        logits[list(BIAS)] += 30
        logits = repeated(logits, tokens, 1.05, 6)
        logits = counted(logits, tokens[len(prompt) :], 0.4, 0.8)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def long_prompt() -> tuple[int, ...]:
    """It ends with tokens of the reply: the repetition penalty sees them there, the others do not."""
    return (*(int(n) for n in np.random.default_rng(3).integers(0, 1500, 150)), *BIAS)


@pytest.fixture(scope="module")
def penalised(resources, long_prompt) -> list[int]:
    reply = penalised_by_hand(resources.network, long_prompt, 30)
    assert set(reply) == set(BIAS)
    return reply


def alone(stepper: Stepper) -> list[Any]:
    return []


def joining(stepper: Stepper) -> list[Any]:
    """Others decode already, so that the request goes through a batch from its first token on."""
    others = [stepper.submit(engine_request((n, 8), 200)) for n in (1, 2)]
    stepper.step_until(lambda: all(other.tokens for other in others))
    return others


def joined(stepper: Stepper) -> list[Any]:
    """Another comes after, so that the request changes into a batch in the middle."""
    return [stepper.submit(engine_request(range(100, 180), 20))]


@pytest.mark.parametrize("before", [alone, joining], ids=["alone", "joining"])
@pytest.mark.parametrize("after", [alone, joined], ids=["undisturbed", "joined"])
@pytest.mark.thorough
def test_penalties_do_not_depend_on_how_the_prompt_was_computed(
    resources, long_prompt, penalised, before: Callable[[Stepper], Any], after: Callable[[Stepper], Any]
):
    stepper = Stepper(resources)
    before(stepper)
    watched = stepper.submit(engine_request(long_prompt, 30, PENALTIES))
    stepper.step_until(lambda: watched.tokens)
    after(stepper)
    stepper.finish(watched)
    assert watched.tokens == penalised


# --------------------------------------------------------------------------------------------------- logprobs


def logprobs_of(logprobs: np.ndarray, token: int, alternatives: int) -> TokenLogprobs:
    return Scores(mx.array(logprobs), mx.array(token), alternatives).logprobs_of(token)


def test_log_probabilities_name_the_choice_and_the_best(logprobs):
    order = np.argsort(-logprobs)
    reported = logprobs_of(logprobs, int(order[9]), 5)
    assert (reported.chosen.token, reported.chosen.logprob) == (order[9], pytest.approx(logprobs[order[9]]))
    assert [candidate.token for candidate in reported.top] == order[:5].tolist()
    assert [candidate.logprob for candidate in reported.top] == pytest.approx(logprobs[order[:5]].tolist())


def test_no_alternatives_and_more_than_there_are_both_work(logprobs):
    assert logprobs_of(logprobs, 3, 0).top == ()
    assert len(logprobs_of(logprobs[:4], 3, 20).top) == 4


def test_a_token_that_took_the_place_of_the_sampled_one_is_reported_with_its_own_score(logprobs):
    reported = Scores(mx.array(logprobs), mx.array(3), 1).logprobs_of(7)
    assert (reported.chosen.token, reported.chosen.logprob) == (7, pytest.approx(logprobs[7]))


def test_everything_that_is_reported_was_computed_with_the_step(logprobs):
    """Else it would be read through kernels that wait after the next step."""
    scores = Scores(mx.array(logprobs), mx.array(3), 5)
    arrays = scores.arrays
    mx.eval(arrays)
    reported = scores.logprobs_of(3)
    assert len(arrays) == 4
    assert [reported.chosen.logprob, *(candidate.logprob for candidate in reported.top)] == pytest.approx(
        [arrays[1].item(), *sorted(np.array(arrays[3]), reverse=True)]
    )


# ---------------------------------------------------------------------------------------- values out of range

ABOVE = [(name, allowed.high * 1.01 + 1) for name, allowed in RANGES.items()]
BELOW = [(name, allowed.low - 0.001) for name, allowed in RANGES.items()]
NO_NUMBERS = [(name, value) for name in RANGES for value in (float("nan"), float("inf"), float("-inf"))]


@pytest.mark.parametrize(("name", "value"), [*ABOVE, *BELOW, *NO_NUMBERS, ("min_p", 7), ("top_p", 1.5)])
def test_a_value_out_of_range_is_refused_with_its_name(name, value):
    with pytest.raises(ValueError, match=f"{name} must be from .* not "):
        Sampling(**{name: value})


@pytest.mark.parametrize("name", list(RANGES))
def test_the_ends_of_every_range_can_be_sampled(logprobs, name):
    for value in (RANGES[name].low, RANGES[name].high):
        kind = int if name in ("top_k", "repetition_context_size") else float
        chosen = sampling(**{name: kind(value)}, seed=1)
        out = processed(chosen, TOKENS, 4, logprobs)
        assert 0 <= draw(chosen, out, draws=10).max() < VOCABULARY


def test_each_field_comes_from_the_first_source_that_says_it():
    choice = SamplingChoice(temperature=0.0, top_k=5)
    weaker = SamplingChoice(temperature=1.0, top_p=0.5)
    assert first_set(choice, weaker) == {"temperature": 0.0, "top_k": 5, "top_p": 0.5}
    assert first_set() == {}


# --------------------------------------------------------------------------------- why the sampler is our own

SCRIPT = """
import mlx.core as mx
from mlx_lm.sample_utils import make_sampler as theirs
from start_llm.core.sampling import Sampling
from start_llm.engine.sampler import BatchSampler, Chooser

logprobs = mx.log(mx.array([[0.1, 0.2, 0.3, 0.4]]))

def ours(sampling):
    sampler = BatchSampler([Chooser(sampling)], 4)
    return lambda logprobs: sampler(logprobs, [0]).ids

def attempt(sampler):
    try:
        return str(sampler(logprobs).item())
    except Exception as error:
        return type(error).__name__
"""
THEIRS = """
print(attempt(theirs(temp=1.0)) in "0123", attempt(theirs(temp=1.0, {bad})), attempt(theirs(temp=1.0)))
print(attempt(theirs(temp=1.0)), attempt(ours(Sampling())) in "0123")
"""
OURS = """
for bad in ({"min_p": 7}, {"top_p": 2}, {"top_k": -1}, {"temperature": float("nan")}):
    try:
        Sampling(**bad)
    except ValueError as error:
        print("refused", error)
smuggled = Sampling(top_k=2)
object.__setattr__(smuggled, "top_k", 1.5)
print(attempt(ours(smuggled)))
print(attempt(ours(Sampling(temperature=1.0, top_k=100_000))) in "0123")
print(attempt(ours(Sampling(temperature=1.0))) in "0123", attempt(theirs(temp=1.0)) in "0123")
"""


def run(script: str) -> list[str]:
    command = [sys.executable, "-c", SCRIPT + textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("bad", ["top_k=4", "min_p=7.0"], ids=["top_k of the vocabulary", "min_p"])
def test_one_bad_value_silences_mlx_lms_sampler_for_good_and_not_ours(bad):
    """If this fails, mlx_lm has been mended and our own sampler may have lost its reason (lesson 1)."""
    assert run(THEIRS.format(bad=bad)) == ["True ValueError RuntimeError", "RuntimeError True"]


@pytest.mark.long
def test_ours_goes_on_after_refused_values():
    *refused, smuggled, vast, after = run(OURS)
    assert [line.split()[1] for line in refused] == ["min_p", "top_p", "top_k", "temperature"]
    assert smuggled.endswith("Error")
    assert (vast, after) == ("True", "True True")
