"""The disk tier: what is written when, hurt files, full and slow disks, and who may use a folder."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from start_llm.cache.disk_index import LOCK, WRITTEN, CachedFile
from start_llm.cache.disk_maintenance import clear, report
from start_llm.cache.disk_tier import MOST_IN_FLIGHT, DiskLimits, DiskRead, FilePart
from start_llm.core.events import Finished, Restored
from start_llm.core.private_files import Lock
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import PAGE, memory_for, reference, tokens
from tests.cache.disk import OnDisk, on_disk, resources_of, settled
from tests.conftest import TinyModel
from tests.engine.harness import Stepper, Watched, engine_request

PROMPT = tokens(random.Random(3), 300, 300)
ENDS = (100, 296)


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
    """Whether so many files have been written; the engine is called as its loop calls it."""
    engine.cache.write_to_disk(is_busy=False)
    engine.cache.collect_from_disk()
    return engine.disk.written_files >= count and not engine.disk.queue


@pytest.fixture
def stored(resources: EngineResources, tmp_path: Path) -> Path:
    """A folder with a conversation."""
    with on_disk(resources, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
    return tmp_path


# ------------------------------------------------------------------------------------------------- hurt files


def flipped(path: Path, whole: bytes, rng: random.Random) -> None:
    place = rng.randrange(len(whole))
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << rng.randrange(8)]) + whole[place + 1 :])


def swapped(path: Path, whole: bytes, rng: random.Random) -> None:
    other = rng.choice([one for one in files(path.parents[2]) if one != path])
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


@pytest.mark.parametrize("hurt", HURTS)
def test_a_hurt_file_is_a_miss_and_goes(resources, stored: Path, expected: list[int], hurt: str):
    rng = random.Random(hurt)
    before = {path: path.read_bytes() for path in files(stored)}
    met: list[Path] = []
    for path, whole in before.items():
        HURTS[hurt](path, whole, rng)
        with on_disk(resources, stored) as engine:
            watched = engine.say(PROMPT, 6, boundaries=ENDS)
            assert watched.tokens == expected
            assert sum(engine.disk.rejected.values()) <= 1
            if engine.disk.rejected:
                met.append(path)
                assert not path.exists()
        for other, content in before.items():
            if other != path:
                assert other.read_bytes() == content, "nothing else is lost"
        path.unlink(missing_ok=True)
        path.write_bytes(whole)
    assert len(met) >= 300 // PAGE


def test_a_hurt_page_costs_what_is_after_it(plain: EngineResources, tmp_path: Path):
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
def test_what_vanished_is_a_miss(resources, stored: Path, expected: list[int], kind: str):
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.scanned.is_over)
        for path in (stored / kind).rglob("*.safetensors"):
            path.unlink()
        assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected


def test_another_tenant_and_another_model_find_nothing(resources, stored: Path):
    with on_disk(resources, stored) as engine:
        asked = replace(engine_request(PROMPT, 6, boundaries=ENDS), salt=b"another")
        other = engine.submit(asked)
        engine.finish(other)
        assert cached(other) == 0
        engine.cache.identity = b"another"
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 0
        assert not engine.disk.rejected


# ------------------------------------------------------------------------------------------------ what, when


def test_nothing_is_written_before_it_is_used_twice_or_for_a_while(plain: EngineResources, tmp_path: Path):
    now = [1000.0]
    with on_disk(plain, tmp_path) as engine:
        write_back = engine.cache._write_back
        assert write_back
        write_back._clock = engine.cache._clock = lambda: now[0]
        engine.say(PROMPT, 6, boundaries=ENDS)
        settled(lambda: engine.tier.scanned.is_over)
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


@pytest.mark.parametrize("is_over", [False, True], ids=["its client left", "it met a stop sequence"])
def test_what_was_given_up_is_written_if_another_uses_it(
    plain: EngineResources, tmp_path: Path, is_over: bool
):
    with on_disk(plain, tmp_path, idle_s=0) as engine:
        watched = engine.submit(engine_request(PROMPT, 50, boundaries=ENDS))
        engine.step_until(lambda: watched.look() and len(watched.tokens) > 3)
        watched.generation.cancel(is_over=is_over)
        engine.step()
        engine.cache.flush_to_disk(5)
        settled(lambda: not engine.disk.queue)
        assert (engine.disk.written_files > 0) == is_over
        engine.say(PROMPT, 6, boundaries=ENDS)
        engine.cache.flush_to_disk(5)
        settled(lambda: engine.disk.written_files >= 300 // PAGE)


def test_of_a_failed_sequence_nothing_is_written(plain: EngineResources, tmp_path: Path):
    def breaks(shape: tuple[int, ...]) -> None:
        if shape[1] == 1:
            raise ValueError("broken on purpose")

    from tests.engine.harness import Wrapped

    with on_disk(plain, tmp_path, network=Wrapped(plain.network, breaks)) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        engine.cache.flush_to_disk(5)
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


def test_a_conversation_keeps_a_few_states(tiny_model: TinyModel, tmp_path: Path):
    resources, prompt = resources_of(tiny_model, "qwen3_5"), PROMPT
    with on_disk(resources, tmp_path) as engine:
        for turn in range(10):
            watched = engine.say(prompt, 6, boundaries=(100, len(prompt) - 4))
            engine.cache.flush_to_disk(10)
            settled(lambda: not engine.disk.queue)
            prompt = (*prompt, *watched.tokens, *tokens(random.Random(turn), 20, 20))
            assert len(list((tmp_path / "states").rglob("*.safetensors"))) <= 8
    with on_disk(resources, tmp_path) as engine:
        assert cached(engine.say((*PROMPT[:100], 5, 5, 5), 4, boundaries=(100,))) == 100, (
            "the first one stays"
        )
        assert cached(engine.say(prompt, 4)) == len(prompt) - 20


def test_states_of_conversations_that_diverge_within_a_page_stay(tiny_model: TinyModel, tmp_path: Path):
    resources = resources_of(tiny_model, "qwen3_5")
    prompts = [(*PROMPT[:100], number, *range(15)) for number in range(12)]
    with on_disk(resources, tmp_path) as engine:
        said = [engine.say(prompt, 6, boundaries=(100, 114)).tokens for prompt in prompts]
    with on_disk(resources, tmp_path) as engine:
        for prompt, reply in zip(prompts, said, strict=True):
            assert cached(engine.say((*prompt, *reply, 7), 2)) == 116 + 6


def test_beginnings_stay_longer_than_ends_although_they_were_written_first(
    plain: EngineResources, tmp_path: Path
):
    with on_disk(plain, tmp_path) as engine:
        engine.say(PROMPT, 6, boundaries=ENDS)
        (seq_cache,) = engine.cache._store.seq_caches
        keys = [page.key for page in seq_cache.path]
        engine.cache.flush_to_disk(10)
        settled(lambda: not engine.disk.queue)
        oldest = [file.key for file in engine.tier.index.oldest_first()]
    assert oldest[1:] == keys[::-1]


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
        (root,) = engine.cache._store.tree.roots()
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
        settled(lambda: engine.tier.scanned.is_over)
        file = engine.tier.index.oldest_first()[0]
        parts = [FilePart(file, file.parent, (), (), [])]
        reads = [DiskRead(parts=parts * 3) for _ in range(300)]
        for read in reads:
            engine.tier.read(read)
        settled(lambda: all(read.is_over for read in reads))
        assert not engine.tier._being_read


def test_a_tier_that_fails_leaves_the_prompt_to_be_computed(
    plain: EngineResources, stored: Path, monkeypatch
):
    with on_disk(plain, stored) as engine:
        monkeypatch.setattr(engine.cache, "wait_for_disk", lambda *_, **__: 1 // 0)
        assert cached(engine.say(PROMPT, 6, boundaries=ENDS)) == 0
        assert engine.metrics.failures == 1


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
        engine.cache.flush_to_disk(5)
        settled(lambda: not engine.disk.queue)
        on_the_disk = {path.stem[-32:] for path in files(tmp_path)}
        left = {page.key.hex() for page in engine.cache._store.tree.pages()}
        assert left <= on_the_disk
        lost = engine.disk.lost
        engine.say(tokens(random.Random(9), 300, 300), 4)
        assert engine.disk.lost == lost


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


def test_the_limit_of_a_day_holds_over_restarts(plain: EngineResources, tmp_path: Path):
    limits = DiskLimits(max_size=10**9, max_write_per_day=100_000)
    for start in range(4):
        with on_disk(plain, tmp_path, limits=limits) as engine:
            engine.say((start, *PROMPT), 4)
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert 100_000 <= size < 100_000 + MOST_IN_FLIGHT * 80_000
    (tmp_path / WRITTEN).write_text('{"day": "2001-01-01", "bytes": 1e20}')
    with on_disk(plain, tmp_path, limits=limits) as engine:
        engine.say((9, *PROMPT), 4)
    assert sum(path.stat().st_size for path in files(tmp_path)) > size


# -------------------------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize(
    ("call", "code"),
    [("writev", errno.ENOSPC), ("writev", errno.EIO), ("open", errno.EROFS), ("statvfs", errno.EIO)],
)
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
    settled(lambda: engine.tier.scanned.is_over)
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
    assert [line.partition(":")[0] for line in engine.said] == [
        "The disk tier of the prompt cache pauses",
        "The disk tier of the prompt cache goes on.",
    ]
    engine.said.clear()
    engine.stop()


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_quota_holds_for_two_models_that_take_turns(tiny_model: TinyModel, tmp_path: Path, monkeypatch):
    limit, largest, sizes = 2_000_000, 0, list[int]()
    from start_llm.cache import disk_tier

    real = disk_tier.write_file

    def watched(*arguments) -> int:
        nonlocal largest
        largest = max(largest, real(*arguments))
        sizes.append(folder_size(tmp_path))
        return largest

    monkeypatch.setattr(disk_tier, "write_file", watched)
    (tmp_path / "mine.txt").write_bytes(bytes(300_000))
    for turn in range(6):
        resources = resources_of(tiny_model, ["qwen3", "qwen3_5"][turn % 2])
        with on_disk(resources, tmp_path, limits=DiskLimits(max_size=limit)) as engine:
            engine.cache.identity = bytes([turn % 2])
            settled(lambda: engine.tier.scanned.is_over)
            for start in range(4):
                engine.say((start, turn, *PROMPT), 4)
    assert max(sizes) <= limit + largest
    assert len(sizes) > len(files(tmp_path)) > 5
    assert (tmp_path / "mine.txt").exists(), "what is not ours counts and stays"


def test_the_quota_holds_at_the_start_too(stored: Path, resources):
    size = folder_size(stored)
    with on_disk(resources, stored, limits=DiskLimits(max_size=size // 2)) as engine:
        settled(lambda: engine.tier.scanned.is_over)
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
    for share, told in ((0.5, 0.5), (1.0, 0.8), (2**60, 0.8)):
        with on_disk(plain, tmp_path, limits=DiskLimits(max_size=share)) as engine:
            settled(lambda: engine.tier.scanned.is_over)
            assert engine.disk.max_bytes == pytest.approx(told * free, rel=0.05)


def test_what_a_killed_server_left_behind_is_cleaned_up(resources, stored: Path, expected: list[int]):
    left = files(stored)[0].with_name("0" * 32 + "-" + "1" * 32 + ".safetensors.tmp")
    left.write_bytes(b"half a page")
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.scanned.is_over)
        assert not left.exists()
        assert engine.say(PROMPT, 6, boundaries=ENDS).tokens == expected


def test_a_second_server_runs_without_the_tier(plain: EngineResources, stored: Path):
    with on_disk(plain, stored):
        second = OnDisk(plain, stored)
        assert second.said == [
            f"The disk tier of the prompt cache stays off: process {os.getpid()} uses the folder."
        ]
        assert not second.tier.is_on
        assert second.say(PROMPT, 6, boundaries=ENDS).tokens
        second.said.clear()
        second.stop()
    assert not (stored / LOCK).exists()


def test_a_folder_that_cannot_be_made_leaves_the_tier_off(plain: EngineResources, tmp_path: Path):
    (tmp_path / "file").touch()
    engine = OnDisk(plain, tmp_path / "file" / "folder")
    assert "stays off: the folder cannot be used" in engine.said.pop()
    assert engine.say(PROMPT, 6, boundaries=ENDS).tokens
    engine.stop()


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


def test_nobody_waits_for_the_disk_who_does_not_read_from_it(resources, stored: Path, expected, slow_reads):
    slow_reads[0] = 0.05
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.scanned.is_over)
        slow = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.loop._schedule.restoring)
        quick = engine.submit(engine_request((1, 2, 3), 6))
        engine.finish(quick)
        assert slow.look() is not None
        assert not slow.ending
        assert engine.loop._schedule.restoring
        slow_reads[0] = 0
        engine.finish(slow)
        assert slow.tokens == expected
        (restored,) = (event for event in slow.seen if isinstance(event, Restored))
        assert restored.disk_tokens == restored.tokens > 280
        assert restored.disk_s >= 0.05


def test_who_leaves_while_it_waits_harms_nobody(resources, stored: Path, expected, slow_reads):
    slow_reads[0] = 0.05
    with on_disk(resources, stored) as engine:
        gone = engine.submit(engine_request(PROMPT, 6, boundaries=ENDS))
        engine.step_until(lambda: engine.loop._schedule.restoring)
        gone.generation.cancel()
        engine.step()
        slow_reads[0] = 0
        again = engine.say(PROMPT, 6, boundaries=ENDS)
        assert again.tokens == expected
        assert engine.metrics.failures == 0


def test_several_that_wait_have_room_reserved(plain: EngineResources, tmp_path: Path, slow_reads):
    prompts = [tokens(random.Random(seed), 300, 300) for seed in range(6)]
    with on_disk(plain, tmp_path) as engine:
        said = [engine.say(prompt, 4, boundaries=ENDS).tokens for prompt in prompts]
    slow_reads[0] = 0.01
    with on_disk(plain, tmp_path) as engine:
        everyone = [engine.submit(engine_request(prompt, 4, boundaries=ENDS)) for prompt in prompts]
        engine.step_until(lambda: engine.loop._schedule.restoring)
        assert len(engine.loop._schedule.restoring) <= 4
        engine.finish(*everyone)
        assert [watched.tokens for watched in everyone] == said
        assert all(cached(watched) == 299 for watched in everyone)


def test_a_preempted_reply_is_restored_from_the_disk_too(plain: EngineResources, tmp_path: Path):
    """Its caches were evicted while it waited."""
    with on_disk(plain, tmp_path, idle_s=0, max_sequences=1) as engine:
        watched = engine.submit(engine_request(PROMPT, 8, boundaries=ENDS))
        engine.step_until(lambda: watched.look() and len(watched.tokens) >= 3)
        (sequence,) = engine.loop._decoder.sequences
        engine.loop._preempt_decoding(sequence)
        engine.cache.flush_to_disk(5)
        settled(lambda: not engine.disk.queue)
        engine.cache.shrink(10**9)
        assert not engine.cached.stored_bytes
        engine.finish(watched)
        assert watched.tokens == list(reference(Stepper(plain), PROMPT, 8).ids)
        assert engine.disk.restored_tokens > 290


# ------------------------------------------------------------------------------------------------ maintenance


def test_a_folder_is_told_verified_and_cleared(resources, stored: Path):
    (stored / "mine.txt").write_text("mine")
    told = report(stored)
    assert told.files["pages"] + told.files["states"] == len(files(stored))
    assert sum(told.nbytes.values()) == folder_size(stored)
    assert report(stored, verifies=True).hurt == {}
    hurt = files(stored)[1]
    hurt.write_bytes(hurt.read_bytes()[:-1])
    assert report(stored, verifies=True).hurt == {hurt: "truncated"}
    lock = Lock(stored / LOCK)
    lock.take()
    with pytest.raises(BlockingIOError):
        clear(stored)
    lock.release()
    assert clear(stored) == len(files(stored)) or not files(stored)
    assert {path.name for path in stored.iterdir()} == {"mine.txt"}
