"""What rank 0 sees, a follower computes with too, without a picture and without a tower.

Both are in this process, and each has the whole network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel
from start_llm.models.vision import ImageFeatures, VisionOfRanks
from start_llm.models.vision_families import blank
from start_llm.models.vision_loader import Blind, Division, _agreeing, _try, load_vision, shapes_of
from start_llm.ranks.follower import OutOfStep
from tests.engine.test_step_plans import counts, kept
from tests.ranks import play_images
from tests.ranks.play import resources_of
from tests.ranks.test_leader_and_follower import Pair, followed
from tests.vision.seeing import eyes, folder_of, model_of

FAMILY = "qwen3_vl"


class Passed:
    """What goes from rank 0 to the other one: arrays, and what each of them says at the start."""

    def __init__(self, *stated: str) -> None:
        self.arrays: deque[mx.array] = deque()
        self.count = 0
        self._stated = list(stated)

    def at(self, rank: int) -> Any:
        """The ranks as one of them sees them."""
        given = (self._give, self._take)[rank]
        return SimpleNamespace(rank=rank, from_first=given, texts=self._texts)

    def _give(self, own: mx.array) -> mx.array:
        self.arrays.append(own)
        self.count += 1
        return own

    def _take(self, own: mx.array) -> mx.array:
        given = self.arrays.popleft()
        assert (own.shape, own.dtype) == (given.shape, given.dtype)
        return given

    def _texts(self, own: str) -> list[str]:
        return [self._stated.pop(0) if self._stated else own, ""]


def both_eyes(model: LoadedModel, passed: Passed) -> list[VisionOfRanks]:
    """The eyes of rank 0, and those of a rank without a tower."""
    alone = eyes(model)
    made = [
        VisionOfRanks(
            alone.model,
            alone.processor,
            parameters,
            ranks=passed.at(rank),
            moves_positions=alone.moves_positions,
        )
        for rank, parameters in enumerate((alone.parameters, {}))
    ]
    done = alone.processor.preprocess(blank())
    stated: list[str] = []
    made[0]._ranks = cast("Any", SimpleNamespace(texts=lambda own: stated.append(own) or [own]))
    made[0].learn_form(alone.look(done.inputs, done.network_ids))
    made[1]._ranks = cast("Any", SimpleNamespace(texts=lambda own: stated))
    made[1].learn_form(None)
    for rank, vision in enumerate(made):
        vision._ranks = passed.at(rank)
    return made


@pytest.fixture
def pair() -> Generator[Pair]:
    made = Pair()
    yield made
    made.near.close()
    made.far.close()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return model_of(FAMILY)


def seeing(model: LoadedModel, vision: VisionOfRanks) -> EngineResources:
    limit = play_images.image_bytes_for(model)
    return replace(resources_of(model), vision=vision, image_bytes=limit)


def led(model: LoadedModel, resources: EngineResources, pair: Pair) -> play_images.Seen:
    return play_images.play(model, replace(resources, followers=pair.leader, agree=pair.say))


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> play_images.Seen:
    """What one process says."""
    limit = play_images.image_bytes_for(model)
    return play_images.play(model, resources_of(model, vision=eyes(model), image_bytes=limit))


@pytest.mark.thorough
def test_a_follower_computes_and_keeps_of_images_what_rank_0_does(pair, model, alone):
    """Pictures that are new, restored, given up in their middle, known to the tower, and forgotten."""
    passed = Passed()
    ours, theirs = (seeing(model, vision) for vision in both_eyes(model, passed))
    heard = led(model, ours, pair)
    follower = followed(pair, theirs)
    assert heard == alone
    assert [reply.tower_runs for reply in heard.greedy] == [1, 1, 2, 2, 4]
    assert heard.counts[2] > 0, "nothing was restored in front of an image"
    assert not passed.arrays
    assert kept(theirs.cache) == kept(ours.cache)
    assert counts(theirs.cache) == counts(ours.cache)
    assert follower.executor.state().image_bytes > 0


def test_what_the_tower_makes_arrives_to_the_bit(model):
    passed = Passed()
    ours, theirs = both_eyes(model, passed)
    done = eyes(model).processor.preprocess(blank((96, 160)))
    seen, arrived = (vision.see(done.inputs, done.network_ids) for vision in (ours, theirs))
    expected = eyes(model).look(done.inputs, done.network_ids)
    assert passed.count == len(expected.arrays) == 4
    for features in (seen, arrived):
        assert all(map(_are_equal, features.arrays, expected.arrays))
        assert len(features) == len(done.network_ids)


def _are_equal(left: mx.array, right: mx.array) -> bool:
    return left.shape == right.shape and bool(mx.array_equal(left, right).item())


def test_a_follower_that_keeps_other_images_computes_no_further(pair, model):
    ours, theirs = (seeing(model, vision) for vision in both_eyes(model, Passed()))
    play_images.ask_once(model, replace(ours, followers=pair.leader, agree=pair.say))
    with pytest.raises(OutOfStep, match="before ComputeChunk it has"):
        followed(pair, replace(theirs, image_bytes=0))


# -------------------------------------------------------------------------------------------------- the start


def test_a_rank_that_cannot_see_leaves_all_of_them_blind():
    stated = "the vision tower cannot be loaded (ModuleNotFoundError: No module named 'mlx_vlm')"
    ranks = cast("Any", SimpleNamespace(rank=0, texts=lambda own: [own, stated]))
    reason = r"^on rank 1, the vision tower cannot be loaded \(ModuleNotFoundError"
    with pytest.raises(Blind, match=reason), _agreeing(Division(ranks, {})):
        pass


def test_features_that_cannot_be_passed_on_leave_the_model_blind(model, monkeypatch):
    ours, _ = both_eyes(model, Passed())
    look = ours.look

    def with_more(inputs: Any, ids: Sequence[int]) -> ImageFeatures:
        return replace(look(inputs, ids), per_layer=mx.zeros((1, len(ids), 2, 8)))

    monkeypatch.setattr(ours, "look", with_more)
    with pytest.raises(Blind, match="cannot pass on what each of its layers reads"):
        _try(ours)


@pytest.mark.thorough
def test_only_rank_0_has_a_tower(model):
    for rank, stated in enumerate(([], ["", "", '[128, ["float32"]]'])):
        ranks = Passed(*stated).at(rank)
        division = Division(ranks, shapes_of(model.network))
        vision = load_vision(folder_of(FAMILY), model.network, model.config, 4096, division=division)
        assert vision.runs_tower == bool(vision.parameters) == (rank == 0)
