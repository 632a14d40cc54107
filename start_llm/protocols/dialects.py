"""How replies to groups of paths are written, above all errors. The server and the proxy read this table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from start_llm.access.key_limits import TokensLeft
from start_llm.access.request_target import with_one_version
from start_llm.core.chat import Json
from start_llm.core.errors import RequestError
from start_llm.protocols.anthropic.error_bodies import anthropic_refusal
from start_llm.protocols.base import SSEFrame, openai_refusal
from start_llm.protocols.responses import create as openai_responses


@dataclass(frozen=True, slots=True)
class Dialect:
    """How replies to a group of paths are written, also to requests that are refused unread.

    Attributes:
        id_header: name of the header with the request's id.
        refusal: returns the body of an error, for a request with this id.
        stream_refusal: returns the events of a stream that had begun before its request was refused. The last
            one has the error, and can end any stream.
        limit_headers: returns the headers that tell what is left of a key's tokens.
    """

    id_header: str
    refusal: Callable[[RequestError, str], Mapping[str, Json]]
    stream_refusal: Callable[[RequestError, str], Sequence[SSEFrame]]
    limit_headers: Callable[[TokensLeft], Mapping[str, str]] = TokensLeft.openai_headers


OPENAI = Dialect(
    "x-request-id",
    refusal=lambda error, _: openai_refusal(error),
    stream_refusal=lambda error, _: [SSEFrame(openai_refusal(error))],
)
_ANTHROPIC = Dialect(
    "request-id",
    refusal=anthropic_refusal,
    stream_refusal=lambda error, name: [SSEFrame(anthropic_refusal(error, name), event="error")],
    limit_headers=TokensLeft.anthropic_headers,
)
_OF_RESPONSES = Dialect(
    OPENAI.id_header,
    refusal=lambda error, _: openai_responses.refusal(error),
    stream_refusal=lambda error, _: openai_responses.refused_stream(error),
)
_DIALECTS: Mapping[str, Dialect] = {
    "/v1/messages": _ANTHROPIC,
    "/v1/responses": _OF_RESPONSES,
    "/responses": _OF_RESPONSES,
}
"""Dialects by path. Each also applies to all paths below."""


def dialect(path: str) -> Dialect:
    """Return the dialect of replies to this path, even if it does not exist."""
    path = with_one_version(path)
    matches = (known for root, known in _DIALECTS.items() if path == root or path.startswith(f"{root}/"))
    return next(matches, OPENAI)
