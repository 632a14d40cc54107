"""What clients change is no difference, and everything else is one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, chain
from start_llm.core.chat import Message, ToolCall
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.canonical import canonical, for_the_model, root_of
from start_llm.prompt.drift import RULES, Drift

ROOT = CanonicalKey.of(b"")
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;\n"
METADATA = 'Conversation info:\n```json\n{{\n  "message_id": "{}",\n  "sender": "me"\n}}\n```\n'


def calling(call_id: str = "a1", name: str = "read", **arguments: Any) -> tuple[Message, Message]:
    return (
        Message(role="assistant", tool_calls=(ToolCall(call_id, name, arguments or {"path": "x"}),)),
        Message(role="tool", content="found", tool_call_id=call_id),
    )


SYSTEM, ASKED = Message(role="system", content="Be brief."), Message(role="user", content="Where is it?")
SAID = Message(role="assistant", content="Here.", reasoning="Hm.")
CONVERSATION = (SYSTEM, ASKED, *calling(), SAID)


def keys(*messages: Message, **options: Any) -> tuple[CanonicalKey, ...]:
    return chain(ROOT, canonical(in_native_form(messages, "ordinal"), **options))


def test_the_same_conversation_has_the_same_keys_and_a_longer_one_begins_with_them():
    assert keys(*CONVERSATION) == keys(*CONVERSATION)
    assert keys(*CONVERSATION, ASKED)[: len(CONVERSATION)] == keys(*CONVERSATION)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((SYSTEM, ASKED, *calling("b_2"), SAID), id="ids of calls"),
        pytest.param((SYSTEM, replace(ASKED, content="\nWhere is it? \n"), *calling(), SAID), id="ends"),
        pytest.param((SYSTEM, ASKED, *calling(), replace(SAID, reasoning=None)), id="a thought left out"),
        pytest.param((SYSTEM, ASKED, *calling(), replace(SAID, reasoning="Other.")), id="another thought"),
        pytest.param(
            (replace(SYSTEM, content=BILLING.format("d79") + "Be brief."), *CONVERSATION[1:]),
            id="billing header",
        ),
    ],
)
def test_what_clients_change_on_the_way_is_no_difference(changed):
    assert keys(*changed) == keys(*CONVERSATION)


@pytest.mark.parametrize(
    ("at", "changed"),
    [
        (0, (replace(SYSTEM, content="Be long."), *CONVERSATION[1:])),
        (1, (SYSTEM, replace(ASKED, content="Where was it?"), *CONVERSATION[2:])),
        (1, (SYSTEM, replace(ASKED, name="Ann"), *CONVERSATION[2:])),
        (1, (SYSTEM, replace(ASKED, role="system"), *CONVERSATION[2:])),
        (2, (SYSTEM, ASKED, *calling(name="write"), SAID)),
        (2, (SYSTEM, ASKED, *calling(path="y"), SAID)),
        (2, (SYSTEM, ASKED, *calling(path="x", more=1), SAID)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], content="nothing"), SAID)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], tool_call_id="unknown"), SAID)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], tool_references=("late",)), SAID)),
        (4, (*CONVERSATION[:4], replace(SAID, content="There."))),
    ],
)
def test_everything_else_is_one_from_there_on(at, changed):
    same = [ours == theirs for ours, theirs in zip(keys(*changed), keys(*CONVERSATION), strict=True)]
    assert same == [True] * at + [False] * (len(CONVERSATION) - at)


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ({"timeout": 1000.0}, {"timeout": 1000}, True),
        ({"timeout": 0.5}, {"timeout": 0}, False),
        ({"deep": [{"n": 2.0}]}, {"deep": [{"n": 2}]}, True),
        ({"on": True}, {"on": 1}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": None}, {}, False),
    ],
)
def test_the_spelling_of_arguments_is_no_difference_and_their_value_is(left, right, same):
    ours, theirs = (
        Message(role="assistant", tool_calls=(ToolCall("1", "run", arguments),))
        for arguments in (left, right)
    )
    assert (keys(ours) == keys(theirs)) == same


def test_results_of_parallel_calls_may_come_in_any_order_but_not_with_each_others_texts():
    calls = (ToolCall("1", "read", {"path": "x"}), ToolCall("2", "read", {"path": "y"}))
    asked = Message(role="assistant", tool_calls=calls)
    first, second = (Message(role="tool", content=one.name + one.id, tool_call_id=one.id) for one in calls)
    assert keys(asked, first, second) == keys(asked, second, first)
    swapped = (replace(first, content=second.content), replace(second, content=first.content))
    assert keys(asked, first, second)[-1] != keys(asked, *swapped)[-1]
    assert keys(asked, first)[-1] != keys(asked, second)[-1]


# ------------------------------------------------------------------------------------------------------ rules


def test_only_the_header_is_taken_from_the_model_and_only_where_it_stands():
    """Its three digits change with every session."""
    quoted = Message(role="user", content=BILLING.format("d79") + "What is this?")
    later = Message(role="system", content=BILLING.format("d79") + "Go on.")
    first = replace(SYSTEM, content=BILLING.format("d79") + "\nBe brief.")
    assert for_the_model((first, quoted, later)) == (SYSTEM, quoted, later)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ("cc_version=2.1.330.fba; cc_entrypoint=sdk-cli;", "You are a poet.\nBe brief."),
        ("cc_version=2.1.126.d79; cch=d3904;", "You are a poet."),
        ("cc_version=2.1.330.fba; cc_is_subagent=true", "\nYou are a poet."),
        ("cc_version=2.1.330.fba; cc_entrypoint=cli;", "x=1; is code."),
    ],
)
def test_the_text_behind_a_header_is_kept_where_no_line_break_is_between_them(header, text):
    """The header is a part of its own, and parts are joined with nothing."""
    (told,) = for_the_model((replace(SYSTEM, content=f"x-anthropic-billing-header: {header}{text}"),))
    assert told.content == text.lstrip("\n")
    other = replace(SYSTEM, content=f"x-anthropic-billing-header: {header}{text} And a cook.")
    assert keys(told) != keys(other)


def test_a_header_without_its_fields_is_content():
    said = (replace(SYSTEM, content="x-anthropic-billing-header: what is it?\nBe brief."),)
    assert for_the_model(said) == said


def test_a_header_and_nothing_else_is_content():
    alone = (Message(role="system", content=BILLING.format("d79")),)
    assert for_the_model(alone) == alone
    assert keys(*alone) != keys(Message(role="system", content=BILLING.format("a11")))


def test_an_id_in_a_metadata_block_is_ignored_but_not_the_rest_of_it():
    one, other = (replace(ASKED, content=METADATA.format(name) + "Hello") for name in ("m1", "m2"))
    assert keys(one) == keys(other)
    assert keys(one) != keys(replace(one, content=one.content.replace("me", "you")))
    assert for_the_model((one,)) == (one,)
    result = Message(role="tool", content=one.content, tool_call_id="1")
    assert keys(result) != keys(replace(result, content=other.content)), "never inside of a result"


def test_without_rules_only_what_no_client_means_is_left_out():
    headed = replace(SYSTEM, content=BILLING.format("d79") + "Be brief.")
    assert keys(headed, rules=()) != keys(SYSTEM, rules=())
    assert keys(*calling("1"), rules=()) == keys(*calling("2"), rules=())


def test_every_rule_says_whose_it_is():
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.client and rule.drift in get_args(Drift.__value__) for rule in RULES)
    lessons = (Path(__file__).parents[2] / ".context" / "LESSONS.md").read_text(encoding="utf-8")
    assert all(f"\n## {rule.lesson}. " in lessons for rule in RULES)


@given(st.text(max_size=40))
def test_rules_leave_other_texts_alone(text):
    for role in ("system", "user", "tool"):
        message = Message(role=role, content=text, tool_call_id="1" if role == "tool" else None)
        if "billing" not in text and "message_id" not in text:
            assert for_the_model((message,)) == (message,)
            assert keys(message) == keys(message, rules=())


# ------------------------------------------------------------------------------------------------------- root


def test_who_shares_a_root():
    tools = [{"name": "read"}, {"name": "write"}]
    root = root_of({"effort": "low"}, tools, ["21 Nov"]).key(b"")
    assert root == root_of({"effort": "low"}, tools[::-1], ["21 Nov"]).key(b"")
    others = [
        root_of({"effort": "low"}, tools, ["21 Nov"]).key(b"key"),
        root_of({"effort": "high"}, tools, ["21 Nov"]).key(b""),
        root_of({"effort": "low"}, tools[:1], ["21 Nov"]).key(b""),
        root_of({"effort": "low"}, [*tools, tools[0]], ["21 Nov"]).key(b""),
        root_of({"effort": "low"}, tools, ["22 Nov"]).key(b""),
    ]
    assert len({root, *others}) == 6
