"""What a power cut leaves of files that were never synced: the right names, and anything in them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.cache.disk.disk_index import LOCK, WRITTEN
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import reference, tokens
from tests.cache.disk import on_disk, resources_of, settled
from tests.conftest import TinyModel
from tests.engine.harness import Stepper
from tests.ties import Tally

SECTOR = 512
PROMPTS = [tokens(random.Random(number), 250, 300) for number in range(3)]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5", "gemma3_text"])
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    return resources_of(tiny_model, request.param)


@pytest.fixture(scope="module")
def left(resources: EngineResources, tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    """The files of three conversations, by their place in the folder."""
    folder = tmp_path_factory.mktemp("left")
    with on_disk(resources, folder) as engine:
        for prompt in PROMPTS:
            engine.say(prompt, 5, boundaries=(100, len(prompt) - 4))
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    whole = Tally()
    yield whole
    whole.assert_ties_are_rare()


def unsynced(whole: bytes, rng: random.Random) -> bytes:
    """What may be there of it: some sectors, or a part of its length."""
    sectors = -(-len(whole) // SECTOR)
    place = SECTOR * rng.randrange(sectors)
    blank = {SECTOR * rng.randrange(sectors) for _ in range(rng.randint(1, 5))}
    with_holes = bytearray(whole)
    for begin in blank:
        with_holes[begin : begin + SECTOR] = bytes(len(with_holes[begin : begin + SECTOR]))
    return rng.choice(
        [b"", bytes(len(whole)), whole[:place], whole[:place] + bytes(len(whole) - place), bytes(with_holes)]
    )


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_what_was_not_synced_is_a_miss(
    resources, left: dict[Path, bytes], tally: Tally, tmp_path: Path, seed: int
):
    rng, plain = random.Random(seed), Stepper(resources)
    damaged: dict[Path, bytes] = {}
    for place, whole in left.items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        content = unsynced(whole, rng) if rng.random() < 0.3 else whole
        path.write_bytes(content)
        if content != whole:
            damaged[path] = content
    (tmp_path / WRITTEN).write_bytes(bytes(40))
    (tmp_path / LOCK).write_bytes(bytes(40))
    with on_disk(resources, tmp_path) as engine:
        for prompt in PROMPTS:
            watched = engine.say((*prompt, 7, 7), 5, boundaries=(100, len(prompt) - 4))
            tally.compare(watched.tokens, reference(plain, (*prompt, 7, 7), 5))
        assert engine.metrics.failures == 0
        rejected = engine.disk.rejected.total()
        assert rejected == sum(not path.exists() for path in damaged), "each is counted, and gone"
    with on_disk(resources, tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        for prompt in PROMPTS:
            watched = engine.say((*prompt, 7, 7), 5, boundaries=(100, len(prompt) - 4))
            tally.compare(watched.tokens, reference(plain, (*prompt, 7, 7), 5))
        assert not engine.disk.rejected or damaged, "what was written again is whole"


@pytest.mark.thorough
def test_a_folder_of_zeros_is_soon_as_good_as_an_empty_one(
    resources, left: dict[Path, bytes], tally: Tally, tmp_path: Path
):
    for place, whole in left.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(bytes(len(whole)))
    hits, rejected = list[int](), dict[str, int]()
    for _ in range(3):  # states are found in the first life, and the pages in front of them in the second one
        with on_disk(resources, tmp_path) as engine:
            for prompt in PROMPTS:
                watched = engine.say(prompt, 5, boundaries=(100, len(prompt) - 4))
                tally.compare(watched.tokens, reference(Stepper(resources), prompt, 5))
            hits.append(engine.disk.hits)
            rejected = dict(engine.disk.rejected)
    assert (hits[0], hits[2]) == (0, len(PROMPTS))
    assert not rejected
