"""Send requests from the proxy's process to a server directly, without LiteLLM."""

from collections.abc import Iterable
from typing import Any

import anyio
import httpx

from start_llm.access.backend_secret import PROOF_HEADER, SIGNATURE_HEADER, BackendSecret, Caller
from start_llm.protocols.sessions import READ_HEADERS
from start_llm.proxy.error_text import ErrorResponse
from start_llm.proxy.open_routes import OPEN_ROUTES

_PATIENCE_S = 60
_PASSED_ON = frozenset({"content-type", "anthropic-version", *READ_HEADERS})

type Headers = Iterable[tuple[bytes, bytes]]


class Backend:
    """An HTTP client for one server. Any task of one event loop may use it.

    Args:
        url: of the server, such as `http://127.0.0.1:8080`.
        secret: shared with the server.
    """

    def __init__(self, url: str, secret: BackendSecret) -> None:
        self.url = url
        self._secret = secret
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(_PATIENCE_S, read=None),
            # No connection is kept alive: the server might close it just when it is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def ask(self, method: str, url: httpx.URL, headers: Headers, body: bytes) -> httpx.Response:
        """Send a request and return the response. The caller reads the body and closes the response.

        Args:
            headers: of the request in the proxy. Its caller is signed again, for this path.

        Raises:
            httpx.TransportError: the server does not answer.
        """
        named = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        sent = {name: value for name, value in named if name in _PASSED_ON}
        sent |= {"Authorization": f"Bearer {self._secret.api_key}", "Accept-Encoding": "identity"}
        request = self._client.build_request(method, url, content=body, headers=sent)
        path = request.url.raw_path.partition(b"?")[0].decode("ascii")
        request.headers.update(self._secret.signed(Caller.named_in(dict(named)), method, path))
        return await self._client.send(request, stream=True)

    async def whole(
        self, method: str, path: str, headers: Headers = (), body: bytes = b"", *, within_s: float
    ) -> httpx.Response | None:
        """Send a request and return the whole response; None if there is none within this time."""
        try:
            with anyio.fail_after(within_s):
                answer = await self.ask(method, httpx.URL(path), headers, body)
                try:
                    await answer.aread()
                finally:
                    await answer.aclose()
        except (httpx.TransportError, TimeoutError):
            return None
        return answer

    def is_own(self, answer: httpx.Response) -> bool:
        """Return whether a server that shares the secret has given this answer to a GET."""
        signature = answer.request.headers[SIGNATURE_HEADER]
        return self._secret.is_proof(answer.headers.get(PROOF_HEADER, ""), signature)

    async def default_model(self) -> str | None:
        """Return the model that the server lists first, which answers by default; None if it lists none."""
        answer = await self.whole("GET", "/v1/models", within_s=_PATIENCE_S)
        try:
            return None if answer is None else str(answer.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            return None

    async def refusal(self, scope: Any, body: bytes) -> ErrorResponse | None:
        """Return the server's error for a request that LiteLLM refused.

        Return None if its status is not 4xx, if it does not answer, or if no path can check the request.
        """
        question = OPEN_ROUTES.find(scope["method"], scope["path"]).route.checked_by
        if question is None:
            return None
        try:
            answer = await self.ask("POST", httpx.URL(question), scope["headers"], body)
            told = await answer.aread()
        except httpx.TransportError:
            return None
        await answer.aclose()
        return ErrorResponse(answer.status_code, told) if 400 <= answer.status_code < 500 else None
