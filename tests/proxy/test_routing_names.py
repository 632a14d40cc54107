"""A conversation is known again by its session or its messages, by its own tenant alone."""

from __future__ import annotations

from typing import Any

import pytest

from start_llm.access.tenants import TENANT_HEADER
from start_llm.proxy.routing_names import RoutedConversations, routing_names

ANN, BEN = {TENANT_HEADER: "ann"}, {TENANT_HEADER: "ben"}
SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION, REPLY = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
MORE = {"role": "user", "content": "Go on"}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **more}


BODIES: dict[str, Any] = {
    "chat": lambda *messages: chat(SYSTEM, *messages),
    "messages": lambda *messages: chat(*messages, system="Be brief."),
    "responses": lambda *items: {"model": "m", "instructions": "Be brief.", "input": list(items)},
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_longest_prefix_that_was_routed_decides(kind: Any):
    body, routed = BODIES[kind], RoutedConversations()
    routed.note(routing_names(kind, body(QUESTION), ANN).names, "a")
    routed.note(routing_names(kind, body(QUESTION, REPLY, MORE), ANN).names, "b")
    for messages, server in (((QUESTION, REPLY, MORE, REPLY), "b"), ((MORE,), None)):
        names = routing_names(kind, body(*messages), ANN).names
        assert routed.find(names, lambda _: True) == server


def test_instructions_alone_name_no_conversation():
    routed = RoutedConversations()
    routed.note(routing_names("chat", chat(SYSTEM, QUESTION), ANN).names, "a")
    other = routing_names("chat", chat(SYSTEM, MORE), ANN)
    assert routed.find(other.names, lambda _: True) is None
    assert not routing_names("chat", chat(SYSTEM), ANN).names


def test_a_session_counts_more_than_its_messages():
    routed = RoutedConversations()
    routed.note(routing_names("chat", chat(QUESTION, session_id="s1"), ANN).names, "a")
    routed.note(routing_names("chat", chat(MORE), ANN).names, "b")
    assert routed.find(routing_names("chat", chat(MORE, session_id="s1"), ANN).names, lambda _: True) == "a"


def test_a_server_that_is_not_able_is_passed_over_for_a_shorter_prefix():
    routed = RoutedConversations()
    routed.note(routing_names("chat", chat(QUESTION, REPLY, MORE), ANN).names, "a")
    routed.note(routing_names("chat", chat(QUESTION), ANN).names, "b")
    names = routing_names("chat", chat(QUESTION, REPLY, MORE), ANN).names
    assert routed.find(names, lambda server: server != "a") == "b"


@pytest.mark.parametrize("more", [{}, {"session_id": "s1"}])
def test_no_tenant_finds_the_conversation_of_another_one(more: dict[str, str]):
    body, routed = chat(QUESTION, REPLY, MORE, **more), RoutedConversations()
    routed.note(routing_names("chat", body, ANN).names, "a")
    assert routed.find(routing_names("chat", body, BEN).names, lambda _: True) is None
    assert not set(routing_names("chat", body, ANN).names) & set(routing_names("chat", body, BEN).names)


def test_a_conversation_with_another_model_is_another_one():
    first, second = (routing_names("chat", {**chat(QUESTION), "model": name}, ANN).names for name in "mn")
    assert not set(first) & set(second)


@pytest.mark.parametrize(
    ("kind", "body", "goes_on"),
    [
        ("chat", chat(SYSTEM, QUESTION), False),
        ("chat", chat(SYSTEM, QUESTION, REPLY, MORE), True),
        ("responses", {"input": "Hello"}, False),
        ("responses", {"input": [QUESTION, {"type": "function_call", "name": "f"}]}, True),
        ("embeddings", {"input": "Hello"}, False),
        ("text", {"prompt": "Hello"}, False),
    ],
)
def test_a_request_with_a_reply_in_it_goes_on(kind: Any, body: dict[str, Any], goes_on: bool):
    assert routing_names(kind, body, ANN).goes_on is goes_on


def test_only_so_many_names_are_kept_and_the_oldest_go_first():
    routed = RoutedConversations(max_names=4)
    first, second = (
        routing_names("chat", chat({"role": "user", "content": word}), ANN).names for word in "ab"
    )
    routed.note(first, "a")
    for number in range(3):
        routed.note([bytes([number])], "b")
    routed.note(first, "a")
    routed.note(second, "a")
    assert len(routed) == 4
    assert routed.find(first, lambda _: True) == "a"
    assert routed.find([bytes([0])], lambda _: True) is None
