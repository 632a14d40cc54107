"""Sessions with the same words, interleaved at random: `benchmarks stress --only foreign` in short."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.conftest import TinyModel
from tests.foreign.sessions import Sessions, Trace
from tests.serving import Server, serving

REQUESTS = 80


@pytest.fixture(scope="module")
def traced(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Trace]]:
    root = tmp_path_factory.mktemp("traces")
    folder = tiny_model("qwen3", hidden=64, layers=1)
    with serving(folder, thinking=False, traces=True, traces_prompts=True, log_root=str(root)) as server:
        yield server, Trace(root)


@pytest.mark.parametrize("at_once", [2, 3, 8])
@pytest.mark.thorough
def test_no_session_reads_what_another_one_says_and_each_reads_all_that_it_says(
    traced: tuple[Server, Trace], at_once: int
):
    server, trace = traced
    sessions = Sessions((server.port, None), trace.newest, Random(at_once), at_once, first=1000 * at_once)
    sessions.play(REQUESTS)
    assert {"forks", "adopted", "written by clients", "carriers"} <= sessions.counts.keys()
