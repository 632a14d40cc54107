"""A client's changes make no difference, and everything else makes one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, OmittedText, chain
from start_llm.core.chat import Message, ToolCall
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.canonical_form import canonical, for_the_model, root_of, rules_of
from start_llm.prompt.drift import RULES, Drift

ROOT = CanonicalKey.of(b"")
BILLING = "x-anthropic-billing-header: cc_version=2.1.329.{}; cc_entrypoint=sdk-cli;\n"
METADATA = 'Conversation info:\n```json\n{{\n  "message_id": "{}",\n  "sender": "me"\n}}\n```\n'
TODAY, ZONE, CLOCK = "Today's date: {}\n", "Time zone: {}\n", "Current time is {}\n"


def calling(call_id: str = "a1", name: str = "read", **arguments: Any) -> tuple[Message, Message]:
    return (
        Message(role="assistant", tool_calls=(ToolCall(call_id, name, arguments or {"path": "x"}),)),
        Message(role="tool", content="found", tool_call_id=call_id),
    )


SYSTEM, ASKED = Message(role="system", content="Be brief."), Message(role="user", content="Where is it?")
REPLY = Message(role="assistant", content="Here.", reasoning="Hm.")
CONVERSATION = (SYSTEM, ASKED, *calling(), REPLY)


def keys(*messages: Message, **options: Any) -> tuple[CanonicalKey, ...]:
    return chain(ROOT, canonical(in_native_form(messages, "ordinal"), **options))


def test_the_same_conversation_has_the_same_keys_and_a_longer_one_begins_with_them():
    assert keys(*CONVERSATION) == keys(*CONVERSATION)
    assert keys(*CONVERSATION, ASKED)[: len(CONVERSATION)] == keys(*CONVERSATION)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param((SYSTEM, ASKED, *calling("b_2"), REPLY), id="ids of calls"),
        pytest.param((SYSTEM, replace(ASKED, content="Where is it? \n"), *calling(), REPLY), id="an end"),
        pytest.param((SYSTEM, ASKED, *calling(), replace(REPLY, content="Here.\n")), id="an end of a reply"),
        pytest.param((SYSTEM, ASKED, *calling(), replace(REPLY, reasoning=None)), id="reasoning left out"),
        pytest.param((SYSTEM, ASKED, *calling(), replace(REPLY, reasoning="Other.")), id="other reasoning"),
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
        (1, (SYSTEM, replace(ASKED, content="\nWhere is it?"), *CONVERSATION[2:])),
        (1, (SYSTEM, replace(ASKED, name="Ann"), *CONVERSATION[2:])),
        (1, (SYSTEM, replace(ASKED, role="system"), *CONVERSATION[2:])),
        (2, (SYSTEM, ASKED, *calling(name="write"), REPLY)),
        (2, (SYSTEM, ASKED, *calling(path="y"), REPLY)),
        (2, (SYSTEM, ASKED, *calling(path="x", more=1), REPLY)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], content="nothing"), REPLY)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], content=" found"), REPLY)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], content="found\n"), REPLY)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], tool_call_id="unknown"), REPLY)),
        (3, (SYSTEM, ASKED, calling()[0], replace(calling()[1], tool_references=("late",)), REPLY)),
        (4, (*CONVERSATION[:4], replace(REPLY, content="There."))),
        (4, (*CONVERSATION[:4], replace(REPLY, content=" Here."))),
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
    first, second = (
        Message(role="tool", content=call.name + call.id, tool_call_id=call.id) for call in calls
    )
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
def test_the_text_after_a_header_is_kept_where_no_line_break_is_between_them(header, text):
    """The header is a part of its own, and parts are joined with nothing."""
    (message,) = for_the_model((replace(SYSTEM, content=f"x-anthropic-billing-header: {header}{text}"),))
    assert message.content == text.lstrip("\n")
    other = replace(SYSTEM, content=f"x-anthropic-billing-header: {header}{text} And a cook.")
    assert keys(message) != keys(other)


def test_a_header_without_its_fields_is_content():
    messages = (replace(SYSTEM, content="x-anthropic-billing-header: what is it?\nBe brief."),)
    assert for_the_model(messages) == messages


def test_a_header_and_nothing_else_is_content():
    alone = (Message(role="system", content=BILLING.format("d79")),)
    assert for_the_model(alone) == alone
    assert keys(*alone) != keys(Message(role="system", content=BILLING.format("a11")))


def test_what_a_client_puts_before_words_is_not_compared_and_what_stands_elsewhere_is():
    first, other = (replace(ASKED, content=METADATA.format(name) + "Hello") for name in ("m1", "m2"))
    assert keys(first) == keys(other) == keys(replace(first, content="Hello"))
    assert keys(first) != keys(replace(first, content=first.content.replace("Hello", "Hullo")))
    assert for_the_model((first,)) == (first,)
    for before in ("I got this:\n", " ", "\n"):
        quoted, changed = (replace(message, content=before + message.content) for message in (first, other))
        assert keys(quoted) != keys(changed), "what somebody quotes is content"
    result = Message(role="tool", content=first.content, tool_call_id="1")
    assert keys(result) != keys(replace(result, content=other.content)), "never inside of a result"


def test_without_rules_only_what_no_client_means_is_left_out():
    headed = replace(SYSTEM, content=BILLING.format("d79") + "Be brief.")
    assert keys(headed, rules=()) != keys(SYSTEM, rules=())
    assert keys(*calling("1"), rules=()) == keys(*calling("2"), rules=())


def test_the_policy_exact_leaves_out_transport_alone():
    assert {rule.drift for rule in rules_of("exact")} == {"transport"}
    assert set(rules_of("exact")) < set(rules_of("note")) == set(RULES)
    message = replace(SYSTEM, content=BILLING.format("d79") + TODAY.format("2026-11-21") + "Be brief.\n")
    (exact,) = canonical([message], rules=rules_of("exact"))
    assert exact.data.endswith(b"\0Today's date: 2026-11-21\nBe brief.")
    assert names(exact.omitted) == ["white space"], "also without any rule"


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


# ----------------------------------------------------------------------------------------- what is left out


def left_out(message: Message) -> tuple[OmittedText, ...]:
    return canonical([message])[0].omitted


def names(omitted: tuple[OmittedText, ...]) -> list[str]:
    return [omission.name for omission in omitted]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("end", ["\n", "  ", "\n\n\t", "\u00a0"])
def test_white_space_at_the_end_of_a_text_is_kept_as_it_stands(role, end):
    assert left_out(Message(role=role, content=f" Where is it?{end}")) == (
        OmittedText("white space", "space", len(" Where is it?"), end),
    )


@pytest.mark.parametrize(
    "message",
    [
        ASKED,
        replace(ASKED, content="\n\n  Where is it?"),
        replace(ASKED, content="Where  is\n\nit?"),
        replace(calling()[1], content="\n found \n\n"),
        replace(calling()[1], content=f"{CLOCK.format('10:00')}found"),
        Message(role="user"),
    ],
    ids=["none", "a beginning", "the middle", "a result", "a line in a result", "nothing said"],
)
def test_all_other_white_space_and_all_of_a_result_is_content(message):
    (compared,) = canonical([message])
    assert compared.omitted == ()
    assert compared.data.endswith(b"\0" + message.content.encode())
    assert compared.omitted_chars == 0


def test_white_space_after_a_line_that_is_left_out_counts_where_it_stands():
    clock, space = left_out(replace(ASKED, content=f"Go.\n{CLOCK.format('10:00')} \n"))
    assert (clock.place, clock.text) == (4, "Current time is 10:00\n")
    assert (space.place, space.text) == (3, "\n \n")


def test_each_line_of_a_rule_is_an_item_in_its_place():
    name = "current time of a message"
    text = f"{CLOCK.format('10:00:31')}Go.\n  {CLOCK.format('11:00')}Now."
    assert left_out(replace(ASKED, content=text)) == (
        OmittedText(name, "live", 0, "Current time is 10:00:31\n", "Current time is 10:00:31", is_clock=True),
        OmittedText(name, "live", 4, "  Current time is 11:00\n", "Current time is 11:00", is_clock=True),
    )


def test_places_do_not_count_what_is_left_out_before_them():
    _, short = left_out(replace(SYSTEM, content=f"{TODAY.format('2026-11-21')}Go.\n{ZONE.format('UTC')}Now."))
    headed = BILLING.format("d79") + TODAY.format("Saturday, November 21, 2026")
    _, long = left_out(replace(SYSTEM, content=f"{headed}Go.\n{ZONE.format('UTC')}Now."))
    assert short == long
    assert short.place == len("Go.\n")


def test_lines_that_change_places_change_the_order_of_the_items():
    date, zone = TODAY.format("2026-11-21"), ZONE.format("UTC")
    first, other = (replace(SYSTEM, content=f"{lines}Be brief.") for lines in (date + zone, zone + date))
    assert keys(first) == keys(other)
    assert names(left_out(first)) == ["today's date", "time zone"]
    assert names(left_out(other)) == ["time zone", "today's date"]


def test_a_line_that_moves_has_another_place():
    clock = CLOCK.format("10:00")
    texts = (f"{clock}Go.\nNow.", f"Go.\n{clock}Now.")
    (front,), (after,) = (left_out(replace(ASKED, content=text)) for text in texts)
    assert (front.place, after.place) == (0, 4)


LINES = [TODAY.format("2026-11-21"), CLOCK.format("10:00"), "Go.\n", "\n", " "]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_what_is_compared_and_what_is_left_out_are_the_whole_text(role):
    """No two texts have both alike: what is equal in both may be read in place of it without a proof."""
    texts = {"".join(lines) for count in range(5) for lines in product(LINES, repeat=count)}
    seen = dict[tuple[bytes, tuple[OmittedText, ...]], str]()
    for text in sorted(texts):
        (compared,) = canonical([Message(role=role, content=text)])
        same = seen.setdefault((compared.data, compared.omitted), text)
        assert same == text


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
