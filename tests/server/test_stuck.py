"""A step that does not come back is reported to whoever asks for the server's health."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from start_llm.core.limits import TimeLimits
from start_llm.protocols.response_store import ResponseStore
from start_llm.server.model_pages import health
from start_llm.server.served_models import ListedModel
from start_llm.server.status import Status
from start_llm.storage.database import DatabaseMetrics
from start_llm.telemetry.metrics import (
    CacheMetrics,
    DiskMetrics,
    EngineMetrics,
    RequestMetrics,
    TranscriptMetrics,
)
from tests.model_cards import model_card
from tests.server.breakable import OneModel


@pytest.mark.parametrize(
    ("busy_s", "status", "state"), [(None, 200, "ok"), (5, 200, "ok"), (61, 503, "stuck")]
)
def test_health_tells_a_stuck_engine(busy_s: float | None, status: int, state: str):
    engine = EngineMetrics(step_began=None if busy_s is None else time.monotonic() - busy_s)
    code, body = a_status(engine).health()
    assert (code, body["status"]) == (status, state)
    assert ("busy with one step for 61 s" in str(body.get("reason"))) == (status == 503)


@pytest.mark.parametrize(
    ("reason", "state", "expected"),
    [
        ("", "loading", (200, "loading")),
        ("m has been loading for 200 s", "loading", (503, "stuck")),
        ("", "loaded", (200, "ok")),
        ("the engine has been busy with one step for 61 s", "loaded", (503, "stuck")),
    ],
)
def test_health_tells_a_model_that_is_loaded_and_one_whose_load_does_not_end(
    reason: str, state: Any, expected: tuple[int, str]
):
    models: Any = OneModel(cast("Any", SimpleNamespace(status=a_status(EngineMetrics()))))
    models.stuck_reason = lambda: reason
    models.listed = lambda: [ListedModel(id="m", state=state)]
    code, body = health(models)
    assert (code, body["status"], body["model"], body.get("reason", "")) == (*expected, "m", reason)


def a_status(engine: EngineMetrics) -> Status:
    return Status(
        card=model_card(),
        engine=engine,
        cache=CacheMetrics(),
        transcripts=TranscriptMetrics(),
        database=DatabaseMetrics(),
        batch=1,
        requests=RequestMetrics(),
        disk=DiskMetrics(),
        responses=ResponseStore(),
        limits=TimeLimits(chunk_s=0.2, stall_s=60),
        engine_is_alive=lambda: True,
    )
