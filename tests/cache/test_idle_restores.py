"""What idle work reads from the disk counts as used by nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.core.events import Restored
from tests.cache.disk import on_disk
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
