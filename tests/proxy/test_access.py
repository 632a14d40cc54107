"""Access to the proxy, and the parts of LiteLLM that nobody sees."""

from __future__ import annotations

import gzip
import http.client
import shutil
import socket
import subprocess
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from backports import zstd
from openai import OpenAI

from start_llm.access.loopback import IPV6_LOOPBACK, loopback_addresses
from start_llm.core.errors import LaunchError
from start_llm.launch.http_requests import NO_KEY, Address
from start_llm.launch.server_info import find
from tests.conftest import TinyModel
from tests.proxy.conftest import KEY, PROXIED, Proxied
from tests.sdk.endpoints import Endpoints
from tests.server.test_access import trap, with_images
from tests.serving import serving, tried_once

LOOPBACK, LOOPBACK_6 = "0100007F", "00000000000000000000000001000000"
"""127.0.0.1 and ::1, as the kernel's tables write them."""
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def serves(proxied: Proxied) -> bool:
    return proxied.ask(CHAT, BODY).status == 200


@pytest.mark.thorough
def test_a_wrong_key_is_401(proxied: Proxied):
    answer = proxied.ask(CHAT, BODY, headers={"Authorization": "Bearer wrong"})
    assert answer.status == 401
    assert "not a key of this server" in answer.json["error"]["message"]


@pytest.mark.parametrize("headers", [{"x-api-key": KEY, "Authorization": ""}])
def test_the_key_may_come_as_anthropic_clients_send_it(proxied: Proxied, headers: dict[str, str]):
    assert proxied.ask(CHAT, BODY, headers=headers).status == 200


def test_a_web_page_is_refused(proxied: Proxied):
    answer = proxied.ask(CHAT, BODY, headers={"Origin": "http://evil.example"})
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path", [CHAT, MESSAGES, "/v1/responses", "/v1/models", "/health/liveliness", "/health"]
)
def test_foreign_names_and_pages_are_refused_everywhere(proxied: Proxied, path: str):
    lies = ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"})
    for lie in (*lies, {"Sec-Fetch-Site": "cross-site"}):
        answer = proxied.ask(path, headers=lie)
        assert (answer.status, path.startswith(MESSAGES)) == (403, answer.json.get("type") == "error")


def test_a_preflight_gets_no_star(proxied: Proxied):
    wish = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = proxied.ask(CHAT, method="OPTIONS", headers=wish)
    assert answer.status >= 400
    assert answer.headers.get("access-control-allow-origin") not in ("*", "http://evil.example")


LITELLMS = """
    /docs /redoc /openapi.json /health/drain /health/readiness /routes /model/info
    /v1/model/info /get/config/callbacks /public/model_hub /ui/ /mcp /login
    /sso/key/generate /.well-known/jwks.json /v1/traces /gemini/v1beta/models /langfuse/x
    /debug/asyncio-tasks /config/yaml /spend/logs /key/info
""".split()


@pytest.mark.parametrize("path", LITELLMS)
def test_what_clients_do_not_need_of_litellm_is_not_there(proxied: Proxied, path: str):
    proxied.tunnel.clear()
    for headers in ({}, {"Authorization": ""}):
        for method, body in (("GET", None), ("POST", {})):
            assert proxied.ask(path, body, method=method, headers=headers).status in (401, 404)
    assert not any(proxied.tunnel.heard(route) for route in (CHAT, MESSAGES, "/v1/models", path)), (
        "nothing was sent to the server"
    )


def test_a_web_socket_is_refused(proxied: Proxied):
    wish = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    wish += b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nAuthorization: Bearer %b\r\n" % KEY.encode()
    for path in (b"/v1/realtime", b"/vertex_ai/live", b"/none"):
        head = b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (path, wish)
        assert first_line(proxied, head).split()[1] in (b"403", b"404")


def first_line(proxied: Proxied, sent: bytes) -> bytes:
    """The status line that comes back; nothing if the connection is closed without one."""
    with socket.create_connection(("127.0.0.1", proxied.port), timeout=20) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
        try:
            return connection.recv(1000).partition(b"\r\n")[0]
        except ConnectionError:
            return b""


HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n".encode()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"Content-Type: text/plain\r\nContent-Length: 2\r\n", b"415"),
        (b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 2\r\n", b"415"),
        (b"Content-Length: 2\r\n", b"415"),
        (b"Content-Type: application/json\r\nTransfer-Encoding: gzip\r\n", b"400"),
        (
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n",
            b"400",
        ),
        (b"Content-Type: application/json\r\nContent-Length: 100000000\r\n", b"413"),
        (b"Content-Type: application/json\r\nContent-Length: 2\r\nHost: evil.example\r\n", b"400"),
    ],
)
def test_a_body_is_refused_by_its_headers(proxied: Proxied, headers: bytes, status: bytes):
    assert first_line(proxied, HEAD + headers + b"\r\n{}").split()[1] == status
    assert serves(proxied)


QUESTION = b'{"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}'
SAYS_JSON = {"Content-Type": "application/json"}
AS_JSON = HEAD + b"Content-Type: application/json\r\n"
IN_CHUNKS = AS_JSON + b"Transfer-Encoding: chunked\r\n"


def in_chunks(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (IN_CHUNKS + b"\r\n" + in_chunks(QUESTION), b"200"),
        (IN_CHUNKS + b"Content-Encoding: gzip\r\n\r\n" + in_chunks(gzip.compress(QUESTION)), b"200"),
        (IN_CHUNKS + b"Content-Encoding: zstd\r\n\r\n" + in_chunks(zstd.compress(QUESTION)), b"200"),
        (IN_CHUNKS + b"Content-Encoding: br\r\n\r\n" + in_chunks(QUESTION), b"415"),
        (IN_CHUNKS + b"\r\nno size\r\n", b"400"),
        (
            IN_CHUNKS.replace(b"POST /v1/chat/completions", b"GET /v1/models")
            + b"\r\n"
            + in_chunks(QUESTION),
            b"411",
        ),
    ],
    ids=["chunks", "gzip", "zstd", "br", "no size", "GET"],
)
@pytest.mark.sample(2)
def test_a_body_in_chunks_is_read_as_the_server_reads_it(proxied: Proxied, sent: bytes, status: bytes):
    assert first_line(proxied, sent).split()[1] == status
    assert serves(proxied)


@pytest.mark.skipif(IPV6_LOOPBACK not in loopback_addresses(), reason="this system has no IPv6")
def test_both_loopback_addresses_answer(proxied: Proxied):
    for host in loopback_addresses():
        connection = http.client.HTTPConnection(host, proxied.port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", QUESTION, {"Authorization": f"Bearer {KEY}", **SAYS_JSON}
        )
        assert connection.getresponse().status == 200
        connection.close()


TOO_MUCH = {
    "a long header": HEAD + b"A: " + b"x" * 10_000_000 + b"\r\n\r\n",
    "many headers": HEAD + b"A: b\r\n" * 200_000 + b"\r\n",
    "a long path": b"GET /" + b"x" * 10_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a line without end": b"x" * 10_000_000,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", TOO_MUCH)
def test_an_endless_head_is_refused_and_leaves_no_memory_after(proxied: Proxied, name: str):
    before = resident(proxied)
    for _ in range(5):
        line = first_line(proxied, TOO_MUCH[name])
        assert not line or line.split()[1] in (b"400", b"401", b"404", b"414", b"431"), line
    assert serves(proxied)
    assert resident(proxied) - before < 40 * 2**20


def resident(proxied: Proxied) -> int:
    """Bytes of memory that the proxy has."""
    command = ["ps", "-o", "rss=", "-p", str(proxied.proxy.pid)]
    completed = subprocess.run(command, capture_output=True, check=True)
    return int(completed.stdout) * 1024


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"\xff", b"", b"[]"]
)
def test_a_body_that_is_no_request_is_a_4xx(proxied: Proxied, body: bytes):
    head = HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert first_line(proxied, head + body).split()[1].startswith(b"4")
    assert serves(proxied)


@pytest.mark.thorough
def test_no_address_in_a_request_is_asked_by_the_proxy_either(proxied: Proxied, tmp_path: Path):
    (tmp_path / "secret.txt").write_text("xyzzy-secret")
    with trap() as (url, caught):
        for target in (url, (tmp_path / "secret.txt").as_uri(), str(tmp_path / "secret.txt")):
            for path in (CHAT, MESSAGES, "/v1/responses"):
                for body in with_images(path, target):
                    answer = proxied.ask(path, body | {"model": "m"})
                    assert answer.status in (200, 400)
                    assert "xyzzy-secret" not in answer.text
        assert not caught


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/"])
def test_the_models_of_the_server_are_listed_as_it_lists_them(proxied: Proxied, path: str):
    listed = proxied.server.get("/v1/models")
    assert proxied.ask(path).json == listed
    (model,) = listed["data"]
    assert proxied.ask(f"/v1/models/{model['id']}").json == model
    assert proxied.ask("/v1/models/owner/other").status == 404
    assert proxied.ask(path, method="HEAD").text == ""


@pytest.fixture
def two_models(
    proxied: Proxied, tiny_model: TinyModel, endpoints: Endpoints, tmp_path: Path
) -> Generator[str]:
    """The address of the proxy, in front of a server with two models for the time of a test."""
    for family in ("qwen3", "llama"):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), tmp_path / family)
    settings: dict[str, Any] = {"model_dir": str(tmp_path), "max_kv_size": 4096, "aliases": ("small=llama",)}
    with tried_once(), serving(Path("qwen3"), **settings) as server:
        yield endpoints.of(server, PROXIED).url
    endpoints.of(proxied.server, PROXIED)


@pytest.mark.thorough
def test_all_models_are_listed_and_each_answers_under_its_name(two_models: str):
    with OpenAI(base_url=f"{two_models}/v1", api_key=KEY, max_retries=0) as client:

        def listed() -> dict[str, Any]:
            return {model.id: model.model_extra for model in client.models.list()}

        before = listed()
        assert list(before) == ["qwen3", "llama"]
        assert (before["llama"]["state"], before["llama"]["aliases"]) == ("available", ["small"])
        message: Any = {"role": "user", "content": "Hello"}
        reply = client.chat.completions.create(model="llama", messages=[message], max_tokens=1)
        assert reply.choices
        after = listed()
        assert list(after) == ["llama", "qwen3"], "the one that was used last comes first"
        assert after["llama"]["state"] == "loaded"
        assert after["llama"]["context_window"] == after["llama"]["max_input_tokens"] == 4096


def test_the_listed_model_tells_its_window_as_the_launcher_reads_it(proxied: Proxied):
    through, direct = (
        find([Address(url, KEY)]) for url in (f"http://127.0.0.1:{proxied.port}", proxied.server.url)
    )
    assert (through.model, through.window, through.reply) == (direct.model, direct.window, direct.reply)
    assert not through.sees, "as the model is, whatever the proxy knew before"


def test_the_launcher_learns_of_a_wrong_key(proxied: Proxied):
    with pytest.raises(LaunchError, match=r"does not take the key: set PROXY_API_KEY.*\(401\)"):
        find([Address(f"http://127.0.0.1:{proxied.port}", NO_KEY)])


def test_it_listens_on_loopback_only(proxied: Proxied):
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, proxied.port), timeout=5).close()


def test_twenty_refused_requests_in_a_row_do_not_block_it(proxied: Proxied):
    for _ in range(20):
        assert proxied.ask(CHAT, BODY, headers={"Origin": "http://evil.example"}).status == 403
    assert serves(proxied)


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc to see the sockets of the proxy")
def test_it_talks_to_nobody_beyond_this_machine(proxied: Proxied):
    for _ in range(10):
        assert serves(proxied)
    assert LOOPBACK in proxied.partners
    assert proxied.partners <= {LOOPBACK, LOOPBACK_6}
