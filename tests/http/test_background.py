"""What gives way is reported to the engine, on every endpoint that generates."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.core.engine_request import EngineRequest
from start_llm.engine.engine import Engine
from tests.conftest import TinyModel
from tests.serving import serving

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}
TITLE = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}


@pytest.mark.long
def test_requests_say_whether_anybody_waits_for_them(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch):
    submit, submitted = Engine.submit, list[EngineRequest]()

    def noted(self: Engine, request: EngineRequest) -> Any:
        submitted.append(request)
        return submit(self, request)

    monkeypatch.setattr(Engine, "submit", noted)
    with serving(tiny_model(), idle_work="off") as server:
        for path, body in BODIES.items():
            server.post(path, {"model": "m", **body})
            server.post(path, {"model": "m", **body}, {"x-start-llm-priority": "background"})
        reply = server.post(
            "/v1/chat/completions", {"messages": HELLO, "service_tier": "flex", "max_tokens": 2}
        )
        server.post("/v1/chat/completions", {"messages": [TITLE, *HELLO], "max_tokens": 2})
    assert [item.is_background for item in submitted] == [False, True] * len(BODIES) + [True, True]
    assert reply["service_tier"] == "flex"
