"""A seeded reply is the same whatever happens to its batch. Its mutants run these tests, so they need no
fixture of other files.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import tiny_models
from start_llm.core.limits import TimeLimits
from start_llm.core.sampling import Sampling
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import load
from tests.engine.harness import FailsOnce, Stepper, Wrapped, engine_request, uncached_resources
from tests.engine.test_turns import Clock, cached

PROMPT = (5, 6, 7, 8)
SEEDED = [
    engine_request(PROMPT, 40, Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=11)),
    engine_request((*PROMPT, 7), 30, Sampling(temperature=1.5, seed=12)),
    engine_request((9, *PROMPT), 50, Sampling(temperature=1.0, min_p=0.01, seed=11)),
]


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> EngineResources:
    folder: Path = tiny_models.build(
        "qwen3", tmp_path_factory.mktemp("seeds") / "model", hidden=128, layers=2
    )
    model = load(folder)
    return uncached_resources(
        network=model.network,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=model.tokenizer.eos_token_ids,
        max_sequences=4,
        batches=True,
    )


@pytest.fixture(scope="module")
def undisturbed(resources) -> list[list[int]]:
    """The replies to `SEEDED`, each on an engine of its own."""
    replies: list[list[int]] = []
    for request in SEEDED:
        stepper = Stepper(resources)
        watched = stepper.submit(request)
        stepper.finish(watched)
        replies.append(watched.tokens)
    return replies


@pytest.mark.parametrize("nth", [1, 2, 5, 17])
@pytest.mark.sample(4)
def test_seeded_replies_are_the_same_after_a_step_of_the_batch_has_failed(resources, undisturbed, nth):
    """The step's tokens were chosen and are lost; they are chosen again where they stand."""
    breaks = FailsOnce(lambda shape: shape[0] > 1 and shape[1] == 1, nth)
    stepper = Stepper(resources, network=Wrapped(resources.network, breaks))
    replies = [stepper.submit(request) for request in SEEDED]
    stepper.finish(*replies)
    assert stepper.metrics.failures == 1
    assert [reply.tokens for reply in replies] == undisturbed


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("max_sequences", [1, 2])
def test_seeded_replies_are_the_same_after_pauses(resources, undisturbed, max_sequences):
    stepper = cached(
        resources,
        clock=Clock(0.1),
        max_sequences=max_sequences,
        time_limits=TimeLimits(preempt_after_s=1),
    )
    replies = [stepper.submit(request) for request in SEEDED]
    stepper.finish(*replies)
    assert stepper.metrics.preemptions
    assert [reply.tokens for reply in replies] == undisturbed
