"""What a key gets that has had as much as it may, in the words of each API."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.key_limits import LIMIT_HEADERS
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.server.client import ask
from tests.serving import Server, serving

HI = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 4},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 16},
}


@pytest.fixture(scope="module")
def limited(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3"), tokens_per_minute=4) as server:
        yield server


@pytest.mark.sample(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_key_learns_what_is_left_and_then_when_to_come_again(limited: Server, path: str, stream: bool):
    key = {"Authorization": f"Bearer {path} {stream}"}
    first, second = (
        ask(limited.port, "POST", path, {**ASKED[path], "stream": stream}, key) for _ in range(2)
    )
    limits = {name: first.headers[name] for name in LIMIT_HEADERS if name in first.headers}
    assert (first.status, [*limits.values()][:2]) == (200, ["4", "4"])
    assert all(name.startswith("anthropic-") for name in limits) == (path == "/v1/messages")
    assert (second.status, second.json["error"]["type"]) == (429, "rate_limit_error")
    assert 15 <= int(second.headers["retry-after"]) <= 3600
    another = ask(limited.port, "POST", path, ASKED[path], {"Authorization": f"Bearer {path} {stream} 2"})
    assert another.status == 200, "others have their own"


def test_keys_that_share_a_cache_have_limits_of_their_own(tiny_model: TinyModel):
    limits = {"tokens_per_minute": 4, "requests_at_once": 8, "isolates_tenants": False}
    with serving(tiny_model("qwen3"), **limits) as server:

        def status(key: str) -> int:
            return ask(server.port, "POST", CHAT, ASKED[CHAT], {"Authorization": f"Bearer {key}"}).status

        assert [status(key) for key in ("first", "first", "second", "second")] == [200, 429, 200, 429]


@pytest.mark.thorough
def test_an_adapter_does_not_evade_the_limits(tiny_model: TinyModel, tmp_path: Path):
    folder = tiny_model("qwen3", hidden=128)
    tiny_adapters.build(folder, tmp_path / "a", 0)
    asked = ASKED[CHAT] | {"adapter": "a"}
    key = {"Authorization": "Bearer adapts"}
    with serving(folder, tokens_per_minute=4, adapter_dir=str(tmp_path)) as server:
        assert ask(server.port, "POST", "/v1/adapters", {"id": "a"}).status == 200
        statuses = [ask(server.port, "POST", CHAT, asked, key).status for _ in range(2)]
    assert statuses == [200, 429]


COMPUTE_NOTHING = {
    "/v1/messages/count_tokens": ASKED["/v1/messages"],
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2, 3]},
}


@pytest.mark.parametrize("path", COMPUTE_NOTHING)
def test_what_computes_nothing_is_not_limited(limited: Server, path: str):
    key = {"Authorization": f"Bearer {path}"}
    chat = [ask(limited.port, "POST", CHAT, ASKED[CHAT], key).status for _ in range(2)]
    answer = ask(limited.port, "POST", path, COMPUTE_NOTHING[path], key)
    assert (chat, answer.status) == ([200, 429], 200)
    assert not {*LIMIT_HEADERS} & {name.lower() for name in answer.headers}
