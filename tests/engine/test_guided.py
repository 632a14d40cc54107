"""A guide holds its own row to a form, and leaves every other one alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from start_llm.core.errors import GuideLost
from start_llm.core.events import Failed, Finished, Text
from start_llm.core.sampling import Sampling
from start_llm.engine.generation import Generation
from start_llm.engine.guided import GuidedLogits
from start_llm.engine.machinery import Machinery, Pace
from start_llm.engine.reply import ReplyWriter
from start_llm.engine.row import Row
from tests.cache.conversations import Cached
from tests.engine.harness import FailsOnce, Stepper, Watched, Wrapped, job, strand_of

PROMPT = (5, 6, 7)
OTHERS = [(8, 9), (10, 11, 12, 13)]
SCRIPT = tuple(range(20, 60))


class Reciter:
    """Allows the tokens of a script, one after the other; it is lost where that ends."""

    def __init__(self, script: Sequence[int], vocabulary: int = 2048) -> None:
        self._script = script
        self._vocabulary = vocabulary
        self.told: list[int] = []

    def advance(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    def allowed(self) -> bytes:
        assert self.told == list(self._script[: len(self.told)]), "it is told every token, and once"
        if len(self.told) == len(self._script):
            raise GuideLost("the script is over")
        mask = bytearray(self._vocabulary)
        mask[self._script[len(self.told)]] = 1
        return bytes(mask)


@pytest.fixture
def stepper(machinery: Machinery) -> Iterator[Stepper]:
    yield Stepper(machinery)


def alone(machinery: Machinery, prompt: Sequence[int], tokens: int) -> list[int]:
    stepper = Stepper(machinery)
    watched = stepper.submit(job(prompt, tokens))
    stepper.finish(watched)
    return watched.tokens


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0), Sampling(temperature=1, seed=3)], ids=["greedy", "random"]
)
def test_a_row_alone_says_what_its_guide_allows(stepper: Stepper, sampling: Sampling):
    watched = stepper.submit(job(PROMPT, 30, sampling, guide=Reciter(SCRIPT)))
    stepper.finish(watched)
    assert watched.tokens == list(SCRIPT[:30])
    assert isinstance(watched.ending, Finished)


def test_rows_in_one_batch_are_guided_each_by_its_own_and_the_others_by_none(
    machinery: Machinery, stepper: Stepper
):
    free = [stepper.submit(job(prompt, 24)) for prompt in OTHERS]
    guided = [stepper.submit(job(PROMPT, 24, guide=Reciter(script))) for script in (SCRIPT, SCRIPT[::-1])]
    stepper.finish(*free, *guided)
    assert [one.tokens for one in guided] == [list(SCRIPT[:24]), list(SCRIPT[::-1][:24])]
    assert [one.tokens for one in free] == [alone(machinery, prompt, 24) for prompt in OTHERS]


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_row_that_is_joined_and_left_stays_on_its_way(machinery: Machinery, stepper: Stepper, steps: int):
    first = stepper.submit(job(PROMPT, 30, guide=Reciter(SCRIPT)))
    stepper.step(steps)
    second = stepper.submit(job(OTHERS[0], 6))
    stepper.finish(first, second)
    assert first.tokens == list(SCRIPT[:30])
    assert second.tokens == alone(machinery, OTHERS[0], 6)


@pytest.mark.parametrize("most_rows", [1, 2])
def test_rows_that_take_turns_stay_on_their_way(machinery: Machinery, most_rows: int):
    ticks = iter(range(10**6))
    stepper = Cached(machinery, clock=lambda: next(ticks) / 10, most_rows=most_rows, pace=Pace(turn_s=1))
    scripts = [SCRIPT, SCRIPT[::-1], tuple(range(100, 140))]
    rows = [
        stepper.submit(job(range(n, n + 5), 39, guide=Reciter(script))) for n, script in enumerate(scripts)
    ]
    stepper.finish(*rows)
    assert stepper.metrics.interruptions > 3
    assert [row.tokens for row in rows] == [list(script[:39]) for script in scripts]


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "behind the guide"])
def test_of_a_batch_that_failed_a_guided_row_goes_on_as_it_was_or_fails(
    machinery: Machinery, nth: int, is_late: bool
):
    """Behind the guide: it has been told a token that nobody has said."""
    breaks = FailsOnce(lambda shape: shape == (3, 1), nth)
    late = Late(machinery.network, breaks) if is_late else Wrapped(machinery.network, breaks)
    stepper = Stepper(machinery, network=late)
    guided = stepper.submit(job(PROMPT, 24, guide=Reciter(SCRIPT)))
    free = [stepper.submit(job(prompt, 24)) for prompt in OTHERS]
    stepper.finish(*free, guided)
    assert stepper.metrics.failures == 1
    assert nth == 1 or isinstance(guided.ending, Failed) == is_late, "at first it may have joined just then"
    assert guided.tokens == list(SCRIPT[: len(guided.tokens)])
    assert isinstance(guided.ending, Failed) or len(guided.tokens) == 24
    assert [one.tokens for one in free] == [alone(machinery, prompt, 24) for prompt in OTHERS]


class Late:
    """Breaks when its logits are wanted for the row behind the guided one."""

    def __init__(self, network: Any, breaks: FailsOnce) -> None:
        self._network, self._breaks = network, breaks

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        logits = self._network(tokens, cache=cache)
        return BrokenBehind(logits, self._breaks) if tokens.shape == (3, 1) else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


class BrokenBehind:
    """Logits that can be taken for each row, and not for all at once."""

    def __init__(self, logits: mx.array, breaks: FailsOnce) -> None:
        self._logits, self._breaks = logits, breaks

    def __getitem__(self, place: Any) -> Any:
        return Rows(self._logits[place], self._breaks)


class Rows(BrokenBehind):
    def __getitem__(self, place: Any) -> Any:
        if place.stop == 3:
            row = self._logits[place]
            self._breaks((3, 1))
            return row
        return self._logits[place]


@pytest.mark.parametrize("together", [True, False], ids=["in a batch", "alone"])
def test_a_guide_that_is_lost_fails_its_own_request_and_no_other(
    machinery: Machinery, stepper: Stepper, together: bool
):
    free = [stepper.submit(job(prompt, 24)) for prompt in OTHERS if together]
    lost = stepper.submit(job(PROMPT, 24, guide=Reciter(SCRIPT[:5])))
    stepper.finish(*free, lost)
    assert isinstance(lost.ending, Failed)
    assert "the script is over" in lost.ending.message
    assert lost.tokens == list(SCRIPT[: len(lost.tokens)])
    assert [one.tokens for one in free] == [alone(machinery, prompt, 24) for prompt in OTHERS if together]
    assert _still_works(stepper)


def test_a_reply_that_ends_with_its_script_does_not_fail(stepper: Stepper):
    watched = stepper.submit(job(PROMPT, 5, guide=Reciter(SCRIPT[:5])))
    stepper.finish(watched)
    assert isinstance(watched.ending, Finished)


def test_nothing_that_is_forbidden_is_reported_as_an_alternative(stepper: Stepper):
    watched = stepper.submit(job(PROMPT, 4, guide=Reciter(SCRIPT), top_logprobs=5))
    stepper.finish(watched)
    scored = [one for event in watched.seen if isinstance(event, Text) for one in event.logprobs]
    assert [[top.token for top in one.top] for one in scored] == [[token] for token in SCRIPT[:4]]


def test_what_a_guide_forbids_cannot_be_sampled():
    guided = GuidedLogits(Reciter(SCRIPT), prompt_length=2)
    tokens, logits = mx.array([5, 6]), mx.zeros((1, 2048))
    for token in SCRIPT[:3]:
        left = guided(tokens, logits)
        assert (mx.argmax(left).item(), int((left > float("-inf")).sum())) == (token, 1)
        tokens = mx.concatenate([tokens, mx.array([token])])


def test_a_row_whose_guide_is_lost_fails_with_its_next_token():
    asked = job(PROMPT, 24, guide=Reciter(()))
    row = Row(Generation(asked), ReplyWriter(asked, lambda _: b"a", frozenset()), strand_of([]))
    row.processors[-1](mx.array(PROMPT), mx.zeros((1, 2048)))
    with pytest.raises(GuideLost):
        row.accept(20)


def _still_works(stepper: Stepper) -> bool:
    after: Watched = stepper.submit(job(PROMPT, 4))
    stepper.finish(after)
    return isinstance(after.ending, Finished)
