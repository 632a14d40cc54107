"""What a session cannot take back is mended: each reply that we can emit, whole or damaged, is accepted."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest
from start_llm.core.errors import InvalidRequest
from start_llm.core.events import Finished, Output
from start_llm.protocols.anthropic import messages
from start_llm.protocols.base import ParsedRequest, Parser, Reply
from start_llm.protocols.fields import Fields, parse_body
from start_llm.protocols.history import reported_paths, with_mended_history
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.responses import create
from tests.output.corpus import CORPUS
from tests.output.corpus.case import split
from tests.protocols.helpers import CONTEXT, USAGE

CHAT, MESSAGES, RESPONSES = "chat", "messages", "responses"
PARSERS: dict[str, Parser] = {CHAT: chat.parse, MESSAGES: messages.parse, RESPONSES: create.parse}
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    CHAT: ("messages", {}),
    MESSAGES: ("messages", {"max_tokens": 5}),
    RESPONSES: ("input", {}),
}
"""The field with the conversation, and what else a request must have."""
HALF = "x\ud83d"
SOME = 7
FOREIGN_SHARE = 0.2
"""Of the damaged histories, which the few foreign ones would otherwise hardly be among."""
ASK: dict[str, Any] = {"role": "user", "content": "Go on"}


def mended(path: Any, items: list[Any]) -> Fields:
    """A body as it comes from the wire, through the door."""
    name, others = FIELDS[path]
    return with_mended_history(path, parse_body(json.dumps({name: items, **others}).encode()))


def parsed(path: str, items: list[Any]) -> ParsedRequest:
    return PARSERS[path](mended(path, items), {}, CONTEXT)


def request(path: str, items: list[Any]) -> ChatRequest:
    chat_request = parsed(path, items).request
    assert isinstance(chat_request, ChatRequest)
    return chat_request


# ----------------------------------------------------------------------------------------- what we can emit


def sent(path: str, outputs: list[Output]) -> list[Any]:
    """The items of a reply, as a client keeps them, and a result for each call."""
    reply = _new_reply(path)
    body: Any = json.loads(json.dumps(reply.whole(outputs, Finished("stop", USAGE))))
    match path:
        case "chat":
            message = body["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            return [
                message,
                *({"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls),
            ]
        case "messages":
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": block["id"],
                    "content": [{"type": "text", "text": "r"}],
                }
                for block in body["content"]
                if block["type"] == "tool_use"
            ]
            answers = [{"role": "user", "content": results}] if results else []
            return [{"role": "assistant", "content": body["content"]}, *answers]
        case _:
            calls = [item for item in body["output"] if item["type"] == "function_call"]
            results = [
                {"type": "function_call_output", "call_id": call["call_id"], "output": "r"} for call in calls
            ]
            return [*body["output"], *results]


def _new_reply(path: str) -> Reply:
    return parsed(path, [ASK]).reply


@cache
def replies(every: int) -> list[list[Output]]:
    return [split(case, [case.text]) for case in list(CORPUS.values())[::every]]


def call_item(kind: str, result: Any, **members: Any) -> list[Any]:
    call = {"type": kind, "call_id": "c", "status": "completed", **members}
    return [call, {"type": f"{kind}_output", "call_id": "c", "output": result}]


SHELL_OUTPUT = [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
PATCH = {"type": "update_file", "path": "a", "diff": "+b"}
FOREIGN: dict[str, list[list[Any]]] = {
    CHAT: [
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "custom", "custom": custom}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "Late."},
        ]
        for custom in ({"name": "at", "input": "12:00"}, {"name": "at", "input": ""})
    ],
    MESSAGES: [
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                    {
                        "type": "web_search_tool_result",
                        "tool_use_id": "s",
                        "content": [{"type": "web_search_result", "url": "u", "title": "t"}],
                    },
                    {"type": "text", "text": "x"},
                ],
            }
        ]
    ],
    RESPONSES: [
        call_item("custom_tool_call", "ok", name="at", input="12:00"),
        call_item("local_shell_call", "ok", action={"type": "exec", "command": ["ls"], "env": {}}),
        call_item("shell_call", SHELL_OUTPUT, action={"commands": ["ls"]}),
        call_item("apply_patch_call", "ok", operation=PATCH),
        call_item(
            "computer_call", {"type": "computer_screenshot", "image_url": "x"}, action={"type": "click"}
        ),
        [{"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}}],
        [{"type": "mcp_approval_response", "approval_request_id": "m", "approve": True}],
    ],
}
"""Calls of custom tools, of tools that a vendor defines, and of those that a vendor ran."""


@cache
def corpus(path: str, every: int) -> list[list[Any]]:
    """Conversations with every so-manieth reply of the corpus, with foreign ones, and a newest question."""
    tail = [{"role": "assistant", "content": "Done"}, ASK]
    own = [sent(path, outputs) for outputs in replies(every)]
    return [[ASK, *items, *tail] for items in (*own, *FOREIGN[path])]


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("every", [SOME, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("path", PARSERS)
def test_each_reply_that_we_emit_is_accepted_and_nothing_of_it_is_mended(path: str, every: int):
    for items in corpus(path, every):
        body = mended(path, items)
        PARSERS[path](body, {}, CONTEXT)
        name = FIELDS[path][0]
        assert body.data[name] == parse_body(json.dumps({name: items}).encode()).data[name]


# ----------------------------------------------------------------------------------------- damaged histories

WRONG: list[Any] = [None, 5, True, 1.5, "", HALF, [], {}, ["x"], {"a": [HALF]}, [[1]], [None], [{"type": 5}]]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside."""
    if path:
        yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from places(item, (*path, key))


def damaged(random: Random, items: list[Any]) -> list[Any]:
    """A conversation with one value in front of its newest question damaged."""
    items = json.loads(json.dumps(items))
    *way, last = random.choice(list(places(items[:-1])))
    holder = items
    for key in way:
        holder = holder[key]
    damages: list[Callable[[], None]] = [lambda: holder.__setitem__(last, random.choice(WRONG))] * 3
    if isinstance(holder, dict):
        damages += [lambda: holder.pop(last), lambda: holder.update({f"extra{HALF}": random.choice(WRONG)})]
    random.choice(damages)()
    return items


def check_damaged(path: str, count: int, every: int) -> None:
    random = Random(path)
    for _ in range(count):
        talks = (
            corpus(path, every)[-len(FOREIGN[path]) :]
            if random.random() < FOREIGN_SHARE
            else corpus(path, every)
        )
        items = damaged(random, random.choice(talks))
        try:
            parsed(path, items)
        except InvalidRequest as error:
            raise AssertionError(f"{error.message} {json.dumps(items)}") from error


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("path", PARSERS)
def test_a_thousand_damaged_histories_are_accepted(path: str):
    check_damaged(path, 1000, SOME)


@pytest.mark.long
@pytest.mark.parametrize("path", PARSERS)
def test_ten_thousand_damaged_histories_are_accepted(path: str):
    check_damaged(path, 10_000, 1)


# -------------------------------------------------------------------------------------- what a damage becomes

CALL: dict[str, Any] = {
    "id": "c",
    "type": "function",
    "function": {"name": "read", "arguments": '{"path": "a"}'},
}


def reply_in(path: str, *items: Any) -> Any:
    """The model's first message in a conversation with these items."""
    turns = request(path, [ASK, *items, ASK]).messages
    return next(message for message in turns if message.role == "assistant")


@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"path": "a"}', {"path": "a"}),
        ("half a ca", {"raw": "half a ca"}),
        ("[1]", {"raw": "[1]"}),
        ([1], {"raw": "[1]"}),
        (5, {"raw": "5"}),
        (None, {}),
        ({"path": HALF}, {"path": "x\ufffd"}),
    ],
)
def test_the_input_of_a_call_is_an_object_whatever_a_client_made_of_it(given: Any, arguments: Any):
    block = {"type": "tool_use", "id": "c", "name": "read", "input": given}
    call = {"function": {"name": "read", "arguments": given}, "id": "c"}
    item = {"type": "function_call", "call_id": "c", "name": "read", "arguments": given}
    for path, sent_back in (
        (MESSAGES, {"role": "assistant", "content": [block]}),
        (CHAT, {"role": "assistant", "tool_calls": [call]}),
        (RESPONSES, item),
    ):
        (tool_call,) = reply_in(path, sent_back).tool_calls
        assert (tool_call.name, tool_call.arguments) == ("read", arguments), path


def test_a_half_in_the_text_of_arguments_is_one_character():
    call = {**CALL, "function": {"name": "read", "arguments": '{"path": "x\\ud83d"}'}}
    assert reply_in(CHAT, {"role": "assistant", "tool_calls": [call]}).tool_calls[0].arguments == {
        "path": "x\ufffd"
    }


def test_a_call_without_a_name_becomes_text_beside_the_others():
    broken = {"id": "d", "function": {"arguments": "{}"}}
    message = reply_in(CHAT, {"role": "assistant", "content": "So:", "tool_calls": [CALL, broken]})
    assert [call.id for call in message.tool_calls] == ["c"]
    assert message.content == "So:" + json.dumps(broken)
    assert (
        reply_in(CHAT, {"role": "assistant", "function_call": {"arguments": "{}"}}).content
        == '{"arguments": "{}"}'
    )
    nameless = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    assert reply_in(RESPONSES, nameless).content == json.dumps(nameless)
    block = {"type": "tool_use", "id": "c", "input": {}}
    assert reply_in(MESSAGES, {"role": "assistant", "content": [block]}).content == json.dumps(block)


def test_a_message_without_a_role_is_whose_its_members_say():
    calling = {"content": None, "tool_calls": [CALL]}
    result = {"role": 5, "tool_call_id": "c", "content": "read"}
    roles = [turn.role for turn in request(CHAT, [ASK, calling, result, {"content": "Done"}, ASK]).messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]
    thought = {"content": [{"type": "thinking", "thinking": "Hm"}, {"type": "text", "text": "So"}]}
    assert [turn.role for turn in request(MESSAGES, [ASK, thought, ASK]).messages] == [
        "user",
        "assistant",
        "user",
    ]
    item = {"type": 5, "call_id": "c", "output": "read"}
    done = {"role": "assistant", "content": "Done"}
    assert [turn.role for turn in request(RESPONSES, [ASK, item, done, ASK]).messages] == [
        "user",
        "tool",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize("path", PARSERS)
def test_a_conversation_of_nobody_alternates(path: str):
    first, second, last = {"content": "a"}, "b", {"role": "assistant", "content": "c"}
    turns = request(path, [first, second, last, ASK]).messages
    assert [(turn.role, turn.content) for turn in turns][:2] == [("user", "a"), ("assistant", "b")]


@pytest.mark.parametrize("path", PARSERS)
@pytest.mark.parametrize(
    "newest",
    [{"role": "user", "content": 5}, {"role": "robot", "content": "x"}, {"content": "x"}, "x"],
    ids=str,
)
def test_the_newest_question_is_refused_by_name(path: str, newest: Any):
    name = FIELDS[path][0]
    with pytest.raises(InvalidRequest) as refused:
        parsed(path, [ASK, {"role": "assistant", "content": [5]}, ASK, newest])
    assert (refused.value.param or "").startswith(f"{name}[3]")


@pytest.mark.parametrize("path", PARSERS)
def test_the_places_of_what_was_mended_are_reported(path: str):
    name = FIELDS[path][0]
    body = mended(path, [ASK, {"role": "assistant", "content": 5}, {"role": "user", "content": HALF}, ASK])
    assert reported_paths(body.mended) == (f"{name}[1]", f"{name}[2]")


def test_few_places_are_reported_in_order():
    assert reported_paths({f"messages[{index}]" for index in range(30)}) == tuple(
        f"messages[{index}]" for index in range(20)
    )


def test_a_damage_that_is_too_deep_to_be_written_is_refused():
    deep: Any = "x"
    for _ in range(4000):
        deep = [deep]
    items: Any = [ASK, {"role": "assistant", "content": {"type": 5, "x": deep}}, ASK]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        with_mended_history(CHAT, Fields({"messages": items}))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_part_that_is_nested_deeply_is_read_by_its_text_in_every_turn(path: str):
    part: Any = {"type": "text", "text": "a"}
    for _ in range(440):
        part = {"type": "text", "text": "a", "content": [part]}
    for items in (
        [{**ASK, "content": [part]}],
        [{**ASK, "content": [part]}, {**ASK, "role": "assistant"}, ASK],
    ):
        assert request(path, items).messages[0].content == "a"


def test_a_path_without_a_history_is_left_alone():
    body = Fields({"messages": [{"role": "assistant", "content": 5}]})
    assert with_mended_history("embeddings", body).data == body.data
