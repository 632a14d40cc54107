"""What the disk tier restores, read token by token: `tests/mutants` takes these guards away."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.cache.disk_index import DiskIndex, scan
from start_llm.cache.disk_tier import DiskLimits
from start_llm.cache.page_file import FileHeader, opened_file, write_file
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import PAGE
from tests.cache.disk import OnDisk, on_disk, settled
from tests.engine.harness import engine_request
from tests.engine.test_guards import Counting, cached, check

PROMPT = tuple(range(300))
STATE = pytest.mark.parametrize("has_state", [False, True], ids=["KV", "state"])


def resources(*, has_state: bool = False) -> EngineResources:
    return EngineResources(
        Counting(has_state=has_state), lambda _: b"a", frozenset(), max_sequences=4, batches=not has_state
    )


def said_before(folder: Path, prompt: Sequence[int] = PROMPT, *, has_state: bool = False) -> None:
    """A folder in which a conversation is."""
    with on_disk(resources(has_state=has_state), folder) as engine:
        engine.say(prompt, 5, boundaries=(290,))


def files(folder: Path, kind: str = "pages") -> list[Path]:
    """Those of a conversation, in the order of their tokens."""
    index = DiskIndex()
    for found in scan(folder):
        if found.cached and found.cached.kind == kind:
            index.add(found.cached)
    known = {one.key for one in index.oldest_first()}
    (first,) = (one for one in index.oldest_first() if one.parent not in known)
    path = [first]
    while after := index.after("pages", path[-1].key):
        path.append(after[0])
    return [one.path(folder) for one in path]


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
@STATE
def test_what_is_restored_is_what_its_tokens_give(has_state: bool, is_in_place: bool, tmp_path: Path):
    said_before(tmp_path, has_state=has_state)
    with on_disk(resources(has_state=has_state), tmp_path, is_in_place=is_in_place) as engine:
        longer = engine.say((*PROMPT, *range(300, 305), 7, 7, 7), 5)
        assert cached(longer) == 305
        assert longer.tokens == [8, 9, 10, 11, 12]
        check(engine)
        other = engine.say((*PROMPT[:100], 7, 7, 7), 5)
        assert cached(other) == (0 if has_state else 100)
        check(engine)


def rewritten(path: Path, **changes: Any) -> None:
    """Change what a file says, with right checksums."""
    kind, key = ("pages" if "/pages/" in str(path) else "states"), bytes.fromhex(path.stem[-32:])
    with opened_file(path, kind, key) as file:
        contents = [bytearray(one.nbytes) for one in file.header.tensors.values()]
        file.read_into([[memoryview(one)] for one in contents])
        header: FileHeader = replace(file.header, **changes)
    write_file(path, header, [memoryview(one) for one in contents])


@pytest.mark.parametrize("place", [0, 3, 9], ids=["first", "in the middle", "the end"])
def test_a_key_whose_file_has_other_tokens_gives_nothing(place: int, tmp_path: Path):
    """However it came about: a key only finds."""
    said_before(tmp_path)
    path = files(tmp_path)[place]
    length = 305 - 9 * PAGE if place == 9 else PAGE
    rewritten(path, tokens=tuple(range(50, 50 + length)))
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == place * PAGE
        check(engine)
        assert engine.disk.rejected == ({"tokens": 1} if place < 9 else {})


def test_a_file_that_follows_another_prefix_gives_nothing(tmp_path: Path):
    said_before(tmp_path)
    rewritten(files(tmp_path)[4], parent=bytes(16))
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3)) == 4 * PAGE
        check(engine)
        assert engine.disk.rejected == {"tokens": 1}


@STATE
def test_changed_data_gives_nothing(has_state: bool, tmp_path: Path):
    said_before(tmp_path, has_state=has_state)
    path = files(tmp_path)[4]
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with on_disk(resources(has_state=has_state), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == (0 if has_state else 4 * PAGE)
        check(engine)
        assert engine.disk.rejected == {"checksum": 1}


def test_without_the_state_at_their_end_pages_are_kept_and_give_nothing(tmp_path: Path):
    said_before(tmp_path, has_state=True)
    for path in (tmp_path / "states").rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    with on_disk(resources(has_state=True), tmp_path) as engine:
        watched = engine.submit(engine_request((*PROMPT, 300, 301), 3))
        engine.step_until(lambda: engine.disk.rejected and engine.metrics.prefill)
        check(engine)
        engine.finish(watched)
        assert cached(watched) == 0
        assert watched.tokens == [302, 303, 304]
        check(engine)


@pytest.mark.parametrize("leaves_after", [3, 10])
def test_of_a_client_that_left_nothing_is_written(leaves_after: int, tmp_path: Path):
    with on_disk(resources(), tmp_path, idle_s=0) as engine:
        watched = engine.submit(engine_request(PROMPT, 50))
        engine.step(leaves_after)
        watched.generation.cancel()
        engine.step()
    assert not list((tmp_path / "pages").rglob("*.safetensors"))


def test_a_foreign_file_counts_and_stays(tmp_path: Path):
    said_before(tmp_path / "size")
    size = sum(path.stat().st_size for path in files(tmp_path / "size"))
    foreign = tmp_path / "folder" / "foreign"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(size))
    with on_disk(resources(), foreign.parent, limits=DiskLimits(max_size=int(1.5 * size))) as engine:
        engine.say(PROMPT, 5)
    assert foreign.exists()
    ours = sum(path.stat().st_size for path in foreign.parent.rglob("*.safetensors"))
    assert 0 < ours <= size / 2


def test_those_that_wait_for_the_disk_have_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [tuple(range(start, start + 90)) for start in range(0, 300, 50)]
    with on_disk(resources(), tmp_path) as engine:
        for prompt in prompts:
            engine.say(prompt, 3)
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.scanned.is_over)
        go, real = [False], os.preadv
        monkeypatch.setattr(os, "preadv", lambda *those: settled(lambda: go[0]) or real(*those))
        everyone = [engine.submit(engine_request(prompt, 3)) for prompt in prompts]
        engine.step_until(lambda: engine.loop._schedule.restoring)
        for _ in range(3):
            engine.note_disk()
            engine.step()
        assert len(engine.loop._schedule.restoring) == 4
        go[0] = True
        engine.finish(*everyone)
        assert all(cached(watched) == 89 for watched in everyone)
        check(engine)


def test_a_second_one_does_not_touch_the_folder(tmp_path: Path):
    with on_disk(resources(), tmp_path):
        second = OnDisk(resources(), tmp_path, idle_s=0)
        second.say(PROMPT, 3)
        second.said.clear()
        second.stop()
        assert not (tmp_path / "pages").exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever looks while it is written finds no file."""
    seen: list[list[Path]] = []
    real = os.writev

    def looked(*those: Any) -> int:
        count = real(*those)
        seen.append(list(tmp_path.rglob("*.safetensors")))
        return count

    monkeypatch.setattr(os, "writev", looked)
    header = FileHeader("pages", bytes(16), bytes(16), (1,), {})
    write_file(tmp_path / "x.safetensors", header, [])
    assert seen == [[]]
    assert (tmp_path / "x.safetensors").exists()
