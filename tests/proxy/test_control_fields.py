"""Nothing that a client writes into a body or a header steers LiteLLM."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from start_llm.access.backend_secret import OWN_HEADERS
from start_llm.access.request_tenant import Tenants
from start_llm.access.tenants import TENANT_HEADER, tenant_of_key
from tests.proxy.conftest import KEY, SECRET, Proxied
from tests.server.client import ask
from tests.server.test_access import trap

pytestmark = pytest.mark.thorough

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": HI, "max_tokens": 2},
    MESSAGES: {"model": "m", "messages": HI, "max_tokens": 2},
    RESPONSES: {"model": "m", "input": "Hi", "max_output_tokens": 16},
}
SHORT = 20
ODD_NAMES = [None, "", 5, ["m"], "a\nb", "*", "litellm_proxy/*", "x" * 10_000, "\x00", "m/*"]
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
CHANGING = {f"{OWN_HEADERS}id", f"{OWN_HEADERS}signature", "traceparent"}
"""Headers that are new with each request."""
HEADERS = """
    x-litellm-timeout x-litellm-stream-timeout x-litellm-num-retries x-litellm-keepalive-seconds
    x-litellm-tags x-litellm-api-key x-litellm-model x-litellm-session-id x-litellm-trace-id
    x-litellm-spend-logs-metadata x-litellm-agent-id x-litellm-call-id x-litellm-mcp-debug
    x-litellm-enable-message-redaction
""".split()
OTHER_HEADERS = {
    "x-mcp-servers": "a",
    "x-pass-authorization": "Bearer x",
    "x-goog-api-key": "x",
    "x-amz-security-token": "x",
    "x-request-id": "r-1",
    "x-forwarded-for": "10.0.0.1",
    "api-key": "x",
    "anthropic-beta": "b",
    "openai-organization": "o",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "baggage": "a=b",
    "cache-control": "no-cache",
    "accept-language": "de",
    "cookie": "a=b",
}


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every parameter name that the installed LiteLLM knows."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    logging.getLogger("LiteLLM").setLevel(logging.ERROR)
    import litellm
    from litellm.constants import DEFAULT_CHAT_COMPLETION_PARAM_VALUES, OPENAI_CHAT_COMPLETION_PARAMS
    from litellm.proxy.auth.auth_utils import _BANNED_REQUEST_BODY_PARAMS
    from litellm.router import Router
    from litellm.types.router import GenericLiteLLMParams
    from litellm.types.utils import all_litellm_params

    calls = (litellm.completion, litellm.acompletion, litellm.aresponses, litellm.aembedding, Router)
    return {
        *all_litellm_params,
        *GenericLiteLLMParams.model_fields,
        *_BANNED_REQUEST_BODY_PARAMS,
        *DEFAULT_CHAT_COMPLETION_PARAM_VALUES,
        *OPENAI_CHAT_COMPLETION_PARAMS,
        *(name for call in calls for name in inspect.signature(call).parameters),
    }


@pytest.fixture
def knows_its_proxy(proxied: Proxied) -> Generator[None]:
    listener = proxied.server.app._listener
    usual = listener.context
    listener._context = replace(usual, tenants=Tenants(SECRET))
    yield
    listener._context = usual


def reached(proxied: Proxied, path: str) -> list[tuple[dict[str, str], Any]]:
    """What the server got, without what differs each time."""
    return [
        ({name: value for name, value in heard.headers.items() if name not in CHANGING}, heard.body)
        for heard in proxied.tunnel.heard(path)
    ]


def usual(proxied: Proxied, path: str) -> tuple[dict[str, str], Any]:
    proxied.tunnel.clear()
    assert proxied.ask(path, ASKED[path]).status == 200
    (request,) = reached(proxied, path)
    return request


def values(url: str) -> Iterator[Any]:
    yield url
    yield {TENANT_HEADER: tenant_of_key("victim"), "Authorization": "Bearer x", "url": url}
    yield 3


@pytest.mark.parametrize("path", ASKED)
def test_no_name_that_litellm_knows_steers_it(proxied: Proxied, names: set[str], path: str):
    """The server gets each request as it was sent, whatever it names, and nobody else gets any."""
    expected, whole = usual(proxied, path)
    foreign = sorted(names - whole.keys())
    with trap() as (url, caught):
        for value in values(url):
            sent = {**whole, **dict.fromkeys(foreign, value)}
            for body in (sent, *({**whole, place: sent} for place in ("metadata", "extra_body"))):
                proxied.tunnel.clear()
                proxied.ask(path, body)
                assert reached(proxied, path) == [(expected | length(body), body)]
        assert not caught


def length(body: Any) -> dict[str, str]:
    return {"content-length": str(len(json.dumps(body).encode()))}


@pytest.mark.parametrize("model", ODD_NAMES, ids=lambda name: repr(name)[:20])
def test_no_name_of_a_model_leads_elsewhere(proxied: Proxied, model: Any):
    body, ports = {**ASKED[CHAT], "model": model}, (proxied.port, proxied.server.port)
    through, direct = (ask(port, "POST", CHAT, body, WITH_KEY) for port in ports)
    assert through.status == direct.status
    assert through.json.keys() == direct.json.keys()


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.sample(7)
def test_a_header_of_litellm_goes_nowhere(proxied: Proxied, header: str):
    expected = usual(proxied, CHAT)
    proxied.tunnel.clear()
    assert proxied.ask(CHAT, ASKED[CHAT], headers={header: "1"}).status == 200
    assert reached(proxied, CHAT) == [expected]


@pytest.mark.parametrize("path", ASKED)
def test_no_other_header_reaches_the_server(proxied: Proxied, path: str):
    expected = usual(proxied, path)
    proxied.tunnel.clear()
    query = f"{path}?api-version=1&model=other&timeout=0.001"
    assert proxied.ask(query, ASKED[path], headers=OTHER_HEADERS).status == 200
    assert reached(proxied, path) == [expected]


@pytest.mark.usefixtures("knows_its_proxy")
@pytest.mark.parametrize("field", ["extra_headers", "headers", "default_headers"])
def test_another_keys_response_and_cache_stay_its_own(proxied: Proxied, field: str):
    """The digest of a key is no secret, and LiteLLM merged the headers of a body into its own."""
    victim = {"Authorization": "Bearer victim"}
    secret = {"model": "m", "input": f"{field}: a long secret. " * 40, "max_output_tokens": 16}
    kept = ask(proxied.server.port, "POST", RESPONSES, secret, victim)
    assert kept.status == 200
    lie = {field: {TENANT_HEADER: tenant_of_key("victim")}}
    asked = {"model": "m", "input": "Go on", "previous_response_id": kept.json["id"], "max_output_tokens": 16}
    assert proxied.ask(RESPONSES, {**asked, **lie}).status == 404
    assert proxied.ask(RESPONSES, asked, headers=lie[field]).status == 404
    again = proxied.ask(RESPONSES, secret, headers=lie[field])
    # Other tests have sent the same template with this proxy's own key.
    assert again.json["usage"]["input_tokens_details"]["cached_tokens"] < SHORT


BYTES = {
    "NaN": (b'{"model":"m","messages":[],"temperature":NaN}', "NaN is not a JSON number"),
    "not UTF-8": (b'{"model":"\xff"}', "not valid UTF-8"),
    "an array": (b"[]", "must be a JSON object"),
}


@pytest.mark.parametrize("name", BYTES)
def test_a_body_is_read_as_the_server_reads_it(proxied: Proxied, name: str):
    raw, words = BYTES[name]
    through, direct = proxied.ask(CHAT, raw), ask(proxied.server.port, "POST", CHAT, raw)
    assert (through.status, through.json) == (direct.status, direct.json) == (400, through.json)
    assert words in through.json["error"]["message"]


def test_of_a_field_that_is_given_twice_the_last_counts_on_both_ports(proxied: Proxied):
    proxied.tunnel.clear()
    raw = json.dumps(ASKED[CHAT]).removesuffix("}") + ', "model": "other", "seed": 1, "seed": 2}'
    assert proxied.ask(CHAT, raw.encode()).status == 200
    (heard,) = proxied.tunnel.heard(CHAT)
    assert (heard.body["model"], heard.body["seed"]) == ("other", 2)
