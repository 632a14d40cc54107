"""What idle work reads from the disk counts as used by nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from start_llm.core.events import Restored
from tests.cache.disk import on_disk, resources_of
from tests.conftest import TinyModel
from tests.engine.harness import engine_request

PROMPT = tuple(int(n) for n in np.random.default_rng(5).integers(3, 400, 700))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_pages_that_idle_work_reads_are_evicted_before_those_that_requests_use(
    tiny_model: TinyModel, tmp_path: Path, family: str
):
    resources = resources_of(tiny_model, family)
    with on_disk(resources, tmp_path) as engine:
        engine.say(PROMPT, 2, (600, 690))
    with on_disk(resources, tmp_path) as engine:
        work = engine.submit(engine_request(PROMPT, 0, boundaries=(600, 690), is_idle_work=True))
        engine.finish(work)
        (restored,) = [event for event in work.seen if isinstance(event, Restored)]
        assert restored.disk_tokens > 500
        assert {page.last_used for page in engine.cache._store.tree.pages()} == {0}
        assert {one.last_used for one in engine.cache._store.seq_caches} == {0}
        assert not engine.tier.index.take_touched()
        again: Any = engine.say((*PROMPT[:690], 5, 6), 2, (600, 690))
        (found,) = [event for event in again.seen if isinstance(event, Restored)]
        assert found.disk_tokens <= 32 and found.tokens >= 690, (
            "a state near the end may be on the disk alone"
        )
        assert 0 not in {page.last_used for page in engine.cache._store.tree.pages()}
