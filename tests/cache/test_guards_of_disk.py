"""The guards of the disk tier, read token by token: `tests/mutants` takes these guards away."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.cache.disk import write_back
from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_index import DiskIndex, scan
from start_llm.cache.disk.page_file import FileHeader, opened_file, write_file
from start_llm.cache.pages import Page
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import PAGE
from tests.cache.disk import OnDisk, on_disk, settled
from tests.engine.harness import engine_request, uncached_resources
from tests.engine.test_guards import Counting, cached, check

PROMPT = tuple(range(300))
STATE = pytest.mark.parametrize("has_state", [False, True], ids=["KV", "state"])


def resources(*, has_state: bool = False) -> EngineResources:
    return uncached_resources(
        Counting(has_state=has_state), lambda _: b"a", frozenset(), max_sequences=4, batches=not has_state
    )


def cache_conversation(folder: Path, prompt: Sequence[int] = PROMPT, *, has_state: bool = False) -> None:
    """A folder in which a conversation is."""
    with on_disk(resources(has_state=has_state), folder) as engine:
        engine.say(prompt, 5, boundaries=(290,))


def files(folder: Path, kind: str = "pages") -> list[Path]:
    """Those of a conversation, in the order of their tokens."""
    index = DiskIndex()
    for scanned in scan(folder):
        if scanned.cached and scanned.cached.kind == kind:
            index.add(scanned.cached)
    known = {file.key for file in index.oldest_first()}
    (first,) = (file for file in index.oldest_first() if file.parent not in known)
    path = [first]
    while after := index.after("pages", path[-1].key):
        path.append(after[0])
    return [file.path(folder) for file in path]


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
@STATE
def test_what_is_restored_is_what_its_tokens_give(has_state: bool, is_in_place: bool, tmp_path: Path):
    cache_conversation(tmp_path, has_state=has_state)
    with on_disk(resources(has_state=has_state), tmp_path, is_in_place=is_in_place) as engine:
        longer = engine.say((*PROMPT, *range(300, 305), 7, 7, 7), 5)
        assert cached(longer) == 305
        assert longer.tokens == [8, 9, 10, 11, 12]
        check(engine)
        other = engine.say((*PROMPT[:100], 7, 7, 7), 5)
        assert cached(other) == (0 if has_state else 100)
        check(engine)


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


def rewritten(path: Path, **changes: Any) -> None:
    """Change what a file says, with right checksums."""
    kind, key = ("pages" if "/pages/" in str(path) else "states"), bytes.fromhex(path.stem[-32:])
    with opened_file(path, kind, key) as file:
        contents = [bytearray(tensor.nbytes) for tensor in file.header.tensors.values()]
        file.read_into([[memoryview(tensor)] for tensor in contents])
        header: FileHeader = replace(file.header, **changes)
    write_file(path, header, [memoryview(tensor) for tensor in contents])


@pytest.mark.sample(2)
@pytest.mark.parametrize("place", [0, 3, 9], ids=["first", "in the middle", "the end"])
def test_a_key_whose_file_has_other_tokens_gives_nothing(place: int, tmp_path: Path):
    """However it came about: a key only finds."""
    cache_conversation(tmp_path)
    path = files(tmp_path)[place]
    length = 305 - 9 * PAGE if place == 9 else PAGE
    rewritten(path, tokens=tuple(range(50, 50 + length)))
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == place * PAGE
        check(engine)
        assert engine.disk.rejected == ({"tokens": 1} if place < 9 else {})


def test_a_file_that_follows_another_prefix_gives_nothing(tmp_path: Path):
    cache_conversation(tmp_path)
    rewritten(files(tmp_path)[4], parent=bytes(16))
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3)) == 4 * PAGE
        check(engine)
        assert engine.disk.rejected == {"tokens": 1}


@pytest.mark.sample(2)
@STATE
def test_changed_data_gives_nothing(has_state: bool, tmp_path: Path):
    cache_conversation(tmp_path, has_state=has_state)
    path = files(tmp_path)[4]
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with on_disk(resources(has_state=has_state), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) == (0 if has_state else 4 * PAGE)
        check(engine)
        assert engine.disk.rejected == {"checksum": 1}


def test_without_the_state_at_their_end_pages_are_kept_and_give_nothing(tmp_path: Path):
    cache_conversation(tmp_path, has_state=True)
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


def left_by_its_client(engine: OnDisk, steps: int) -> None:
    watched = engine.submit(engine_request(PROMPT, 50))
    engine.step(steps)
    watched.generation.cancel()
    engine.step()


@pytest.mark.parametrize("steps", [3, 10], ids=["in its prompt", "in its reply"])
def test_what_a_client_left_is_written_at_the_end(steps: int, tmp_path: Path):
    with on_disk(resources(), tmp_path) as engine:
        left_by_its_client(engine, steps)
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 300, 301), 3)) >= 64 * (steps - 1) * (steps < 5)
        check(engine)
        assert engine.disk.hits == 1


@pytest.mark.parametrize("steps", [3, 10], ids=["in its prompt", "in its reply"])
def test_what_a_client_left_is_not_written_when_it_is_evicted(steps: int, tmp_path: Path):
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        left_by_its_client(engine, steps)
        engine.cache.shrink(10**9)
        assert not list(engine.cache._store.tree.pages())
    assert not files_in(tmp_path)


def test_a_foreign_file_counts_and_stays(tmp_path: Path):
    cache_conversation(tmp_path / "size")
    size = sum(path.stat().st_size for path in files(tmp_path / "size"))
    foreign = tmp_path / "folder" / "foreign"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(size))
    with on_disk(resources(), foreign.parent, limits=DiskLimits(max_size=int(1.5 * size))) as engine:
        engine.say(PROMPT, 5)
    assert foreign.exists()
    ours = sum(path.stat().st_size for path in foreign.parent.rglob("*.safetensors"))
    assert 0 < ours <= size / 2


def test_what_finds_no_room_is_reported(tmp_path: Path):
    engine = OnDisk(resources(), tmp_path, limits=DiskLimits(max_size=100), idle_s=0)
    settled(lambda: engine.tier.worker.scanned.is_over)
    engine.say(PROMPT, 3)
    engine.cache.disk.write_due(is_busy=False)
    settled(lambda: engine.disk.lost and not engine.disk.queue)
    assert (engine.disk.state, [line.partition(":")[0] for line in engine.reported]) == (
        "paused",
        ["The disk tier of the prompt cache pauses"],
    )
    engine.reported.clear()
    engine.kill()


def test_those_that_wait_for_the_disk_have_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [tuple(range(start, start + 90)) for start in range(0, 300, 50)]
    with on_disk(resources(), tmp_path) as engine:
        for prompt in prompts:
            engine.say(prompt, 3)
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        go, real = [False], os.preadv
        monkeypatch.setattr(os, "preadv", lambda *those: settled(lambda: go[0]) or real(*those))
        everyone = [engine.submit(engine_request(prompt, 3)) for prompt in prompts]
        engine.step_until(lambda: engine.loop.schedule.restoring)
        for _ in range(3):
            engine.note_disk()
            engine.step()
        assert len(engine.loop.schedule.restoring) == 4
        go[0] = True
        engine.finish(*everyone)
        assert all(cached(watched) == 89 for watched in everyone)
        check(engine)


def test_a_second_one_does_not_touch_the_folder(tmp_path: Path):
    with on_disk(resources(), tmp_path):
        second = OnDisk(resources(), tmp_path, idle_s=0)
        second.say(PROMPT, 3)
        second.reported.clear()
        second.stop()
        assert not (tmp_path / "pages").exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whoever looks while it is written finds no file."""
    seen: list[list[Path]] = []
    real = os.writev

    def counted_write(*those: Any) -> int:
        count = real(*those)
        seen.append(list(tmp_path.rglob("*.safetensors")))
        return count

    monkeypatch.setattr(os, "writev", counted_write)
    header = FileHeader("pages", bytes(16), bytes(16), (1,), {})
    write_file(tmp_path / "x.safetensors", header, [])
    assert seen == [[]]
    assert (tmp_path / "x.safetensors").exists()


class Held:
    """A disk whose reads wait until `go` is set, for an engine whose clock stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.hangs, self.now = threading.Event(), threading.Event(), 0.0
        self._real = os.preadv
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, *those: Any) -> int:
        self.hangs.set()
        assert self.go.wait(30)
        return self._real(*those)

    def clock(self) -> float:
        return self.now

    def pass_time(self, engine: OnDisk) -> None:
        for seconds in (5.5, 1):
            self.now += seconds
            engine.note_disk()
            engine.step()


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [tuple(range(start, start + 300)) for start in (0, 400)]
    for prompt in prompts:
        cache_conversation(tmp_path, prompt)
    with on_disk(resources(), tmp_path, clock=(held := Held(monkeypatch)).clock) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        first = engine.submit(engine_request(prompts[0], 3))
        engine.step_until(lambda: engine.restorer._running)
        settled(held.hangs.is_set)
        held.pass_time(engine)
        assert not engine.loop.schedule.restoring
        second = engine.submit(engine_request(prompts[1], 3))
        engine.note_disk()
        engine.step()
        assert not engine.loop.schedule.restoring
        engine.finish(first, second)
        assert [cached(first), cached(second)] == [0, 0]
        held.go.set()
        engine.reported.clear()


def test_what_comes_late_is_right_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path, clock=(held := Held(monkeypatch)).clock) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        watched = engine.submit(engine_request((*PROMPT, 300, 7, 7), 3))
        engine.step_until(lambda: engine.restorer._running)
        settled(held.hangs.is_set)
        held.pass_time(engine)
        watched.generation.cancel()
        engine.step()
        engine.cache.shrink(10**9)
        held.go.set()
        (late,) = engine.restorer._running
        settled(lambda: late.read.is_over)
        engine.note_disk()
        engine.step()
        assert late.is_over
        check(engine)
        again = engine.say((*PROMPT, 300, 8, 8), 3)
        assert again.tokens == [9, 10, 11]
        check(engine)
        engine.reported.clear()


def test_beginnings_are_written_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda *those: time.sleep(0.02) or real(*those))
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        watched = engine.say(PROMPT, 60)
        engine.say((*PROMPT, *watched.tokens, 7, 7), 40)
        keys = [page.key.hex() for page in engine.cache._store.seq_caches[-1].path]
        engine.cache.disk.flush(0.1)
        settled(lambda: not engine.disk.queue)
        written = {path.stem[-32:] for path in files_in(tmp_path)}
        assert 2 <= len(written) < len(keys)
        assert written == {*keys[: len(written)]}


def test_one_beginning_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache_conversation(tmp_path)
    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *those: time.sleep(0.01) or real(*those))
        prompts = [(*PROMPT, 300 + number, 5, 5) for number in range(4)]
        everyone = [engine.submit(engine_request(prompt, 3)) for prompt in prompts]
        engine.finish(*everyone)
        assert engine.disk.restored_tokens <= 305
        assert all(cached(watched) >= 288 for watched in everyone)
        check(engine)


@pytest.mark.thorough
def test_a_client_that_changes_each_reply_goes_on_from_its_prompt(tmp_path: Path):
    """The state at the end of a prompt stays, although it saves less and less beside older ones."""
    prompt, end = PROMPT, 0
    for turn in range(10):
        with on_disk(resources(has_state=True), tmp_path) as engine:
            assert cached(engine.say(prompt, 5, boundaries=(100, len(prompt) - 4))) == end
            check(engine)
        end = len(prompt) - 4
        prompt = (*prompt[:end], *range(1000 * turn, 1000 * turn + 40 - 2 * turn))


def test_files_behind_a_damaged_one_are_checked(tmp_path: Path):
    cache_conversation(tmp_path)
    for path in files(tmp_path)[2:6]:
        path.write_bytes(bytes(path.stat().st_size))
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3)) == 2 * PAGE
    assert engine.disk.rejected == {"header": 4}
    with on_disk(resources(), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3)) == 299
        check(engine)


def test_damaged_files_that_no_prompt_has_read_are_written_again_once_their_content_is_computed(
    tmp_path: Path,
):
    """Nobody reads the pages behind a damaged state, nor would anybody write them if they seemed whole."""
    cache_conversation(tmp_path, has_state=True)
    damaged = [*(tmp_path / "states").rglob("*.safetensors"), *files(tmp_path)[2:6]]
    for path in damaged:
        path.write_bytes(bytes(path.stat().st_size))
    with on_disk(resources(has_state=True), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3, boundaries=(290,))) == 0
    assert engine.disk.rejected == {"header": len(damaged)}
    with on_disk(resources(has_state=True), tmp_path) as engine:
        assert cached(engine.say(PROMPT, 3, boundaries=(290,))) == 290
        check(engine)


def test_state_is_kept_where_an_earlier_conversation_diverged_before_the_restart(tmp_path: Path):
    ends = (100, 200, 290)
    with on_disk(resources(has_state=True), tmp_path) as engine:
        engine.say(PROMPT, 5, boundaries=ends)
    for number, known in ((1000, 100), (2000, 200)):
        with on_disk(resources(has_state=True), tmp_path) as engine:
            branch = (*PROMPT[:230], *range(number, number + 50))
            assert cached(engine.say(branch, 5, boundaries=(100, 200, 276))) == known
            check(engine)


@pytest.mark.thorough
@pytest.mark.checked(2)
@STATE
def test_a_conversation_that_the_folder_cannot_hold_is_not_written_again_at_each_turn(
    has_state: bool, tmp_path: Path
):
    cache_conversation(tmp_path / "whole", has_state=has_state)
    whole_bytes = sum(path.stat().st_size for path in files_in(tmp_path / "whole"))
    limits, ends, talk = DiskLimits(max_size=int(0.7 * whole_bytes)), (100, 290), PROMPT
    used = resources(has_state=has_state)
    with on_disk(used, tmp_path / "full", limits=limits, clock=time.monotonic) as engine:
        written_bytes = list[int]()
        for turn in range(6):
            reply = engine.say(talk, 6, boundaries=(*ends, len(talk) - 4))
            talk = (*talk, *reply.tokens, *range(400 + 40 * turn, 440 + 40 * turn))
            engine.cache.disk.flush(10)
            settled(lambda: not engine.disk.queue)
            written_bytes.append(engine.disk.written_bytes)
        assert written_bytes[-1] - written_bytes[0] < limits.max_size, "no more than what is new"
        assert engine.disk.lost == 0
        check(engine)
    with on_disk(used, tmp_path / "full", limits=limits) as engine:
        assert cached(engine.say(talk, 2)) >= 100, "its beginning stays"
        check(engine)


def test_a_look_for_what_is_to_be_written_visits_each_page_once_although_the_folder_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    visited, real = list[Page](), write_back._path_to

    def counted_path(page: Page) -> Iterator[Page]:
        for each in real(page):
            visited.append(each)
            yield each

    with on_disk(resources(), tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 5)
        engine.tier.folder.kept_since_ns = time.time_ns() + 10**12
        monkeypatch.setattr(write_back, "_path_to", counted_path)
        engine.cache.disk.flush(1)
        assert engine.disk.written_files == 0
        assert len(visited) <= engine.cache._store.tree.count
