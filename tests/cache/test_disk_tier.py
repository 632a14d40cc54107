"""The disk tier: what is written when, damaged files, full and slow disks, and who may use a folder."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_index import LOCK, WRITTEN, CachedFile
from start_llm.cache.disk.disk_maintenance import clear, report
from start_llm.cache.disk.disk_reads import DiskRead, FilePart
from start_llm.cache.disk.disk_traffic import MOST_IN_FLIGHT
from start_llm.core.events import Failed, Finished, Restored
from start_llm.engine.inbox import StopRequest
from start_llm.engine.loop import STOPPING
from start_llm.engine.resources import EngineResources
from start_llm.engine.step_plan import PreemptRequest
from start_llm.storage.private_files import Lock
from tests.cache.conversations import PAGE, memory_for, reference, tokens
from tests.cache.disk import OnDisk, on_disk, resources_of, settled
from tests.cache.small_disk import fill, small_disk
from tests.conftest import TinyModel
from tests.engine.harness import Stepper, Watched, engine_request

PROMPT = tokens(random.Random(3), 300, 300)
ENDS = (100, 296)
ENOUGH_WRITTEN = (
    "The disk tier of the prompt cache pauses: SSD_CACHE_MAX_WRITE_PER_DAY is 100,000, and no less was "
    "written since midnight UTC."
)


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5"])
def resources(request: pytest.FixtureRequest, tiny_model: TinyModel) -> EngineResources:
    """Plain, and with recurrent layers."""
    return resources_of(tiny_model, request.param)


@pytest.fixture(scope="module")
def plain(tiny_model: TinyModel) -> EngineResources:
    return resources_of(tiny_model, "qwen3")


@pytest.fixture(scope="module")
def expected(resources: EngineResources) -> list[int]:
    return list(reference(Stepper(resources), PROMPT, 6).ids)


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def cached(watched: Watched) -> int:
    assert isinstance(watched.ending, Finished)
    return watched.ending.usage.cached


def written(engine: OnDisk, count: int) -> bool:
    """True once so many files have been written; the engine is called as its loop calls it."""
    engine.cache.disk.write_due(is_busy=False)
    engine.cache.disk.collect()
    return engine.disk.written_files >= count and not engine.disk.queue


@pytest.fixture
def stored(resources: EngineResources, tmp_path: Path) -> Path:
    """A folder with a conversation."""
    with on_disk(resources, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    return tmp_path


@pytest.fixture
def stored_plain(plain: EngineResources, tmp_path: Path) -> Path:
    """A folder with a conversation with the plain model."""
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    return tmp_path


# ---------------------------------------------------------------------------------------------- damaged files


def flipped(path: Path, whole: bytes, rng: random.Random) -> None:
    place = rng.randrange(len(whole))
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])


def swapped(path: Path, whole: bytes, rng: random.Random) -> None:
    other = rng.choice([file for file in files(path.parents[2]) if file != path])
    path.write_bytes(other.read_bytes())


HURTS: dict[str, Callable[[Path, bytes, random.Random], object]] = {
    "a bit is flipped": flipped,
    "it is cut": lambda path, whole, rng: path.write_bytes(whole[: rng.randrange(len(whole))]),
    "its end is zeros": lambda path, whole, rng: path.write_bytes(whole[:5000] + bytes(len(whole) - 5000)),
    "it is empty": lambda path, whole, rng: path.write_bytes(b""),
    "it is another one": swapped,
    "it is of another version": lambda path, whole, rng: path.write_bytes(
        whole.replace(b"start_llm 1", b"start_llm 9")
    ),
    "it is a link": lambda path, whole, rng: (path.unlink(), path.symlink_to("/etc/passwd")),
}


REASONS = {
    "a bit is flipped": {"checksum", "header", "format", "truncated"},
    "it is cut": {"truncated", "header"},
    "its end is zeros": {"checksum"},
    "it is empty": {"header"},
    "it is another one": {"key"},
    "it is of another version": {"format"},
    "it is a link": {"unreadable"},
}


@pytest.mark.thorough
@pytest.mark.product
@pytest.mark.parametrize("damage", HURTS)
def test_a_damaged_file_is_a_miss_and_goes(resources, stored: Path, expected: list[int], damage: str):
    rng = random.Random(damage)
    before = {path: path.read_bytes() for path in files(stored)}
    met: list[Path] = []
    for path, whole in before.items():
        HURTS[damage](path, whole, rng)
        with on_disk(resources, stored) as engine:
            watched = engine.say(PROMPT, 6, boundaries=ENDS)
            assert watched.tokens == expected
            assert sum(engine.disk.rejected.values()) <= 1
            assert engine.disk.rejected.keys() <= REASONS[damage]
            if engine.disk.rejected:
                met.append(path)
                assert not path.exists()
        for other, content in before.items():
            if other != path:
                assert other.read_bytes() == content, "nothing else is lost"
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert len(met) >= 300 // PAGE


@pytest.mark.thorough
def test_a_damaged_page_costs_what_is_after_it(plain: EngineResources, tmp_path: Path):
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        third = engine.cache._store.seq_caches[0].path[2].key.hex()
    (path,) = (path for path in files(tmp_path) if path.stem.endswith(third))
    path.write_bytes(path.read_bytes()[:-1])
    with on_disk(plain, tmp_path) as engine:
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 2 * PAGE
        assert engine.disk.rejected == {"truncated": 1}
    with on_disk(plain, tmp_path) as engine:
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 299, "it was written again"


@pytest.mark.parametrize("kind", ["pages", "states"])
@pytest.mark.sample(4)
def test_what_vanished_is_a_miss(resources, stored: Path, expected: list[int], kind: str):
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        for path in (stored / kind).rglob("*.safetensors"):
            path.unlink()
        assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected


@pytest.mark.sample(2)
def test_another_tenant_and_another_model_find_nothing(resources, stored: Path):
    with on_disk(resources, stored) as engine:
        asked = replace(engine_request(PROMPT, 6, boundaries=ENDS), salt=b"another")
        other = engine.submit(asked)
        engine.finish(other)
        assert cached(other) == 0
        engine.cache._lookup.identity = b"another"
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 0
        assert not engine.disk.rejected


# ------------------------------------------------------------------------------------------------ what, when


def test_nothing_is_written_before_it_is_used_twice_or_for_a_while(plain: EngineResources, tmp_path: Path):
    now = [1000.0]
    with on_disk(plain, tmp_path) as engine:
        write_back = engine.cache.disk.write_back
        assert write_back
        write_back._clock = engine.cache._clock = engine.cache.opener.clock = lambda: now[0]
        engine.say(PROMPT, 6, boundaries=ENDS)
        settled(lambda: engine.tier.worker.scanned.is_over)
        now[0] += 29
        assert not written(engine, 1)
        engine.say((*PROMPT[:150], 7, 7), 2)
        settled(lambda: written(engine, 4))
        now[0] += 0.9
        assert not written(engine, 5)
        assert engine.disk.written_files == 4, "the pages that both have"
        now[0] += 30
        settled(lambda: written(engine, 11))
        now[0] += 1000
        assert not written(engine, 12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_over", [False, True], ids=["its client left", "it met a stop sequence"])
def test_what_ended_early_goes_on_after_a_restart(
    resources: EngineResources, tmp_path: Path, expected: list[int], is_over: bool
):
    with on_disk(resources, tmp_path) as engine:
        watched = engine.submit(engine_request(PROMPT, 50, boundaries=ENDS))
        engine.step_until(lambda: watched.look() and len(watched.tokens) > 3)
        watched.generation.cancel(is_over=is_over)
        engine.step()
    with on_disk(resources, tmp_path) as engine:
        again = engine.say(PROMPT, 6, boundaries=ENDS)
        assert again.tokens == expected
        assert cached(again) >= 296


@pytest.mark.thorough
def test_a_prompt_that_was_given_up_in_the_middle_goes_on_from_there(
    resources: EngineResources, tmp_path: Path, expected: list[int]
):
    with on_disk(resources, tmp_path) as engine:
        watched = engine.submit(engine_request(PROMPT, 50))
        engine.step_until(lambda: engine.metrics.prefill and engine.metrics.prefill[0] >= 128)
        done = engine.metrics.prefill[0] if engine.metrics.prefill else 0
        watched.generation.cancel()
        engine.step()
    assert done < 299
    with on_disk(resources, tmp_path) as engine:
        again = engine.say(PROMPT, 6)
        assert again.tokens == expected
        assert cached(again) == done


@pytest.mark.sample(2)
@pytest.mark.parametrize("steps", [3, 12], ids=["in a prompt", "in a reply"])
def test_what_the_end_of_the_server_cuts_goes_on_after_a_restart(
    resources: EngineResources, tmp_path: Path, expected: list[int], steps: int
):
    with on_disk(resources, tmp_path) as engine:
        watched = engine.submit(engine_request(PROMPT, 50, boundaries=ENDS))
        engine.step(steps)
        engine.inbox.put(StopRequest(flush_s=20))
        with mx.stream(generation_stream):
            engine.loop.step()
            engine.loop.finish()
        assert watched.look()
        assert watched.ending == Failed(STOPPING)
        engine.kill()
        known = engine.cached.computed_tokens
    with on_disk(resources, tmp_path) as engine:
        again = engine.say(PROMPT, 6, boundaries=ENDS)
        assert again.tokens == expected
        assert cached(again) >= min(known, ENDS[-1]) > 100


def test_of_a_failed_sequence_nothing_is_written(plain: EngineResources, tmp_path: Path):
    def breaks(shape: tuple[int, ...]) -> None:
        if shape[1] == 1:
            raise ValueError("broken on purpose")

    from tests.engine.harness import Wrapped

    with on_disk(plain, tmp_path, network=Wrapped(plain.network, breaks)) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        engine.cache.disk.flush(5)
    assert not files(tmp_path)


def test_a_shorter_page_goes_with_the_longer_one(plain: EngineResources, tmp_path: Path):
    """The end of a conversation is written once it is idle, and is worth nothing when there is more."""
    with on_disk(plain, tmp_path) as engine:
        watched = engine.say(PROMPT, 6, boundaries=ENDS)
    first = files(tmp_path)
    with on_disk(plain, tmp_path) as engine:
        engine.say((*PROMPT, *watched.tokens, *range(100)), 6)
    second = files(tmp_path)
    assert len(set(first) - set(second)) == 1
    assert len(second) == len(first) - 1 + (300 + 6 + 100 + 6 - 1) // PAGE + 1 - (300 + 6 - 1) // PAGE


@pytest.mark.long
def test_a_conversation_keeps_a_few_states(tiny_model: TinyModel, tmp_path: Path):
    resources, prompt = resources_of(tiny_model, "qwen3_5"), PROMPT
    with on_disk(resources, tmp_path) as engine:
        for turn in range(10):
            watched = engine.say(prompt, 6, boundaries=(100, len(prompt) - 4))
            engine.cache.disk.flush(10)
            settled(lambda: not engine.disk.queue)
            prompt = (*prompt, *watched.tokens, *tokens(random.Random(turn), 20, 20))
            assert len(list((tmp_path / "states").rglob("*.safetensors"))) <= 8
    with on_disk(resources, tmp_path) as engine:
        assert cached(engine.say((*PROMPT[:100], 5, 5, 5), 4, boundaries=(100,))) == 100, (
            "the first one stays"
        )
        assert cached(engine.say(prompt, 4)) == len(prompt) - 20


@pytest.mark.long
def test_states_of_conversations_that_diverge_within_a_page_stay(tiny_model: TinyModel, tmp_path: Path):
    resources = resources_of(tiny_model, "qwen3_5")
    prompts = [(*PROMPT[:100], number, *range(15)) for number in range(12)]
    with on_disk(resources, tmp_path) as engine:
        replies = [engine.say(prompt, 6, boundaries=(100, 114)).tokens for prompt in prompts]
    with on_disk(resources, tmp_path) as engine:
        for prompt, reply in zip(prompts, replies, strict=True):
            assert cached(engine.say((*prompt, *reply, 7), 2)) == 116 + 6


@pytest.mark.long
def test_a_conversation_keeps_a_few_states_over_restarts(tiny_model: TinyModel, tmp_path: Path):
    """Those that an earlier process wrote count too, although nobody has read them since."""
    resources, prompt = resources_of(tiny_model, "qwen3_5"), PROMPT
    for turn in range(12):
        with on_disk(resources, tmp_path) as engine:
            watched = engine.say(prompt, 6, boundaries=(100, len(prompt) - 4))
            assert turn == 0 or cached(watched) == len(prompt) - 20
        prompt = (*prompt, *watched.tokens, *tokens(random.Random(turn), 20, 20))
        assert len(list((tmp_path / "states").rglob("*.safetensors"))) <= 6
    with on_disk(resources, tmp_path) as engine:
        branch = engine.say((*PROMPT[:100], 5, 5, 5), 4, boundaries=(100,))
        assert cached(branch) == 100, "the first one stays"


@pytest.mark.parametrize("limits", [{"max_conversations": 1}, {"cache_ttl_s": 1.0}], ids=["count", "age"])
def test_what_its_age_or_their_number_evicts_is_handed_over(
    plain: EngineResources, tmp_path: Path, limits: dict[str, float]
):
    with on_disk(plain, tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 6, boundaries=ENDS)
        (seq_cache,) = engine.cache._store.seq_caches
        keys = {page.key.hex() for page in seq_cache.path[:MOST_IN_FLIGHT]}
        seq_cache.last_used -= 10
        for page in seq_cache.path:
            page.last_used -= 10
        evictor = engine.cache._evictor
        evictor.limits = replace(evictor.limits, **limits)
        engine.say((1, 2, 3), 2)
        settled(lambda: not engine.disk.queue)
        assert {path.stem[-32:] for path in files(tmp_path)} >= keys, "its beginning, as far as there is room"
        assert len(files(tmp_path)) + engine.disk.lost == 305 // PAGE + 1
        evictor.limits = replace(evictor.limits, max_conversations=None, cache_ttl_s=0)


def test_beginnings_stay_longer_than_ends_although_they_were_written_first(
    plain: EngineResources, tmp_path: Path
):
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        (seq_cache,) = engine.cache._store.seq_caches
        keys = [page.key for page in seq_cache.path]
        engine.cache.disk.flush(10)
        settled(lambda: not engine.disk.queue)
        oldest = [file.key for file in engine.tier.index.oldest_first()]
    assert oldest[1:] == keys[::-1]


@pytest.mark.thorough
def test_a_conversation_whose_client_came_back_is_written(plain: EngineResources, tmp_path: Path):
    with on_disk(plain, tmp_path) as engine:
        watched = engine.submit(engine_request(PROMPT, 50, boundaries=ENDS))
        engine.step_until(lambda: watched.look() and len(watched.tokens) > 3)
        watched.generation.cancel()
        engine.step()
        again = engine.say(PROMPT, 20, boundaries=ENDS)
    with on_disk(plain, tmp_path) as engine:
        assert cached(engine.say((*PROMPT, *again.tokens, 7), 2)) == 320


def test_many_beginnings_that_were_not_read_yet_hide_nothing(plain: EngineResources, tmp_path: Path):
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        (root,) = engine.cache._store.tree._roots.values()
    for number in range(300):
        key = number.to_bytes(16)
        path = CachedFile("pages", key, root.key, 0, 0).path(tmp_path)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"not read yet")
    with on_disk(plain, tmp_path) as engine:
        assert cached(engine.say((*PROMPT, 1, 2), 2)) >= 300


def test_reads_end_however_many_there_are_at_once(plain: EngineResources, tmp_path: Path):
    """The engine begins some while the disk thread ends others."""
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    with on_disk(plain, tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        file = engine.tier.index.oldest_first()[0]
        parts = [FilePart(file, file.parent, (), (), list)]
        reads = [DiskRead(parts=parts * 3) for _ in range(300)]
        for read in reads:
            engine.tier.read(read)
        settled(lambda: all(read.is_over for read in reads))
        assert not engine.tier.traffic.being_read


@pytest.mark.thorough
def test_a_tier_that_fails_leaves_the_prompt_to_be_computed(
    plain: EngineResources, stored: Path, monkeypatch
):
    with on_disk(plain, stored) as engine:
        monkeypatch.setattr(engine.cache.disk, "wait_for", lambda *_, **__: 1 // 0)
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 0
        assert engine.metrics.failures == 1


@pytest.mark.thorough
def test_what_is_on_the_disk_is_evicted_first_and_what_is_not_is_saved(
    plain: EngineResources, tmp_path: Path
):
    room = memory_for(plain, 700)
    with on_disk(plain, tmp_path, budget=room) as engine:
        prompts = [tokens(random.Random(seed), 300, 300) for seed in range(6)]
        for prompt in prompts:
            engine.say(prompt, 4, boundaries=ENDS)
            settled(lambda: not engine.disk.queue)
        assert engine.cached.evictions
        assert engine.disk.written_files, "what was evicted was handed over"
        engine.cache.disk.flush(5)
        settled(lambda: not engine.disk.queue)
        on_the_disk = {path.stem[-32:] for path in files(tmp_path)}
        left = {page.key.hex() for page in engine.cache._store.tree.pages()}
        assert left <= on_the_disk
        lost = engine.disk.lost
        engine.say(tokens(random.Random(9), 300, 300), 4)
        assert engine.disk.lost == lost


@pytest.mark.thorough
def test_at_most_three_files_wait_for_the_disk(plain: EngineResources, tmp_path: Path, monkeypatch):
    real = os.writev

    def slow(*arguments) -> int:
        time.sleep(0.02)
        return real(*arguments)

    monkeypatch.setattr(os, "writev", slow)
    with on_disk(plain, tmp_path, idle_s=0) as engine:
        for start in range(3):
            engine.say((start, *PROMPT), 4)
        queues = [engine.disk.queue]
        end = time.monotonic() + 10
        while not written(engine, 27) and time.monotonic() < end:
            queues.append(engine.disk.queue)
        assert engine.disk.written_files >= 27
        assert max(queues) == MOST_IN_FLIGHT


@pytest.mark.thorough
def test_the_limit_of_a_day_holds_over_restarts(plain: EngineResources, tmp_path: Path):
    limits = DiskLimits(max_size=10**9, max_write_per_day=100_000)
    for start in range(4):
        with on_disk(plain, tmp_path, limits=limits) as engine:
            engine.say((start, *PROMPT), 4)
            engine.cache.disk.flush(20)
            settled(lambda: not engine.disk.queue)
            assert (engine.disk.state, engine.reported) == ("paused", [ENOUGH_WRITTEN])
            assert engine.disk.written_today_bytes >= 100_000
            engine.reported.clear()
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert 100_000 <= size < 100_000 + MOST_IN_FLIGHT * 80_000
    (tmp_path / WRITTEN).write_text('{"day": "2001-01-01", "bytes": 100000000000000000000}')
    with on_disk(plain, tmp_path, limits=limits) as engine:
        engine.say((9, *PROMPT), 4)
        engine.cache.disk.flush(20)
        settled(lambda: not engine.disk.queue)
        assert engine.reported == [ENOUGH_WRITTEN]
        engine.reported.clear()
    assert sum(path.stat().st_size for path in files(tmp_path)) > size


# -------------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize(
    ("call", "code"),
    [("writev", errno.ENOSPC), ("writev", errno.EIO), ("open", errno.EROFS), ("statvfs", errno.EIO)],
)
@pytest.mark.sample(4)
def test_a_disk_that_cannot_be_written_stops_no_reply(
    plain: EngineResources, tmp_path: Path, monkeypatch, call: str, code: int
):
    real, is_broken = getattr(os, call), [True]

    def failing(*arguments, **more):
        is_write = call != "open" or (
            len(arguments) > 1 and arguments[1] & os.O_CREAT and "pages" in str(arguments[0])
        )
        if is_broken[0] and is_write:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **more)

    expected = list(reference(Stepper(plain), PROMPT, 6).ids)
    limits = DiskLimits(max_size=10**9, pause_s=0.2)
    engine = OnDisk(plain, tmp_path, limits=limits, idle_s=0)
    settled(lambda: engine.tier.worker.scanned.is_over)
    monkeypatch.setattr(os, call, failing)
    assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected
    written(engine, 1)
    settled(lambda: engine.disk.state == "paused")
    assert engine.say((1, 2, 3), 6).tokens
    assert not files(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    is_broken[0] = False
    settled(lambda: written(engine, 300 // PAGE))
    assert engine.disk.state == "on"
    assert [line.partition(":")[0] for line in engine.reported] == [
        "The disk tier of the prompt cache pauses",
        "The disk tier of the prompt cache goes on.",
    ]
    engine.reported.clear()
    engine.stop()


def check_that_a_full_disk_is_reported_once(engine: OnDisk, make_room: Callable[[], object]) -> None:
    """Two prompts are answered while it is full; then there is room."""
    for start in range(2):
        assert engine.say((start, *PROMPT), 4).tokens
        settled(lambda: engine.cache.disk.write_due(is_busy=False) or engine.disk.state == "paused")
    (line,) = engine.reported
    assert line.startswith("The disk tier of the prompt cache pauses: there is no room for ")
    assert engine.disk.lost > 0
    assert not engine.disk.written_files
    make_room()
    settled(lambda: written(engine, 2 * 300 // PAGE))
    assert engine.disk.state == "on"
    assert engine.reported[1:] == ["The disk tier of the prompt cache goes on."]
    engine.reported.clear()


@pytest.mark.thorough
def test_a_full_disk_is_reported_once_on_a_file_system_of_its_own(plain: EngineResources, tmp_path: Path):
    with small_disk(tmp_path / "disk", 16 * 2**20) as disk:
        engine = OnDisk(plain, disk / "ssd", limits=DiskLimits(max_size=10**9, pause_s=0.2), idle_s=0)
        settled(lambda: engine.tier.worker.scanned.is_over)
        filler = fill(disk)
        check_that_a_full_disk_is_reported_once(engine, filler.unlink)
        engine.stop()


@pytest.mark.parametrize("wanted", [10**9, 0.5, 100])
@pytest.mark.sample(2)
def test_what_finds_no_room_is_reported_once(
    plain: EngineResources, tmp_path: Path, monkeypatch, wanted: float
):
    """The disk is full, or the folder may have less than one file takes."""
    real = os.statvfs

    def full(folder: Path) -> Any:
        disk = real(folder)
        return SimpleNamespace(f_bavail=0, f_frsize=disk.f_frsize)

    engine = OnDisk(plain, tmp_path, limits=DiskLimits(max_size=wanted, pause_s=0.2), idle_s=0)
    settled(lambda: engine.tier.worker.scanned.is_over)
    if wanted != 100:
        monkeypatch.setattr(os, "statvfs", full)

    def make_room() -> None:
        monkeypatch.setattr(os, "statvfs", real)
        engine.tier.folder.limits = DiskLimits(max_size=10**9, pause_s=0.2)

    check_that_a_full_disk_is_reported_once(engine, make_room)
    engine.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_in_the_middle_of_a_file_loses_that_file_alone(
    plain: EngineResources, tmp_path: Path, monkeypatch, code: int
):
    real, left = os.writev, [3]  # calls until the disk is full; the fourth one writes half a file

    def filling(file: int, parts: list[memoryview]) -> int:
        left[0] -= 1
        if left[0] < -1:
            raise OSError(code, os.strerror(code))
        return real(file, [parts[0][: parts[0].nbytes // 2]] if left[0] < 0 else parts)

    engine = OnDisk(plain, tmp_path, limits=DiskLimits(max_size=10**9, pause_s=0.2), idle_s=0)
    settled(lambda: engine.tier.worker.scanned.is_over)
    monkeypatch.setattr(os, "writev", filling)
    expected = engine.say(PROMPT, 6, boundaries=ENDS).tokens
    settled(lambda: written(engine, 3) and engine.disk.state == "paused")
    assert (len(files(tmp_path)), list(tmp_path.rglob("*.tmp"))) == (3, [])
    monkeypatch.setattr(os, "writev", real)
    settled(lambda: written(engine, 300 // PAGE))
    assert engine.disk.state == "on"
    engine.reported.clear()
    engine.stop()
    with on_disk(plain, tmp_path) as engine:
        again = engine.say(PROMPT, 6, boundaries=ENDS)
        assert (again.tokens, cached(again)) == (expected, 299)


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.long
def test_the_quota_holds_for_two_models_that_take_turns(tiny_model: TinyModel, tmp_path: Path, monkeypatch):
    limit, largest, sizes = 2_000_000, 0, list[int]()
    from start_llm.cache.disk import disk_worker

    real = disk_worker.write_file

    def watched(*arguments) -> int:
        nonlocal largest
        largest = max(largest, real(*arguments))
        sizes.append(folder_size(tmp_path))
        return largest

    monkeypatch.setattr(disk_worker, "write_file", watched)
    (tmp_path / "mine.txt").write_bytes(bytes(300_000))
    for turn in range(6):
        resources = resources_of(tiny_model, ["qwen3", "qwen3_5"][turn % 2])
        with on_disk(resources, tmp_path, limits=DiskLimits(max_size=limit)) as engine:
            engine.cache._lookup.identity = bytes([turn % 2])
            settled(lambda: engine.tier.worker.scanned.is_over)
            for start in range(4):
                engine.say((start, turn, *PROMPT), 4)
    assert max(sizes) <= limit + largest
    assert len(sizes) > len(files(tmp_path)) > 5
    assert (tmp_path / "mine.txt").exists(), "what is not ours counts and stays"


@pytest.mark.thorough
def test_the_quota_holds_at_the_start_too(stored: Path, resources):
    size = folder_size(stored)
    with on_disk(resources, stored, limits=DiskLimits(max_size=size // 2)) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        assert 0 < folder_size(stored) <= size // 2
        assert engine.disk.evictions
        assert engine.disk.nbytes == folder_size(stored)


def test_the_ends_of_conversations_go_before_their_beginnings(plain: EngineResources, tmp_path: Path):
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    size = folder_size(tmp_path)
    with on_disk(plain, tmp_path, limits=DiskLimits(max_size=int(size * 0.6))) as engine:
        known = cached(engine.say(PROMPT, 6, boundaries=ENDS))
    assert 0.4 * 300 < known < 0.7 * 300


def test_a_share_is_of_what_is_free_or_ours(plain: EngineResources, tmp_path: Path):
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    for share, fraction in ((0.5, 0.5), (1.0, 0.8), (2**60, 0.8)):
        with on_disk(plain, tmp_path, limits=DiskLimits(max_size=share)) as engine:
            settled(lambda: engine.tier.worker.scanned.is_over)
            assert engine.disk.max_bytes == pytest.approx(fraction * free, rel=0.05)


@pytest.mark.thorough
def test_what_a_killed_server_left_behind_is_cleaned_up(resources, stored: Path, expected: list[int]):
    whole = files(stored)[0]
    left = whole.with_name(f"{whole.name}.tmp")
    left.write_bytes(b"half a page")
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        assert not left.exists()
        assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected


@pytest.mark.thorough
def test_a_second_server_runs_without_the_tier(plain: EngineResources, stored: Path):
    with on_disk(plain, stored):
        second = OnDisk(plain, stored)
        assert second.reported == [
            f"The disk tier of the prompt cache stays off: process {os.getpid()} uses the folder."
        ]
        assert not second.tier.is_on
        assert second.say(PROMPT, 6, boundaries=ENDS).tokens
        second.reported.clear()
        second.stop()
    assert not (stored / LOCK).exists()


def test_a_folder_that_cannot_be_made_leaves_the_tier_off(plain: EngineResources, tmp_path: Path):
    (tmp_path / "file").touch()
    engine = OnDisk(plain, tmp_path / "file" / "folder")
    assert "stays off: the folder cannot be used" in engine.reported.pop()
    assert engine.say(PROMPT, 6, boundaries=ENDS).tokens
    engine.stop()


@pytest.mark.sample(2)
def test_only_its_owner_can_read_the_folder(stored: Path):
    for path in stored.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


# ------------------------------------------------------------------------------------------------ slow disks


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that each read takes; may be changed."""
    seconds, real = [0.0], os.preadv

    def slow(*arguments) -> int:
        time.sleep(seconds[0])
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    return seconds


@pytest.mark.sample(2)
def test_nobody_waits_for_the_disk_who_does_not_read_from_it(resources, stored: Path, expected, slow_reads):
    slow_reads[0] = 0.05
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        slow = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.loop.schedule.restoring)
        quick = engine.submit(engine_request((1, 2, 3), 6))
        engine.finish(quick)
        assert slow.look() is not None
        assert not slow.ending
        assert engine.loop.schedule.restoring
        slow_reads[0] = 0
        engine.finish(slow)
        assert slow.tokens == expected
        (restored,) = (event for event in slow.seen if isinstance(event, Restored))
        assert restored.disk_tokens == restored.tokens > 280
        assert restored.disk_s >= 0.05


class Hanging:
    """A disk whose reads wait until `goes_on` is set, and the engine's clock, which stands still."""

    def __init__(self) -> None:
        self.hangs, self.goes_on = threading.Event(), threading.Event()
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def pass_time(self, engine: OnDisk, seconds: float) -> None:
        self.now += seconds
        engine.note_disk()
        engine.step()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    disk, real = Hanging(), os.preadv

    def waits(*arguments) -> int:
        disk.hangs.set()
        assert disk.goes_on.wait(30)
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", waits)
    yield disk
    disk.goes_on.set()


@pytest.mark.thorough
def test_a_disk_that_hangs_is_waited_for_once_and_not_for_ever(
    resources, stored: Path, expected: list[int], hanging: Hanging
):
    with on_disk(resources, stored, clock=hanging.clock) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        watched = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.restorer._running)
        settled(hanging.hangs.is_set)
        hanging.pass_time(engine, 4.9)
        assert engine.loop.schedule.restoring
        for seconds in (0.5, 1):
            hanging.pass_time(engine, seconds)
        assert not engine.loop.schedule.restoring
        engine.finish(watched)
        assert watched.tokens == expected
        assert cached(watched) == 0
        another = engine.say((*PROMPT[:150], 7, 7), 2, boundaries=(100,))
        assert cached(another) >= 100, "nobody waits again; what was computed is in memory"
        assert engine.disk.late == 1

        hanging.goes_on.set()
        settled(lambda: engine.restorer._running[0].read.is_over)
        engine.say((9, 9, 9), 2)
        assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected
        lines = [engine.reported.pop(0).partition("cache ")[2] for _ in range(2)]
        assert lines == ["does not answer. Prompts are computed meanwhile.", "answers again."]
        engine.cache.shrink(10**9)
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) > 280
        assert (engine.disk.hits > 0, engine.metrics.failures) == (True, 0)


def test_a_header_that_nobody_can_read_is_not_waited_for(
    plain: EngineResources, stored_plain: Path, monkeypatch: pytest.MonkeyPatch
):
    """Headers are read when a prompt first comes by, and are read otherwise than data."""
    go, real, now = threading.Event(), os.pread, [0.0]
    monkeypatch.setattr(os, "pread", lambda *those: go.wait(30) and real(*those))
    with on_disk(plain, stored_plain, clock=lambda: now[0]) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        watched = engine.submit(engine_request(PROMPT[:290], 6))
        engine.step_until(lambda: engine.loop.schedule.restoring)
        now[0] += 6.5
        engine.note_disk()
        engine.step()
        assert not engine.loop.schedule.restoring
        engine.finish(watched)
        assert cached(watched) == 0
        go.set()
        engine.reported.clear()


@pytest.mark.thorough
def test_a_disk_that_is_slower_than_computing_gives_what_it_has_read(
    plain: EngineResources, stored_plain: Path, monkeypatch: pytest.MonkeyPatch
):
    hanging, real = Hanging(), os.preadv

    def slow(*arguments) -> int:
        hanging.now += 1.9
        settled(lambda: hanging.now < 5 or not waiting or waiting[0].read.is_given_up)
        return real(*arguments)

    with on_disk(plain, stored_plain, clock=hanging.clock) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        waiting: list[Any] = []
        expected = list(reference(Stepper(plain), PROMPT, 6).ids)
        monkeypatch.setattr(os, "preadv", slow)
        watched = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.restorer._running)
        waiting += [queued.wait for queued in engine.loop.schedule.restoring]
        engine.finish(watched)
        assert watched.tokens == expected
        assert 0 < cached(watched) < 200
        assert not engine.disk.late


@pytest.mark.thorough
def test_a_writer_that_is_slow_holds_nobody_up(plain: EngineResources, tmp_path: Path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda *those: time.sleep(1.5) or real(*those))
    with on_disk(plain, tmp_path, idle_s=0) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.say(PROMPT, 6, boundaries=ENDS)
        settled(lambda: written(engine, 0) or engine.disk.queue == MOST_IN_FLIGHT)
        began = time.monotonic()
        engine.say((*PROMPT, 5, 5), 6)
        assert time.monotonic() - began < 1.2
        assert engine.disk.queue
        monkeypatch.undo()


@pytest.mark.sample(2)
def test_who_leaves_while_it_waits_harms_nobody(resources, stored: Path, expected, slow_reads):
    slow_reads[0] = 0.05
    with on_disk(resources, stored) as engine:
        gone = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.loop.schedule.restoring)
        gone.generation.cancel()
        engine.step()
        slow_reads[0] = 0
        again = engine.say(PROMPT, 6, boundaries=ENDS)
        assert again.tokens == expected
        assert engine.metrics.failures == 0


@pytest.mark.long
def test_several_that_wait_have_room_reserved(plain: EngineResources, tmp_path: Path, slow_reads):
    prompts = [tokens(random.Random(seed), 300, 300) for seed in range(6)]
    with on_disk(plain, tmp_path) as engine:
        replies = [engine.say(prompt, 4, boundaries=ENDS).tokens for prompt in prompts]
    slow_reads[0] = 0.01
    with on_disk(plain, tmp_path) as engine:
        everyone = [engine.submit(engine_request(prompt, 4, boundaries=ENDS)) for prompt in prompts]
        engine.step_until(lambda: engine.loop.schedule.restoring)
        assert len(engine.loop.schedule.restoring) <= 4
        engine.finish(*everyone)
        assert [watched.tokens for watched in everyone] == replies
        assert all(cached(watched) == 299 for watched in everyone)


@pytest.mark.thorough
def test_a_preempted_reply_is_restored_from_the_disk_too(plain: EngineResources, tmp_path: Path):
    """Its caches were evicted while it waited."""
    with on_disk(plain, tmp_path, idle_s=0, max_sequences=1) as engine:
        watched = engine.submit(engine_request(PROMPT, 8, boundaries=ENDS))
        engine.step_until(lambda: watched.look() and len(watched.tokens) >= 3)
        (sequence,) = engine.loop.executor.running.decoder.sequences
        engine.loop.executor.execute(PreemptRequest(sequence.number, 0), 0)
        engine.cache.disk.flush(5)
        settled(lambda: not engine.disk.queue)
        engine.cache.shrink(10**9)
        assert not engine.cached.stored_bytes
        engine.finish(watched)
        assert watched.tokens == list(reference(Stepper(plain), PROMPT, 8).ids)
        assert engine.disk.restored_tokens > 290


# ------------------------------------------------------------------------------------------------ maintenance


@pytest.mark.sample(2)
def test_a_folder_is_listed_verified_and_cleared(resources, stored: Path):
    (stored / "mine.txt").write_text("mine")
    listing = report(stored)
    assert listing.files["pages"] + listing.files["states"] == len(files(stored))
    assert sum(listing.nbytes.values()) == folder_size(stored)
    assert report(stored, verifies=True).unusable == {}
    damaged = files(stored)[1]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert report(stored, verifies=True).unusable == {damaged: "truncated"}
    lock = Lock(stored / LOCK)
    lock.take()
    with pytest.raises(BlockingIOError):
        clear(stored)
    lock.release()
    assert clear(stored) == len(files(stored)) or not files(stored)
    assert {path.name for path in stored.iterdir()} == {"mine.txt"}
