"""Send requests from the proxy's process to a server, and read what it answers."""

import json
import re
import socket
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import anyio
from yarl import URL

from start_llm.access.backend_secret import (
    PROOF_HEADER,
    READINESS_HEADER,
    SIGNATURE_HEADER,
    BackendSecret,
    Caller,
)
from start_llm.core.silent_peers import end_when_silent
from start_llm.protocols.receipts import RECEIPT_HEADER
from start_llm.protocols.sessions import READ_HEADERS

_PATIENCE_S = 60
_SILENCE_S = 12
"""Seconds without a sign of life of its machine after which a server is asked whether it is there."""
PASSED_ON = frozenset(("content-type", "anthropic-version", RECEIPT_HEADER, READINESS_HEADER, *READ_HEADERS))
"""Headers of clients that the server looks at."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

type Headers = Iterable[tuple[bytes, bytes]]

UNREACHABLE = (aiohttp.ClientError, TimeoutError)
"""What is raised if a server does not answer, or ends in the middle of its answer."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """What a server has answered, read to its end.

    Attributes:
        is_own: a server that shares the secret has given it. Only answers to GET can show that.
    """

    status: int
    body: bytes = b""
    is_own: bool = False

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK

    @property
    def fields(self) -> dict[str, Any]:
        """The JSON object of the body; an empty one if it has none."""
        try:
            value = json.loads(self.body)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


def _socket(address: Any) -> socket.socket:
    """Return what connects to an address, and ends when the server's machine is silent for 15 seconds."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    end_when_silent(opened, _SILENCE_S)
    return opened


class Backend:
    """An HTTP client for one server. Any task of one event loop may use it while it is `connected`.

    Args:
        url: of the server, such as `http://127.0.0.1:8080`.
        secret: shared with the server.
    """

    _session: aiohttp.ClientSession

    def __init__(self, url: str, secret: BackendSecret) -> None:
        self.url = url
        self._secret = secret

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[None]:
        """Let requests be sent while the block runs.

        No connection is kept alive: the server might close it just when it is used again, and it would
        not be known whether a request has reached it.
        """
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_PATIENCE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
            auto_decompress=False,
        ) as self._session:
            yield

    async def ask(self, method: str, path: str, headers: Headers, body: bytes) -> aiohttp.ClientResponse:
        """Send a request and return the response. The caller reads the body and closes the response.

        Args:
            path: as a URL has it, with the query.
            headers: of the request in the proxy, which name its caller. The caller is signed here. Control
                characters in them become spaces: no HTTP client sends them.

        Raises:
            aiohttp.ClientError, TimeoutError: the server does not answer.
        """
        named = {
            name.decode("latin-1"): _CONTROL.sub(" ", value.decode("latin-1")) for name, value in headers
        }
        sent = {name: value for name, value in named.items() if name in PASSED_ON}
        sent |= {"Authorization": f"Bearer {self._secret.api_key}", "Accept-Encoding": "identity"}
        sent |= self._secret.signed(Caller.named_in(named), method, path.partition("?")[0])
        url = URL(f"{self.url}{path}", encoded=True)
        return await self._session.request(
            method, url, data=body or None, headers=sent, allow_redirects=False
        )

    async def whole(
        self, method: str, path: str, headers: Headers = (), body: bytes = b"", *, within_s: float
    ) -> WholeAnswer | None:
        """Send a request and return the whole response; None if there is none within this time."""
        try:
            with anyio.fail_after(within_s):
                async with await self.ask(method, path, headers, body) as answer:
                    return WholeAnswer(answer.status, await answer.read(), self._is_own(answer))
        except UNREACHABLE:
            return None

    def _is_own(self, answer: aiohttp.ClientResponse) -> bool:
        signature = answer.request_info.headers[SIGNATURE_HEADER]
        return self._secret.is_proof(answer.headers.get(PROOF_HEADER, ""), signature)
