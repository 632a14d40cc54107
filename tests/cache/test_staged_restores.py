"""Restores whose files are read beside the caches, as for the memory of a CUDA device."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from scripts import tiny_models
from start_llm.cache.buffers import Incoming
from start_llm.cache.disk import disk_restore
from start_llm.cache.disk.disk_reads import DiskRead
from start_llm.cache.disk.page_file import OpenedFile
from start_llm.cache.disk.restore_pace import RestorePace
from start_llm.engine.inbox import StopRequest
from start_llm.engine.resources import EngineResources
from tests.cache.conversations import reference, tokens
from tests.cache.disk import OnDisk, on_disk, resources_of, settled
from tests.cache.test_disk_tier import cached
from tests.engine.harness import Stepper, engine_request

PROMPT = tokens(random.Random(4), 1500, 1500)
PAGES = 1500 // 32


@pytest.fixture(scope="module")
def resources(tmp_path_factory: pytest.TempPathFactory) -> EngineResources:
    def built(family: str, **size: Any) -> Path:
        return tiny_models.build(family, tmp_path_factory.mktemp("model"), **size)

    return resources_of(built, "qwen3")


@pytest.fixture(scope="module")
def expected(resources: EngineResources) -> list[int]:
    return list(reference(Stepper(resources), PROMPT, 5).ids)


@pytest.fixture(scope="module")
def stored(resources: EngineResources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    with on_disk(resources, folder) as engine:
        engine.say(PROMPT, 5)
    return folder


@pytest.fixture
def two_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two files may be read that the engine has not taken."""
    monkeypatch.setattr(disk_restore, "_MOST_AHEAD_BYTES", 1)


@pytest.fixture
def started(resources: EngineResources, stored: Path, two_ahead: None) -> Generator[OnDisk]:
    """An engine on that folder. Nothing is written there: what is on the disk is touched alone."""
    with on_disk(resources, stored, is_in_place=False) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        yield engine


def begun(engine: OnDisk) -> tuple[Any, DiskRead, Incoming]:
    watched = engine.submit(engine_request(PROMPT, 5))
    engine.step_until(lambda: engine.restorer._running)
    (restore,) = engine.restorer._running
    return watched, restore.read, restore.buffers


def test_the_disk_reads_two_files_ahead_and_goes_on_when_the_engine_takes_them(
    started: OnDisk, expected: list[int]
):
    watched, read, buffers = begun(started)
    settled(lambda: read.done == 2)
    assert read._is_paused
    made = [page for page in buffers._pages if page and page.contents]
    assert len(made) == 2, "no memory is taken for files that are not read yet"

    started.finish(watched)
    assert (watched.tokens, cached(watched)) == (expected, len(PROMPT) - 1)
    assert started.disk.hits == 1


def test_buffers_are_used_again(started: OnDisk, expected: list[int], monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    real = Incoming._stage
    sets: set[tuple[int, ...]] = set()

    def staged(incoming: Incoming, page: Any) -> Any:
        targets = real(incoming, page)
        sizes.append(len(page.contents))
        sets.add(tuple(map(id, page.contents)))
        return targets

    monkeypatch.setattr(Incoming, "_stage", staged)
    watched, _, _ = begun(started)
    started.finish(watched)
    assert watched.tokens == expected
    assert len(sizes) == PAGES + 1
    assert len(sets) <= 5, "one for each file that is ahead, one that is copied, one of another size"


def test_other_replies_go_on_between_the_files_of_a_restore(started: OnDisk, expected: list[int]):
    other = started.submit(engine_request((5, 6, 7), 40))
    started.step_until(lambda: len(other.tokens) > 1)
    before = len(other.tokens)
    watched, _, _ = begun(started)
    started.finish(watched, other)
    assert watched.tokens == expected
    assert len(other.tokens) == 40 > before


def test_a_copy_that_fails_costs_the_restore_alone(
    started: OnDisk, expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    real, copied = Incoming._copy_page, []

    def fails_once(incoming: Incoming, page: Any) -> None:
        copied.append(page)
        if len(copied) == 2:
            raise RuntimeError("out of memory")
        real(incoming, page)

    monkeypatch.setattr(Incoming, "_copy_page", fails_once)
    watched, read, _ = begun(started)
    started.finish(watched)
    assert watched.tokens == expected
    assert started.metrics.failures == 1
    settled(lambda: read.is_over)
    assert read.done < PAGES, "nobody reads on"
    started.restorer.collect()
    assert (read.parts, started.restorer._running) == ([], []), "its memory is let go of on this thread"


def test_a_request_that_leaves_while_reading_pauses_ends_the_read(started: OnDisk):
    watched, read, _ = begun(started)
    settled(lambda: read.done == 2)
    watched.generation.cancel()
    started.step_until(lambda: read.is_over and not started.restorer._running)
    assert started.say(PROMPT, 5).tokens


def test_a_model_that_stops_as_its_window_fills_does_not_wait_for_what_nobody_reads(
    started: OnDisk, monkeypatch: pytest.MonkeyPatch
):
    begins, hangs, go, real = threading.Event(), threading.Event(), threading.Event(), os.preadv

    def slow(*those: Any) -> int:
        assert begins.wait(30)
        if read.done == 1:
            hangs.set()
            assert go.wait(30)
        return real(*those)

    monkeypatch.setattr(os, "preadv", slow)
    _, read, _ = begun(started)
    begins.set()
    assert hangs.wait(10)
    wait_until = started.tier.traffic.wait_until
    monkeypatch.setattr(started.tier.traffic, "wait_until", lambda *those: (go.set(), wait_until(*those)))
    began = time.monotonic()
    with mx.stream(generation_stream):
        started.restorer.finish(3)
    assert read.is_over
    assert time.monotonic() - began < 2


def test_a_loop_that_failed_leaves_no_read_behind(started: OnDisk):
    """Nor one that pauses in this moment, whose news comes too late."""
    watched, read, _ = begun(started)
    settled(lambda: read._is_paused and not started.inbox.is_empty)
    started.inbox.take_all()
    started.loop.fail_the_rest()
    assert watched.look()
    settled(lambda: read.is_over, 2)
    assert not started.tier.traffic.being_read


@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
def test_a_model_that_stops_while_it_reads_lets_go_of_the_buffers_itself(
    resources: EngineResources, stored: Path, two_ahead: None, is_in_place: bool, monkeypatch: Any
):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *those: time.sleep(0.02) or real(*those))
    with on_disk(resources, stored, is_in_place=is_in_place) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        watched, read, _ = begun(engine)
        engine.inbox.put(StopRequest(flush_s=20))
        with mx.stream(generation_stream):
            engine.loop.step()
            engine.loop.finish()
        assert watched.look()
        assert read.done < PAGES
        assert (read.parts, engine.restorer._running) == ([], [])


# -------------------------------------------------------------------------------------------- when to restore


@pytest.mark.thorough
def test_what_is_computed_faster_than_restored_is_computed(
    resources: EngineResources, stored: Path, expected: list[int]
):
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.restorer._pace.note(2**30, 2.0**30)  # a byte a second
        assert engine.say(PROMPT, 5).tokens == expected
        assert (engine.disk.computed_instead, engine.disk.hits) == (1, 0)


@pytest.mark.thorough
def test_files_that_were_not_read_because_computing_is_faster_are_not_read_behind(
    resources: EngineResources, stored: Path, monkeypatch: pytest.MonkeyPatch
):
    verified: list[OpenedFile] = []
    monkeypatch.setattr(OpenedFile, "verify", verified.append)
    with on_disk(resources, stored) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        engine.restorer._pace.note(2**30, 2.0**30)
        engine.say(PROMPT, 5)
        assert engine.disk.computed_instead == 1
    assert len(verified) <= 1, "the end of the reply, which no prompt asked for"


def test_the_fastest_of_the_last_restores_counts():
    pace = RestorePace()
    assert not pace.is_slower(2**40, 0.001), "nothing is known"
    pace.note(2**20, 100.0)
    assert not pace.is_slower(2**40, 0.001), "too little was read"
    pace.note(2**30, 1.0)
    pace.note(2**30, 100.0)
    assert not pace.is_slower(2**27, 0), "nobody would notice"
    assert not pace.is_slower(2**30, 0.6), "a little slower is as good"
    assert pace.is_slower(2**30, 0.4)
    for _ in range(8):
        pace.note(2**30, 100.0)
    assert pace.is_slower(2**30, 60.0), "what is long ago does not count"


def test_a_rate_is_forgotten_so_that_one_slow_restore_ends_no_others():
    now = [0.0]
    pace = RestorePace(lambda: now[0])
    pace.note(2**30, 2.0**30)
    now[0] += 599
    assert pace.is_slower(2**30, 60.0)
    now[0] += 2
    assert not pace.is_slower(2**30, 60.0), "is tried again"


@pytest.mark.thorough
@pytest.mark.parametrize("is_in_place", [True, False], ids=["in place", "staged"])
def test_an_engine_that_was_busy_makes_no_restore_slow(
    resources: EngineResources, stored: Path, is_in_place: bool, monkeypatch: pytest.MonkeyPatch
):
    """Only reading and copying count, not the wait for a step of the engine."""
    noted: list[float] = []
    with on_disk(resources, stored, is_in_place=is_in_place) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        monkeypatch.setattr(engine.restorer._pace, "note", lambda _, seconds: noted.append(seconds))
        watched, read, _ = begun(engine)
        settled(lambda: read.is_over)
        time.sleep(1)
        engine.finish(watched)
        assert engine.disk.restored_s > 1
        (seconds,) = noted
        assert 0 < seconds < 1


def test_reading_pauses_until_enough_is_taken():
    part: Any = object()
    read = DiskRead(parts=[part] * 9, most_ahead=2)
    assert not read.pauses()
    read.done = 2
    assert read.pauses()
    assert read.take(1), "has to go on"
    assert not read.take(1), "goes on already"
    read.done = 4
    assert read.pauses()
    read.is_given_up = True
    assert not read.pauses(), "nobody takes anything any more"
    assert not DiskRead(parts=[part] * 9, done=9).pauses()
