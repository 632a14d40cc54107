"""Read each body once, as the server reads it, and hand on what was written again.

LiteLLM obeys about four hundred fields of a body: where to send the request, with which headers, how often.
And its JSON parser reads some bytes otherwise than the server's. So it gets no byte of a client: the body is
parsed here, only fields that the server knows are kept, and the result is encoded anew.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from starlette.requests import ClientDisconnect, Request

from start_llm.access.content_coding import IDENTITY, content_coding, decoded
from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest, RequestError, body_too_large
from start_llm.protocols.fields import Fields, parse_body
from start_llm.protocols.history import told_paths, with_mended_history
from start_llm.protocols.known_fields import IN_EXTRA_BODY, IN_METADATA, KNOWN_FIELDS, KnownFields
from start_llm.protocols.routes import Route
from start_llm.proxy.control_fields import is_litellms_own
from start_llm.proxy.error_text import Application, Receive, Send
from start_llm.proxy.open_routes import OPEN_ROUTES
from start_llm.proxy.refusals import refuse

_OF_THE_BYTES = (b"content-length", b"content-encoding")
"""Headers about the bytes of a body, which are other ones once it is written anew."""
LONG_BYTES = 100_000
"""A longer body is parsed on a thread, while other requests are served."""

type DefaultName = Callable[[], Awaitable[str | None]]
type Tell = Callable[[str], None]


class OwnBodies:
    """ASGI middleware that replaces the body of each POST.

    Args:
        control: fields that steer LiteLLM, which are refused.
        max_body_bytes: the longest body, also once it is decompressed.
        default_name: returns the model that answers a request that names none. LiteLLM would make up a name,
            and show it in the reply.
        tell: told of fields that are left out.
    """

    def __init__(
        self,
        inside: Application,
        *,
        control: AbstractSet[str],
        max_body_bytes: int,
        default_name: DefaultName,
        tell: Tell,
    ) -> None:
        self._inside = inside
        self._max_body_bytes = max_body_bytes
        self._control = control
        self._default_name = default_name
        self._tell = tell

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._inside(scope, receive, send)
            return
        try:
            raw = await self._received(Request(scope, receive))
            body = await self._own(OPEN_ROUTES.find("POST", scope["path"]).route, raw)
        except ClientDisconnect:
            return
        except RequestError as error:
            await refuse(scope, send, error)
            return
        headers = [pair for pair in scope["headers"] if pair[0] not in _OF_THE_BYTES]
        headers.append((b"content-length", str(len(body)).encode()))
        await self._inside(scope | {"headers": headers}, replayed(body, receive), send)

    async def _received(self, request: Request) -> bytes:
        """Return the body, decompressed.

        Raises:
            BodyTooLarge: it is longer than the limit.
        """
        coding = content_coding(", ".join(request.headers.getlist("content-encoding")))
        raw = bytearray()
        async for piece in request.stream():
            raw += piece
            if len(raw) > self._max_body_bytes:
                raise body_too_large(self._max_body_bytes)
        if coding == IDENTITY:
            return bytes(raw)
        return await asyncio.to_thread(decoded, bytes(raw), coding, self._max_body_bytes)

    async def _own(self, route: Route, raw: bytes) -> bytes:
        asked = await asyncio.to_thread(parse_body, raw) if len(raw) > LONG_BYTES else parse_body(raw)
        asked = with_mended_history(route.body, asked)
        for place in told_paths(asked.mended):
            told = f"something in '{place}' was mended, because its client cannot take it back."
            self._tell(f"{route.path}: {told}")
        kept = self._kept(route, asked)
        if route.proxy == "litellm" and not kept.get("model") and (name := await self._default_name()):
            kept["model"] = name
        return await asyncio.to_thread(_written, kept) if len(raw) > LONG_BYTES else _written(kept)

    def _kept(self, route: Route, body: Fields) -> dict[str, Json]:
        """Return the fields that the server knows.

        Raises:
            InvalidRequest: names a field that steers LiteLLM, or one of a wrong type.
        """
        known = KNOWN_FIELDS[route.body] if route.body else KnownFields(frozenset())
        kept = self._members(route.path, body, known.names)
        for name, members in (
            ("extra_body", self._extra(route.path, body)),
            ("metadata", self._metadata(known, body)),
        ):
            kept.pop(name, None)
            if members and name in known.names:
                kept[name] = members
        return kept

    def _extra(self, path: str, body: Fields) -> dict[str, Json]:
        given = body.value("extra_body")
        if not isinstance(given, dict):
            return {}
        return self._members(path, Fields(given, "extra_body"), IN_EXTRA_BODY)

    def _members(self, path: str, fields: Fields, known: AbstractSet[str]) -> dict[str, Json]:
        for name, value in fields.data.items():
            if name in known or value is None:
                continue
            if name in self._control or is_litellms_own(name):
                raise fields.fail(name, "steers LiteLLM, and cannot be sent to this proxy")
            self._tell(
                f"{path}: the field '{fields.path_of(name)}' is not known, and is left out on this port."
            )
        return {name: value for name, value in fields.data.items() if name in known}

    def _metadata(self, known: KnownFields, body: Fields) -> dict[str, Json]:
        """Return what the server looks at. The names are the client's own, so none is refused."""
        if known.repeats_metadata:
            given = body.object("metadata")
            return _without(given.data, self._control) if given else {}
        free = body.value("metadata")
        return {name: free[name] for name in free if name in IN_METADATA} if isinstance(free, dict) else {}


def _without(members: Mapping[str, Json], control: AbstractSet[str]) -> dict[str, Json]:
    return {name: value for name, value in members.items() if not (name in control or is_litellms_own(name))}


def _written(fields: Mapping[str, Json]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives a body which was read already, and then what comes after it."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return waiting.pop() if waiting else await receive()

    return replay
