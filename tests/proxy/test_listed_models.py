"""The proxy's list of models says whether the model sees, whatever LiteLLM says of it."""

import asyncio
import json
from typing import Any

import pytest

from start_llm.proxy.listed_models import ListedModels

LISTED = b'{"object": "list", "data": [{"id": "one", "max_input_tokens": 5}, {"id": "two"}]}'


def asked(
    path: str, *, status: int = 200, body: bytes = LISTED, sees: bool = True, method: str = "GET"
) -> Any:
    async def litellm(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"Content-Length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:9], "more_body": True})
        await send({"type": "http.response.body", "body": body[9:]})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    scope = {"type": "http", "method": method, "path": path}
    asyncio.run(ListedModels(litellm, sees=sees)(scope, receive, send))
    return sent


@pytest.mark.parametrize("sees", [True, False])
@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/"])
def test_each_entry_says_it(path: str, sees: bool):
    start, body = asked(path, sees=sees)
    assert [entry["vision"] for entry in json.loads(body["body"])["data"]] == [sees, sees]
    assert json.loads(body["body"])["data"][0]["max_input_tokens"] == 5
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": str(len(body["body"])).encode(),
    }


def test_an_error_and_other_paths_pass_as_they_are():
    start, body = asked("/v1/models", status=401, body=b'{"error": "no key"}')
    assert (start["status"], body["body"]) == (401, b'{"error": "no key"}')
    for path, method in (("/v1/chat/completions", "POST"), ("/v1/models/one", "GET"), ("/v1/models", "HEAD")):
        assert b"".join(one.get("body", b"") for one in asked(path, method=method)) == LISTED
