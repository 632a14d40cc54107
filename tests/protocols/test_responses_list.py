"""The items that a kept response answered, in pages."""

from typing import Any

import pytest

from start_llm.core.errors import InvalidRequest, NotFound
from start_llm.core.events import Content, Finished
from start_llm.protocols.base import RequestContext
from start_llm.protocols.fields import Fields
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.responses.create import parse
from start_llm.protocols.responses.stored_responses import input_items
from tests.protocols.helpers import CONTEXT, USAGE, body

ITEMS = [
    {"role": "user", "content": "One", "id": "mine"},
    {"type": "message", "role": "assistant", "content": "Two"},
    {"type": "function_call", "name": "read", "arguments": "{}", "call_id": "c1"},
    {"type": "function_call_output", "call_id": "c1", "output": "three"},
]


@pytest.fixture
def context() -> RequestContext:
    return RequestContext(CONTEXT.model, CONTEXT.tenant, CONTEXT.seal, ResponseStore())


def answered(context: RequestContext) -> str:
    """The id of a response to `ITEMS`."""
    reply = parse(body(input=ITEMS), {}, context).reply
    reply.whole([Content("Four")], Finished("stop", USAGE))
    return reply.id


def listed(context: RequestContext, name: str, **asked: str) -> Any:
    return input_items(context.responses, context.tenant, name, Fields(asked))


def test_the_newest_item_comes_first_and_each_has_an_id(context):
    page = listed(context, answered(context))
    assert [item["type"] for item in page["data"]] == [
        "function_call_output",
        "function_call",
        "message",
        "message",
    ]
    assert page["data"][2]["content"] == [{"type": "output_text", "text": "Two"}]
    assert page["data"][3]["content"] == [{"type": "input_text", "text": "One"}]
    ids = [item["id"] for item in page["data"]]
    assert (len(set(ids)), ids[-1]) == (4, "mine")
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], "mine", False)


def test_pages_follow_each_other(context):
    name = answered(context)
    whole = listed(context, name, order="asc")["data"]
    first = listed(context, name, order="asc", limit="3")
    second = listed(context, name, order="asc", limit="3", after=first["last_id"])
    assert [*first["data"], *second["data"]] == whole
    assert (first["has_more"], second["has_more"]) == (True, False)
    assert listed(context, name, order="asc", after=whole[-1]["id"]) == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }


def test_another_tenant_finds_nothing(context):
    name = answered(context)
    other = RequestContext(context.model, b"another", context.seal, context.responses)
    with pytest.raises(NotFound):
        listed(other, name)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "²"}, "limit"),
        ({"order": "up"}, "order"),
    ],
)
def test_what_cannot_be_asked_is_named(context, asked, param):
    with pytest.raises(InvalidRequest) as refused:
        listed(context, answered(context), **asked)
    assert refused.value.param == param


def test_an_item_that_is_not_there_is_not_found(context):
    with pytest.raises(NotFound, match="nothing_like_it"):
        listed(context, answered(context), after="nothing_like_it")
