"""The table of fields that the proxy passes on, compared with what the parsers look at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.chat import Json
from start_llm.protocols import sessions
from start_llm.protocols.anthropic import messages
from start_llm.protocols.base import ModelFacts, RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.known_fields import IN_EXTRA_BODY, IN_METADATA, KNOWN_FIELDS, KnownFields
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.openai import completions, embeddings
from start_llm.protocols.responses import create
from start_llm.protocols.routes import ROUTES, RouteTable
from start_llm.protocols.seal import KEY_BYTES, Seal
from tests.model_cards import model_card

ECHOES = sorted((Path(__file__).parents[1] / "transcripts" / "echoes").glob("*.json"))
CONTEXT = RequestContext(
    ModelFacts(model_card(vocabulary=100), lambda _: b"x"),
    b"",
    Seal(bytes(KEY_BYTES)),
)
SAID: Json = [{"role": "user", "content": "Hi"}]
PARSERS: dict[str, Any] = {
    "/v1/chat/completions": (chat.parse, {"messages": SAID}),
    "/v1/completions": (completions.parse, {"prompt": "Hi"}),
    "/v1/messages": (messages.parse, {"messages": SAID, "max_tokens": 1}),
    "/v1/messages/count_tokens": (messages.parse_count, {"messages": SAID}),
    "/v1/responses": (create.parse, {"input": "Hi"}),
    "/v1/responses/input_tokens": (create.parse, {"input": "Hi"}),
}


class Watched(dict[str, Json]):
    """An object that notes which members are looked at."""

    def __init__(self, members: dict[str, Any]) -> None:
        super().__init__(members)
        self.seen: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        self.seen.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all members are looked at")


def known_at(path: str) -> KnownFields:
    kind = RouteTable(ROUTES).find("POST", path).route.body
    assert kind
    return KNOWN_FIELDS[kind]


def looked_at(path: str, inside: str | None = None) -> set[str]:
    parse, body = PARSERS[path]
    members = Watched({})
    asked = Watched(body | ({inside: members} if inside else {}))
    parse(Fields(asked), {}, CONTEXT)
    return members.seen if inside else asked.seen


@pytest.mark.parametrize("path", PARSERS)
def test_every_field_that_a_parser_looks_at_is_known(path: str):
    assert looked_at(path) - known_at(path).names == set()


def test_the_fields_of_embeddings_are_known():
    asked = Watched({"input": "Hi"})
    embeddings.parse(Fields(asked), CONTEXT.model)
    assert asked.seen - known_at("/v1/embeddings").names == set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("inside", "known"), [("metadata", IN_METADATA), ("extra_body", IN_EXTRA_BODY)])
def test_every_member_that_is_looked_at_is_known(path: str, inside: str, known: set[str]):
    assert looked_at(path, inside) - known == set()


def test_every_header_that_is_looked_at_is_known():
    headers: Any = Watched({})
    body = Fields({})
    for read in (sessions.session_id, sessions.conversation_id):
        read(body, headers)
    sessions.background(headers)
    with_agent: Any = Watched({"x-session-id": "s"})
    sessions.conversation_id(body, with_agent)
    assert headers.seen | with_agent.seen == set(sessions.READ_HEADERS)


@pytest.mark.parametrize("recording", ECHOES, ids=lambda path: path.stem)
def test_what_real_clients_send_is_known(recording: Path):
    known = set[str]().union(*(fields.names for fields in KNOWN_FIELDS.values()))
    for body in bodies(json.loads(recording.read_text())):
        assert set(body) - known == set()


def bodies(value: Any) -> Iterator[dict[str, Any]]:
    """Every request in a recording."""
    match value:
        case {"model": _, "messages": list()} | {"model": _, "input": list()}:
            yield value
        case dict():
            for inside in value.values():
                yield from bodies(inside)
        case list():
            for inside in value:
                yield from bodies(inside)
        case _:
            pass
