"""What every wire format provides, and what they share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import RequestError
from start_llm.core.events import Finished, Output
from start_llm.core.ids import random_name
from start_llm.protocols.fields import Fields
from start_llm.protocols.notices import Notices
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import Seal

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_HOLE = "\ue000"


def json_text(value: Mapping[str, Json] | str) -> str:
    """As short as JSON can say it."""
    return _ENCODER.encode(value)


@dataclass(frozen=True, slots=True)
class Frame:
    """One server-sent event: JSON data, its text, or a bare word such as `[DONE]`.

    Attributes:
        event: its name, for protocols that name their events.
    """

    data: Mapping[str, Json] | str
    event: str | None = None


class FrameMould:
    """Makes frames that are alike but for one text, for each token of a stream: the rest is encoded once.

    Args:
        make: the data with a text in it. Nothing behind that text comes from a client.
    """

    def __init__(self, make: Callable[[str], Mapping[str, Json]], event: str | None = None) -> None:
        self._before, _, self._behind = json_text(make(_HOLE)).rpartition(json_text(_HOLE))
        self._event = event

    def frame(self, text: str) -> Frame:
        return Frame(f"{self._before}{json_text(text)}{self._behind}", self._event)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a reply may have to say about the model.

    `token_bytes` maps a token id to the bytes that it stands for.
    """

    id: str
    vocabulary: int
    token_bytes: Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Context:
    """What a parser has to know beside the request.

    Attributes:
        tenant: whose request it is.
        seal: for thoughts that a client carries.
        responses: that a client may go on from.
        notices: for what is left out of a request.
    """

    model: ModelFacts
    tenant: bytes
    seal: Seal
    responses: ResponseStore = field(default_factory=ResponseStore)
    notices: Notices = field(default_factory=Notices)


class Reply(Protocol):
    """Encodes the events of one request, either as a stream of frames or as one body."""

    @property
    def id(self) -> str:
        """The one that the client is told."""
        ...

    def opening(self, prompt_tokens: int) -> Iterable[Frame]:
        """Sent at once, before the prompt is computed. What the cache has of it is not known yet."""
        ...

    def keep_alive(self) -> Frame:
        """A data event without content: some clients do not count comments as life."""
        ...

    def output(self, event: Output) -> Iterable[Frame]: ...

    def closing(self, end: Finished) -> Iterable[Frame]: ...

    def failure(self, message: str) -> Frame:
        """Sent when the engine fails after the stream has begun; the connection is then cut."""
        ...

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        """The body of a reply that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request body: what to do, and how to say what was done."""

    request: GenerationRequest
    reply: Reply
    stream: bool


type Parser = Callable[[Fields, Mapping[str, str], Context], Call]


def new_id(prefix: str) -> str:
    """A globally unique id."""
    return prefix + random_name()


def openai_error(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Json]:
    """The error object of OpenAI's protocols."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_refusal(error: RequestError) -> dict[str, Json]:
    return openai_error(error.message, kind=error.kind, param=error.param, code=error.code)
