"""What idle work reads from the disk counts as used by nobody."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.core.events import Restored
from tests.cache.desk import Clock, Desk
from tests.cache.disk import on_disk, settled
from tests.engine.harness import engine_request, uncached_resources
from tests.engine.test_guards import Counting

PROMPT = tuple(int(n) for n in np.random.default_rng(5).integers(3, 400, 700))


@pytest.mark.parametrize("has_state", [False, True])
def test_pages_that_idle_work_reads_are_evicted_before_those_that_requests_use(
    tmp_path: Path, has_state: bool
):
    resources = uncached_resources(
        Counting(has_state=has_state), lambda _: b"a", frozenset(), max_sequences=4, batches=not has_state
    )
    with on_disk(resources, tmp_path) as engine:
        engine.say(PROMPT, 2, (600, 690))
    with on_disk(resources, tmp_path) as engine:
        work = engine.submit(engine_request(PROMPT, 0, boundaries=(600, 690), is_idle_work=True))
        engine.finish(work)
        (restored,) = [event for event in work.seen if isinstance(event, Restored)]
        assert restored.disk_tokens > 500
        assert {page.last_used for page in engine.cache._store.tree.pages()} == {0}
        assert {seq_cache.last_used for seq_cache in engine.cache._store.seq_caches} == {0}
        assert not engine.tier.index.take_touched()
        again: Any = engine.say((*PROMPT[:690], 5, 6), 2, (600, 690))
        (reused,) = [event for event in again.seen if isinstance(event, Restored)]
        assert reused.disk_tokens <= 32 and reused.tokens >= 690, (
            "a state near the end may be on the disk alone"
        )
        assert 0 not in {page.last_used for page in engine.cache._store.tree.pages()}


def test_what_is_read_from_the_disk_and_not_opened_yet_is_cut_by_no_other_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    resources = uncached_resources(
        Counting(has_state=False), lambda _: b"a", frozenset(), max_sequences=4, batches=True
    )
    with on_disk(resources, tmp_path) as engine:
        engine.say(PROMPT, 2, (600, 690))
    with on_disk(resources, tmp_path) as engine:
        settled(lambda: engine.tier.worker.scanned.is_over)
        go, real = threading.Event(), os.preadv
        monkeypatch.setattr(os, "preadv", lambda *those: go.wait(10) and real(*those))
        work = engine.submit(engine_request(PROMPT, 0, boundaries=(600, 690), is_idle_work=True))
        engine.step_until(lambda: engine.restorer._running)
        go.set()
        settled(lambda: engine.restorer._running[0].read.is_over)
        other = engine.submit(engine_request((*PROMPT[:70], 1, 2, 3), 2))
        engine.finish(other)
        assert [event.tokens for event in other.seen if isinstance(event, Restored)] == [70]
        assert not any(isinstance(event, Restored) for event in work.seen)
        assert engine.cache.opener.restorable(PROMPT, engine_request(PROMPT, 0).salt) == len(PROMPT) - 1
        read = engine.disk.restored_tokens
        again: Any = engine.say(PROMPT, 2, (600, 690))
        assert [event.tokens for event in again.seen if isinstance(event, Restored)] == [len(PROMPT) - 1]
        assert engine.disk.restored_tokens == read


def computed_ahead(desk: Desk) -> tuple[int, ...]:
    """A prompt that idle work has computed."""
    ids = tuple(range(10, 60))
    opened = desk.cache.opener.open_for_idle_work(ids, b"", (8, 20))
    opened.seq_cache.caches[0].feed(ids[:-1])
    desk.cache.record_chunk(opened.seq_cache, ids[:-1], keep_state=False)
    desk.cache.close(opened.seq_cache, opened.seq_cache.caches, ids[:-1])
    return ids


def test_what_idle_work_has_read_stays_for_the_ttl_and_goes_first_when_memory_is_short():
    clock = Clock()
    clock.now = 100_000.0  # the machine has been up for longer than the TTL
    desk = Desk(cache_ttl_s=3600, clock=clock)
    ids = computed_ahead(desk)
    clock.now += 3600
    desk.cache.shrink()
    assert desk.cache.opener.restorable(ids, b"") == len(ids) - 1
    used = tuple(range(100, 120))
    desk.serve(used)
    desk.limit(budget_bytes=desk.store.usage.nbytes)
    assert desk.cache.opener.restorable(ids, b"") < len(ids) - 1
    assert desk.cache.opener.restorable(used, b"") == len(used) - 1
    clock.now += 1
    desk.cache.shrink()
    assert desk.cache.opener.restorable(ids, b"") == 0
