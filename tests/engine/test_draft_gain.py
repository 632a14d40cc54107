"""How much is drafted follows from what passes cost and from how often drafts were right."""

from __future__ import annotations

import pytest

from start_llm.engine.draft_gain import _STEPS_BETWEEN, DraftGain, expected_tokens
from start_llm.engine.draft_index import EARLIER, FORCED, MATCHES
from start_llm.engine.pass_times import PASSES, PassTimes
from tests.engine.harness import engine_request
from tests.engine.test_guards import at_once

CHEAP = {1: 0.010, 2: 0.0101, 4: 0.0105, 8: 0.012, 16: 0.016}
"""Seconds: sixteen tokens cost as much as 1.6 passes."""
LINEAR = {tokens: 0.01 * tokens for tokens in PASSES}
CLASSES = range(EARLIER + len(MATCHES))


def test_longer_matches_are_drafted_further():
    lengths = DraftGain(PassTimes(CHEAP)).lengths()
    assert lengths[FORCED] > 0
    assert list(lengths[: len(MATCHES)]) == sorted(lengths[: len(MATCHES)])
    assert lengths[0] < lengths[len(MATCHES) - 1]


@pytest.mark.parametrize("times", [LINEAR, {1: 0.01}, {}])
def test_nothing_is_drafted_where_each_token_costs_a_pass(times: dict[int, float]):
    gain = DraftGain(PassTimes(times))
    assert not gain.can_pay()
    assert not gain.metrics.pays
    assert gain.lengths() == ()


def soon(gain: DraftGain) -> tuple[int, ...]:
    """Return what it says within the next steps."""
    for _ in range(_STEPS_BETWEEN + 1):
        gain.lengths()
    return gain.lengths()


def test_drafts_that_are_wrong_end_and_come_back_once_they_would_have_been_right():
    gain = DraftGain(PassTimes(CHEAP))
    for match in CLASSES:
        for _ in range(40):
            gain.note_verified(match, 3, 0)
    assert gain.lengths() == ()
    for _ in range(60):
        gain.note(2, 1, 1)
    lengths = soon(gain)
    assert lengths[2] > 0
    assert sum(lengths) == lengths[2]


def test_it_follows_a_machine_whose_longer_passes_have_become_dear():
    times = PassTimes(CHEAP)
    gain = DraftGain(times)
    assert gain.lengths()
    for tokens in PASSES[1:]:
        for _ in range(5):
            times.note(tokens, 0.01 * tokens)
    assert soon(gain) == ()


def test_what_a_verified_draft_has_shown_counts_at_once():
    gain = DraftGain(PassTimes(CHEAP))
    before = gain.lengths()
    for match in CLASSES:
        for _ in range(40):
            gain.note_verified(match, 7, 0)
    assert before and gain.lengths() == ()


def test_one_slow_pass_changes_nothing():
    times = PassTimes(CHEAP)
    for _ in range(4):
        times.note(8, 0.012)
    times.note(8, 3.0)
    assert times.seconds(8) == 0.012


def test_passes_between_are_interpolated_and_tell_of_the_next_longer_one():
    times = PassTimes({1: 1.0, 2: 1.2, 4: 2.0, 8: 3.0, 16: 5.0})
    assert [times.seconds(count) for count in (1, 3, 6, 12)] == pytest.approx([1.0, 1.6, 2.5, 4.0])
    assert times.seconds(32) == 10.0
    for _ in range(20):
        times.note(6, 5.0)
    assert times.seconds(6) == pytest.approx(5.0, rel=0.05)


@pytest.mark.parametrize(("share", "drafted", "tokens"), [(1, 7, 8), (0, 7, 1), (0.5, 2, 1.75)])
def test_expected_tokens(share: float, drafted: int, tokens: float):
    assert expected_tokens(share, drafted) == pytest.approx(tokens)


def test_what_drafts_saved_and_what_rejected_tokens_took_is_counted():
    gain = DraftGain(PassTimes(CHEAP))
    gain.note_verified(3, 7, 7)
    gain.note_verified(3, 7, 0)
    metrics = gain.metrics
    assert (metrics.drafts, metrics.drafted_tokens, metrics.accepted_tokens) == (2, 14, 7)
    assert metrics.saved_s == pytest.approx((0.08 - 0.012) + (0.01 - 0.012))
    assert metrics.rejected_s == pytest.approx(0.002)


def test_the_turn_of_another_model_is_no_time_of_a_pass(monkeypatch: pytest.MonkeyPatch):
    class Seconds(PassTimes):
        def note(self, tokens: int, seconds: float) -> None:
            taken.append(seconds)

    now, taken = [0.0], list[float]()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    stepper = at_once(gain=DraftGain(Seconds()))
    reply = stepper.submit(engine_request(range(30), 20))
    stepper.step_until(lambda: len(reply.tokens) > 2)
    for _ in range(3):
        stepper.loop.end_turn()
        now[0] += 100
        stepper.step(3)
    assert taken
    assert max(taken) < 1
