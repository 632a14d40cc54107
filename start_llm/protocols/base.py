"""Defines the interface that every API protocol implements, and shared helpers."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from start_llm.core.chat import GenerationRequest, Json
from start_llm.core.errors import RequestError
from start_llm.core.events import Finished, Output, Prefilling
from start_llm.core.ids import random_name
from start_llm.core.model_card import ModelCard
from start_llm.core.prompt_report import Divergence
from start_llm.images.door import ImageDoor
from start_llm.protocols.fields import Fields
from start_llm.protocols.notices import Notices
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import Seal

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_HOLE = "\ue000"
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
"""Characters of JSON at which some clients end a line (httpx's `iter_lines`), with their escapes."""


def json_text(value: Mapping[str, Json] | str) -> str:
    """Encode JSON without spaces."""
    return _ENCODER.encode(value)


@dataclass(frozen=True, slots=True)
class SSEFrame:
    """One server-sent event: JSON data, its encoded text, or a bare word such as `[DONE]`.

    Attributes:
        event: the event's name, in protocols that name their events.
    """

    data: Mapping[str, Json] | str
    event: str | None = None

    def encoded(self) -> bytes:
        """Return the event as it is sent: its name if it has one, `data: ...` and a blank line."""
        text = self.data if isinstance(self.data, str) else json_text(self.data)
        name = f"event: {self.event}\n" if self.event else ""
        return f"{name}data: {_on_one_line(text)}\n\n".encode()


def _on_one_line(text: str) -> str:
    """Return JSON text without what ends a line for any client. Such characters stand only in its strings."""
    if not text.isascii():
        for end, escape in _LINE_ENDS.items():
            text = text.replace(end, escape)
    return text


class FrameTemplate:
    """Creates frames that differ in one text, for each token of a stream. The rest is encoded only once.

    Args:
        make: returns the data with a text in it. No client text may follow that text.
    """

    def __init__(self, make: Callable[[str], Mapping[str, Json]], event: str | None = None) -> None:
        self._before, _, self._after = json_text(make(_HOLE)).rpartition(json_text(_HOLE))
        self._event = event

    def frame(self, text: str) -> SSEFrame:
        return SSEFrame(f"{self._before}{json_text(text)}{self._after}", self._event)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A loaded model, as parsers and replies know it.

    Attributes:
        token_bytes: returns the bytes of a token id.
        images: takes in images; None for a model that sees none.
    """

    card: ModelCard
    token_bytes: Callable[[int], bytes]
    images: ImageDoor | None = None


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Data that a parser needs besides the body.

    Attributes:
        tenant: the tenant of the request.
        seal: opens and seals the reasoning that a client keeps.
        responses: stored responses that a client may continue.
        notices: reports parts of a request that are ignored.
    """

    model: ModelFacts
    tenant: bytes
    seal: Seal
    responses: ResponseStore = field(default_factory=ResponseStore)
    notices: Notices = field(default_factory=Notices)


class Reply(Protocol):
    """Encodes the events of one request, as a stream of frames or as one body."""

    @property
    def id(self) -> str:
        """The id that the client receives."""
        ...

    def opening(self, prompt_tokens: int, divergence: Divergence | None = None) -> Iterable[SSEFrame]:
        """Sent at once, before the prompt is computed. The number of cached tokens is not known yet.

        A chat's is empty: the chunk that names the role comes with the first token or keep-alive.

        Args:
            divergence: where the prompt leaves the one that the client compares it with.
        """
        ...

    def keep_alive(self) -> SSEFrame:
        """A data event without content: some clients ignore comments when they detect timeouts."""
        ...

    def progress(self, event: Prefilling) -> Iterable[SSEFrame]:
        """Sent while the prompt is computed, to clients that ask for it, in protocols that have a place."""
        ...

    def output(self, event: Output) -> Iterable[SSEFrame]: ...

    def closing(self, end: Finished) -> Iterable[SSEFrame]: ...

    def failure(self, message: str) -> SSEFrame:
        """Sent when the engine fails after the stream has begun. The connection is then closed."""
        ...

    def whole(self, events: list[Output], end: Finished) -> Mapping[str, Json]:
        """Return the body of a reply that is not streamed."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A parsed request body: the generation request, the encoder of its reply, and the stream flag.

    Attributes:
        unavailable: what is answered in place of the model, because a tool is demanded that a vendor runs.
    """

    request: GenerationRequest
    reply: Reply
    stream: bool
    unavailable: str = ""


type Parser = Callable[[Fields, Mapping[str, str], RequestContext], ParsedRequest]


def new_id(prefix: str) -> str:
    """Return a globally unique id."""
    return prefix + random_name()


def openai_error(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Json]:
    """The error object of OpenAI's protocols."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def openai_refusal(error: RequestError) -> dict[str, Json]:
    return openai_error(error.message, kind=error.kind, param=error.param, code=error.code)
