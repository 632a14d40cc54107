"""A conversation is fitted to its template: nothing that the client said is lost, and all stays in order."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.family import Family
from start_llm.formats import registry
from start_llm.prompt import changes
from start_llm.prompt.adapt import ADAPTATIONS, Adapted, adapt
from start_llm.prompt.call_ids import Calls, in_native_form
from start_llm.prompt.changes import PromptTurn
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template_audit.facts import TemplateFacts
from tests.prompt.fakes import (
    FakeTokenizer,
    call,
    function,
    prepared,
    preparer_of,
    reply,
    result,
    shown,
    system,
    text_of,
    user,
)
from tests.templates.traits import TRAITS

WRITE = function("write", path={"type": "string"}, text={"type": "string"})
READ = function("read", path={"type": "string"})
LATE = function("latetool", latekey={"type": "string"})
CALLS_AS_TEXT = [trait for trait in TRAITS if not preparer_of(trait).facts.takes_calls]
NATIVE_CALLS = [trait for trait in TRAITS if trait not in CALLS_AS_TEXT]

type Change = Callable[[list[PromptTurn], ChatRequest], list[PromptTurn]]


def turns_of(*messages: Message) -> list[PromptTurn]:
    return [PromptTurn(message, index) for index, message in enumerate(messages)]


def after(change: Change, *messages: Message, **request: object) -> list[tuple[str, str, int]]:
    """Role, text and last message of every turn."""
    turns = change(turns_of(*messages), ChatRequest(messages=messages, **request))  # pyright: ignore[reportArgumentType]
    return [(turn.message.role, turn.message.content, turn.last) for turn in turns]


def adapted(*messages: Message, **facts: object) -> Adapted:
    known = TemplateFacts(**facts)  # pyright: ignore[reportArgumentType]
    return adapt(ChatRequest(messages=in_native_form(messages, known.call_ids)), known)


def in_order(text: str, *words: str) -> bool:
    place = 0
    for word in words:
        place = text.find(word, place) + 1
        if not place:
            return False
    return True


def only_at(text: str, *words: str) -> bool:
    return all(text.count(word) == 1 for word in words)


# ---------------------------------------------------------------------------------------- each row by itself


def test_a_template_that_takes_everything_gets_what_the_client_said():
    talk = (
        system("a"),
        user("b"),
        user("c"),
        reply("d", call("x", path="p"), call("y"), reasoning="e"),
        result("f", "x"),
        result("g", "y"),
        system("h"),
        user("i"),
    )
    fitted = adapted(*talk, reasoning_key="reasoning")
    assert fitted.lasts == list(range(8))
    assert [(message["role"], message["content"]) for message in fitted.messages] == [
        (message.role, message.content) for message in talk
    ]
    assert fitted.messages[3]["reasoning"] == "e"
    assert fitted.messages[3]["tool_calls"] == [
        {"id": "call0", "type": "function", "function": {"name": "write", "arguments": {"path": "p"}}},
        {"id": "call1", "type": "function", "function": {"name": "write", "arguments": {}}},
    ]
    assert [fitted.messages[i]["tool_call_id"] for i in (4, 5)] == ["call0", "call1"]


def test_every_row_with_words_is_for_some_templates_only():
    takes_all = TemplateFacts()
    assert [row for row in ADAPTATIONS if row.description and row.applies(takes_all)] == []
    assert [row for row in ADAPTATIONS if not row.description and not row.applies(takes_all)] == []


@pytest.mark.parametrize("row", ADAPTATIONS, ids=lambda row: row.change.__name__)
def test_a_change_leaves_what_it_was_given_as_it_was(row):
    request = ChatRequest(messages=SPEECH, tools=(WRITE,), late_tools=(LATE,))
    turns = turns_of(*map(Calls("ordinal").renamed, SPEECH))
    given_to_it = list(turns)
    changed = row.change(turns, request)
    assert turns == given_to_it
    assert row.change(turns, request) == changed


def test_late_tools_are_described_where_they_are_referred_to():
    referring = Message(role="tool", content="", tool_call_id="c", tool_references=("latetool", "gone"))
    rows = after(changes.show_late_tools, user("a"), referring, late_tools=(LATE, READ))
    assert rows == [("user", "a", 0), ("tool", f"{json.dumps(LATE)}\ngone", 1)]
    spoken = replace(referring, content="Found:")
    assert after(changes.show_late_tools, spoken, late_tools=(LATE,)) == [
        ("tool", f"Found:\n{json.dumps(LATE)}\ngone", 0)
    ]


def test_a_result_without_a_call_becomes_the_users_text():
    rows = after(changes.tell_unknown_results, result("a", None), result("b", None, name="read"), result("c"))
    assert rows == [
        ("user", "[Result of a tool]\na", 0),
        ("user", "[Result of read]\nb", 1),
        ("tool", "c", 2),
    ]


def test_tools_are_described_after_the_system_text_or_before_all():
    with_system = after(changes.tell_tools, system("Be brief."), user("a"), tools=(WRITE, READ))
    alone = after(changes.tell_tools, user("a"), tools=(WRITE, READ))
    schemas = f"{json.dumps(WRITE)}\n{json.dumps(READ)}"
    assert with_system[0][1].startswith(f"Be brief.\n\nYou have these tools:\n{schemas}\n")
    assert alone[0][1].startswith(f"You have these tools:\n{schemas}\n")
    assert [(role, last) for role, _, last in alone] == [("system", -1), ("user", 0)]
    assert after(changes.tell_tools, user("a")) == [("user", "a", 0)]


def test_calls_and_results_are_written_in_the_form_that_the_model_was_shown():
    made = reply("I ask.", call("x", path="ä"), call("y", "now"))
    writing = '<tool_call>{"name": "write", "arguments": {"path": "ä"}}</tool_call>'
    asking = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert after(changes.write_calls, made, result("r", "y")) == [
        ("assistant", f"I ask.\n\n{writing}\n{asking}", 0),
        ("user", "[Result of now]\nr", 1),
    ]


def test_calls_are_written_in_the_form_of_the_models_format_where_it_has_one():
    write = registry.family_by_name("lfm2").write_calls
    made = reply("I ask.", call("x", path="ä"), call("y", "now"))
    shown = "<|tool_call_start|>[write(path='ä'), now()]<|tool_call_end|>"
    facts = TemplateFacts(takes_calls=False, takes_tools=False, write_calls=write)
    request = ChatRequest(messages=(user("a"), made, result("r", "y")), tools=(WRITE,))
    messages = adapt(request, facts).messages
    assert [message["content"] for message in messages[2:]] == [f"I ask.\n\n{shown}", "[Result of now]\nr"]
    hint = "To call one, answer with <|tool_call_start|>[NAME(KEY='VALUE')]<|tool_call_end|> and nothing"
    assert hint in str(messages[0]["content"])


def test_calls_are_made_one_after_the_other_with_their_results():
    both = reply("text", call("x"), call("y"), call("z"), reasoning="reasoning")
    talk = (both, result("of y", "y"), user("aside"), result("of x", "x"), result("of x too", "x"))
    turns = changes.serialise_calls(turns_of(*talk), ChatRequest(messages=talk))
    assert [
        ([entry.id for entry in turn.message.tool_calls] or turn.message.content, turn.last) for turn in turns
    ] == [(["x"], 0), ("of x", 3), ("of x too", 4), (["y"], 0), ("of y", 1), (["z"], 0), ("aside", 2)]
    assert [turn.message.content for turn in turns if turn.message.tool_calls] == ["text", "", ""]
    assert [turn.message.reasoning for turn in turns if turn.message.tool_calls] == ["reasoning", None, None]


def test_a_single_call_stays_where_it_is():
    talk = (reply("a", call("x")), user("b"), result("c", "x"))
    assert changes.serialise_calls(turns_of(*talk), ChatRequest(messages=talk)) == turns_of(*talk)


def test_a_late_system_message_is_a_marked_user_turn_in_its_place():
    talk = (system("a"), system("b"), user("c"), system("d"), reply("e"), system("f"))
    assert after(changes.mark_late_systems, *talk) == [
        ("system", "a\n\nb", 1),
        ("user", "c", 2),
        ("user", "[System message]\nd", 3),
        ("assistant", "e", 4),
        ("user", "[System message]\nf", 5),
    ]
    assert after(changes.mark_late_systems, user("c"), system("d")) == [
        ("user", "c", 0),
        ("user", "[System message]\nd", 1),
    ]


def test_a_system_message_opens_the_first_user_turn():
    talk = adapted(
        system("a"), user("b"), takes_system=False, takes_late_system=False, takes_neighbours=False
    )
    assert talk.messages == [{"role": "user", "content": "a\n\nb"}]
    assert talk.lasts == [1]


def test_user_text_after_a_result_is_joined_to_it():
    talk = (reply("", call("x")), result("a", "x"), user("b"), user("c"), reply("d"), user("e"))
    assert after(changes.join_to_results, *talk) == [
        ("assistant", "", 0),
        ("tool", "a\n\n[User message]\nb\n\n[User message]\nc", 3),
        ("assistant", "d", 4),
        ("user", "e", 5),
    ]


def test_user_text_after_a_call_that_has_no_result_is_its_result():
    talk = (reply("", call("x"), call("y")), user("Stop!"), user("Go!"))
    turns = changes.join_to_results(turns_of(*talk), ChatRequest(messages=talk))
    assert [(turn.message.role, turn.last) for turn in turns] == [("assistant", 0), ("tool", 2)]
    assert turns[1].message.tool_call_id == "y"
    assert turns[1].message.content == "[User message]\nStop!\n\n[User message]\nGo!"


def test_neighbours_of_one_role_are_merged():
    talk = (user("a"), user("b"), reply("c", reasoning="d"), reply("", call("x"), reasoning="e"), user("f"))
    turns = changes.merge_neighbours(turns_of(*talk), ChatRequest(messages=talk))
    assert [(turn.message.content, turn.last) for turn in turns] == [("a\n\nb", 1), ("c", 3), ("f", 4)]
    assert turns[1].message.reasoning == "d\n\ne"
    assert [entry.id for entry in turns[1].message.tool_calls] == ["x"]


def test_results_and_what_follows_calls_are_not_merged():
    talk = (reply("a", call("x"), call("y")), reply("b"), result("c", "x"), result("d", "y"))
    assert changes.merge_neighbours(turns_of(*talk), ChatRequest(messages=talk)) == turns_of(*talk)


def test_text_beside_calls_is_parted_from_them():
    talk = (reply("a", call("x"), reasoning="b"), reply(" \n", call("y"), reasoning="c"), reply("d"))
    turns = changes.part_text_from_calls(turns_of(*talk), ChatRequest(messages=talk))
    assert [
        (turn.message.content, turn.message.reasoning, bool(turn.message.tool_calls), turn.last)
        for turn in turns
    ] == [("a", "b", False, 0), ("", None, True, 0), (" \n", "c", True, 1), ("d", None, False, 2)]


def test_text_beside_calls_that_can_stand_nowhere_opens_the_first_result():
    talk = (reply("I ask.", call("x"), call("y")), result("a", "x"), result("b", "y"), reply("c", call("z")))
    assert after(changes.move_text_to_results, *talk) == [
        ("assistant", "", 1),
        ("tool", "[Text before the call]\nI ask.\n\na", 1),
        ("tool", "b", 2),
        ("assistant", "c", 3),
        ("assistant", "", 3),
    ]


def test_a_result_names_its_tool_where_the_template_wants_it():
    talk = (user("a"), reply("", call("x", "now"), call("y")), result("b", "y"), result("c", "x"))
    seen = adapted(*talk, results_need_names=True).messages
    assert [message.get("name") for message in seen] == [None, None, "now", "write"]
    assert not any("name" in message for message in adapted(*talk).messages)


def test_an_empty_question_precedes_a_reply_that_may_not_be_first():
    assert after(changes.ask_before_replies, system("a"), reply("b"), user("c")) == [
        ("system", "a", 0),
        ("user", "", -1),
        ("assistant", "b", 1),
        ("user", "c", 2),
    ]
    assert after(changes.ask_before_replies, reply("b")) == [("user", "", -1), ("assistant", "b", 0)]
    for talk in ((user("a"), reply("b")), (system("a"),)):
        assert [content for _, content, _ in after(changes.ask_before_replies, *talk)] == [
            message.content for message in talk
        ]


def test_texts_in_calls_are_escaped_for_a_template_that_only_quotes_them():
    talk = (user("a"), reply("", call("x", text='it\'s "so"\n\\n', lines=["it's"])))
    for quote, text in (("'", 'it\\\'s "so"\\n\\\\n'), ('"', 'it\'s \\"so\\"\\n\\\\n')):
        message: Any = adapted(*talk, quotes_texts=quote).messages[1]
        (seen,) = message["tool_calls"]
        assert seen["function"]["arguments"] == {"text": text, "lines": ["it's"]}


def test_tools_have_a_system_message_beside_them():
    asked, ruled = user("a"), system("b")
    assert after(changes.put_system_beside_tools, asked, tools=(WRITE,)) == [
        ("system", "", -1),
        ("user", "a", 0),
    ]
    assert after(changes.put_system_beside_tools, ruled, asked, tools=(WRITE,))[0] == ("system", "b", 0)
    assert after(changes.put_system_beside_tools, asked) == [("user", "a", 0)]


def test_calls_are_written_where_no_tools_are_offered():
    talk = (reply("", call("x", "now")), result("a", "x"))
    written = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert after(changes.write_calls_without_tools, *talk) == [
        ("assistant", written, 0),
        ("user", "[Result of now]\na", 1),
    ]
    assert after(changes.write_calls_without_tools, *talk, tools=(WRITE,)) == [
        ("assistant", "", 0),
        ("tool", "a", 1),
    ]


def test_empty_replies_are_left_out():
    talk = (user("a"), reply(" \n", reasoning="b"), reply("", call("x")), user("c"), reply("d"))
    assert after(changes.leave_out_empty_replies, *talk) == [
        ("user", "a", 0),
        ("assistant", "", 2),
        ("user", "c", 3),
        ("assistant", "d", 4),
    ]


def test_an_empty_question_stands_after_the_system_text_where_nobody_asks():
    assert after(changes.ask_nothing, system("a"), system("b"), reply("c")) == [
        ("system", "a", 0),
        ("system", "b", 1),
        ("user", "", -1),
        ("assistant", "c", 2),
    ]
    assert after(changes.ask_nothing, system("a"), user("b")) == [("system", "a", 0), ("user", "b", 1)]


def test_an_empty_message_is_a_space_where_it_must_say_something():
    talk = (user(""), reply(""), reply("", call("x")), result("", "x"))
    facts = {"refuses_empty": frozenset({"assistant", "tool"})}
    assert [message["content"] for message in adapted(*talk, **facts).messages] == ["", " ", "", " "]


def test_white_space_beside_calls_is_no_text_where_none_is_shown():
    (kept,), (set_in,) = (
        adapted(reply(" \n", call("x")), text_beside_calls=way).messages for way in ("kept", "set in")
    )
    assert (kept["content"], set_in["content"]) == (" \n", "")


def test_reasoning_that_would_hide_what_stands_beside_it_is_not_passed():
    talk = (reply("a", reasoning="b"), reply("", call("x"), reasoning="c"))
    shown_beside = {
        hidden: [
            "thinking" in message
            for message in adapted(*talk, reasoning_key="thinking", reasoning_hide=hidden).messages
        ]
        for hidden in (frozenset[str](), frozenset({"answers"}), frozenset({"calls"}))
    }
    assert list(shown_beside.values()) == [[True, True], [False, True], [True, False]]


# -------------------------------------------------------------------------------------- rows on their traits

SPEECH = (
    system("sysfirst"),
    user("askone"),
    user("asktwo"),
    reply("textone", call("x", path="pathone"), call("y", "read", path="pathtwo"), reasoning="thoughtone"),
    result("resultone", "x"),
    result("resulttwo", "y"),
    user("askthree"),
    system("syslate"),
    reply("texttwo", call("z", path="paththree")),
    result("resultthree", "z"),
    reply("textthree"),
    reply("textfour"),
    user("askfour"),
)
WORDS = (
    "sysfirst askone asktwo textone pathone resultone pathtwo resulttwo askthree syslate texttwo paththree "
    "resultthree textthree textfour askfour"
).split()
PARALLEL_WORDS = [word for word in WORDS if word not in ("resultone", "pathtwo")]
MOVED = {
    # The tools and the system text stand beside the last user message.
    "tools_before_last_user": (
        "askone asktwo textone pathone pathtwo resultone resulttwo askthree syslate texttwo paththree "
        "resultthree textthree textfour sysfirst askfour"
    ).split(),
}


@pytest.mark.parametrize("trait", TRAITS)
def test_nothing_that_a_client_says_is_lost_and_all_is_in_order(trait):
    text = shown(trait, *SPEECH, tools=(WRITE, READ))
    assert only_at(text, *WORDS)
    is_serial = not preparer_of(trait).facts.takes_parallel_calls
    assert in_order(text, *MOVED.get(trait, WORDS if is_serial else PARALLEL_WORDS))
    assert "What write does." in text
    assert "What read does." in text


LATE_SYSTEMS_MARKED = [trait for trait in TRAITS if not preparer_of(trait).facts.takes_late_system]


@pytest.mark.parametrize("trait", TRAITS)
def test_a_late_system_message_stays_in_place_and_is_marked_where_it_cannot_be_one(trait):
    text = shown(trait, user("one"), reply("two"), system("late"), user("three"))
    assert in_order(text, "one", "two", "late", "three")
    assert ("[System message]\nlate" in text) == (trait in LATE_SYSTEMS_MARKED)


def test_a_system_message_in_front_is_not_marked():
    assert "[System message]" not in shown("no_system", system("a"), user("b"))
    assert shown("no_system", system("a"), user("b")).startswith("<bos><start_of_turn>user\na\n\nb<end")


@pytest.mark.parametrize("trait", TRAITS)
def test_a_conversation_that_a_client_may_have_is_not_refused(trait):
    interrupted = (user("asked"), reply("", call("x"), call("y")), user("stop"), reply("right"), user("more"))
    assert in_order(shown(trait, *interrupted), "asked", "stop", "right", "more")
    half = (user("asked"), reply("", call("x"), call("y")), result("half", "y"), user("more"))
    assert in_order(shown(trait, *half), "asked", "half", "more")
    continued = (user("asked"), reply("begun", call("x")), result("found", "x"), reply("left"))
    assert in_order(shown(trait, *continued), "asked", "found", "left")
    aside = (user("asked"), reply("", call("x")), system("aside"), result("found", "x"))
    assert in_order(shown(trait, *aside), "asked", "aside", "found")


@pytest.mark.parametrize("trait", TRAITS)
def test_a_result_without_a_known_call_is_shown(trait):
    orphan = (user("asked"), result("orphanage", "nobody"), reply("", call("x")), result("known", "x"))
    text = shown(trait, *orphan)
    assert in_order(text, "asked", "[Result of a tool]", "orphanage", "known")
    assert "[Result of read]\norphanage" in shown(
        trait, user("asked"), result("orphanage", "no", name="read")
    )


@pytest.mark.parametrize("trait", CALLS_AS_TEXT)
def test_a_model_without_calls_is_shown_how_to_make_them(trait):
    text = shown(trait, user("asked"), reply("", call("x", path="p")), result("r", "x"), tools=(WRITE,))
    assert in_order(
        text,
        json.dumps(WRITE),
        "To call one, answer with",
        "asked",
        '<tool_call>{"name": "write", "arguments": {"path": "p"}}</tool_call>',
        "[Result of write]\nr",
    )


def test_text_beside_calls_stands_in_a_turn_of_its_own():
    text = shown("dates", user("a"), reply("I ask.", call("x", path="p")), result("r", "x"))
    assert (
        "\n\nI ask.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
        '{"name": "write", "parameters": {"path": "p"}}<|eot_id|>'
    ) in text


def test_text_beside_calls_is_set_in_where_the_model_wrote_it():
    talk = user("a"), reply("I ask.", call("x", path="p")), result("r", "x")
    assert '[/INST]I ask.[TOOL_CALLS][{"name": "write", ' in shown("tools_before_last_user", *talk)
    assert "<|turn>model\nI ask.<|tool_call>call:write{" in shown("text_after_calls", *talk)


def test_text_before_a_call_is_commentary_where_messages_have_channels():
    asked, reasoning = user("a"), "I should."
    text = shown(
        "strict_channels", asked, reply("I ask.", call("x", path="p"), reasoning=reasoning), result("r", "x")
    )
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>I should.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I ask.<|end|>"
        "<|start|>assistant to=functions.write<|channel|>commentary json<|message|>"
        '{"path": "p"}<|call|><|start|>functions.write to=assistant<|channel|>commentary<|message|>r<|end|>'
        "<|start|>assistant"
    )


def test_calls_are_serialised_with_their_results():
    talk = (
        user("a"),
        reply("", call("x", path="p"), call("y", path="q")),
        result("r", "x"),
        result("s", "y"),
    )
    assert in_order(shown("dates", *talk), '"p"', "r<|eot_id|>", '"q"', "s<|eot_id|>")


def test_a_space_that_the_template_writes_is_taken_from_the_answer_once():
    assert shown("plain", user("a"), reply(" b"), user("c")) == shown(
        "plain", user("a"), reply("b"), user("c")
    )
    assert "ASSISTANT:  b</s>" in shown("plain", user("a"), reply("  b"), user("c"))
    assert "USER:  a\n" in shown("plain", user(" a"))


def test_arguments_are_text_where_the_template_adds_them_to_text():
    text = shown("arguments_as_text", user("a"), reply("", call(path="ä", text='"')))
    assert '<｜tool▁sep｜>{"path": "ä", "text": "\\""}<｜tool▁call▁end｜>' in text


# ------------------------------------------------------------------------------------------------ late tools

LATE_TOOL_RESULT = Message(role="tool", content="", tool_call_id="x", tool_references=("latetool",))
SEARCHING = (user("asked"), reply("", call("x", "search")), LATE_TOOL_RESULT, reply("right"), user("more"))


@pytest.mark.parametrize("trait", TRAITS)
def test_a_late_tool_stands_where_it_is_referred_to(trait):
    text = shown(trait, *SEARCHING, tools=(WRITE,), late_tools=(LATE,))
    # Some templates write a result as JSON.
    assert in_order(text.replace('\\"', '"'), "asked", "search", json.dumps(LATE), "right", "more")
    assert text.count("latetool") == json.dumps(LATE).count("latetool")


@pytest.mark.parametrize("trait", TRAITS)
def test_one_more_late_tool_changes_no_token(trait):
    first, two = (
        prepared(trait, *SEARCHING, tools=(WRITE,), late_tools=late) for late in ((LATE,), (LATE, READ))
    )
    assert first == two
    without = prepared(trait, user("asked"), tools=(WRITE,))
    assert prepared(trait, user("asked"), tools=(WRITE,), late_tools=(LATE,)) == without


def test_a_reference_leaves_the_prefix_as_it_was():
    before = prepared("strips_old_reasoning", *SEARCHING[:2], tools=(WRITE,))
    after_it = prepared("strips_old_reasoning", *SEARCHING, tools=(WRITE,), late_tools=(LATE,))
    kept = before.boundaries[-1].tokens
    assert before.boundaries[-1].message == 1
    assert after_it.tokens.ids[:kept] == before.tokens.ids[:kept]


# ------------------------------------------------------------------------------------------------------- ids


def ids_of(*messages: Message, style: str = "ordinal") -> list[str | None]:
    """Ids of calls and of what the results answer."""
    ids: list[str | None] = []
    for message in map(Calls(style).renamed, messages):  # pyright: ignore[reportArgumentType]
        ids += [made_call.id for made_call in message.tool_calls]
        ids += [message.tool_call_id] if message.role == "tool" else []
    return ids


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("ordinal", ["call0", "call1", "call1", "call0", "call2", "call2"]),
        ("nine", ["000000000", "000000001", "000000001", "000000000", "000000002", "000000002"]),
        (
            "kimi",
            ["functions.write:0", "functions.read:1", "functions.read:1", "functions.write:0"]
            + ["functions.write:2"] * 2,
        ),
    ],
)
def test_ids_are_the_templates_own(style, expected):
    talk = (
        reply("", call("a"), call("b", "read")),
        result("", "b"),
        result("", "a"),
        user("next"),
        reply("", call("toolu_01!")),
        result("", "toolu_01!"),
    )
    assert ids_of(*talk, style=style) == expected


@pytest.mark.parametrize(
    ("called", "answered"), [("call_8c", "call8c"), ("call8c", "call_8c"), ("functions.x:0", "functionsx0")]
)
def test_an_id_without_its_punctuation_is_the_same_id(called, answered):
    talk = (reply("", call("other"), call(called)), result("", answered), result("", "other"))
    assert ids_of(*talk) == ["call0", "call1", "call1", "call0"]


def test_ids_that_differ_in_punctuation_only_are_kept_apart():
    talk = (reply("", call("call_1_1"), call("call_11")), result("", "call_11"), result("", "call_1_1"))
    assert ids_of(*talk) == ["call0", "call1", "call1", "call0"]


def test_an_id_that_is_used_again_means_the_new_call():
    talk = (reply("", call("a")), result("", "a"), reply("", call("a")), result("", "a"), result("", "a"))
    assert ids_of(*talk) == ["call0", "call0", "call1", "call1", "call1"]
    unanswered = (reply("", call("a")), user("x"), reply("", call("a")), result("", "a"))
    assert ids_of(*unanswered) == ["call0", "call1", "call1"]


@pytest.mark.parametrize("call_id", ["a", ""])
def test_calls_of_one_id_in_one_message_are_answered_in_order(call_id):
    talk = (reply("", call(call_id), call(call_id)), result("", call_id), result("", call_id))
    assert ids_of(*talk) == ["call0", "call1", "call0", "call1"]


def test_results_without_an_id_answer_the_latest_calls_in_order():
    talk = (reply("", call("z")), result("", "z"), reply("", call("a"), call("b")))
    assert ids_of(*talk, result("", None), result("", None)) == [
        "call0", "call0", "call1", "call2", "call1", "call2",
    ]  # fmt: skip


def test_a_result_of_an_unknown_call_has_no_id():
    assert ids_of(result("", "a"), reply("", call("a")), result("", "b"), result("", "a")) == [
        None, "call0", None, "call0",
    ]  # fmt: skip
    assert ids_of(result("", None)) == [None]


SYSTEM_WITH_LAST_QUESTION = """
{%- set opens = messages[0].role == 'system' -%}
{%- for message in messages if message.role != 'system' -%}
    {%- if message.role == 'tool' or message.tool_calls -%}
        {{- raise_exception('There are no calls') -}}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '<open>' ~ (messages[0].content ~ '\n' if opens and loop.last else '') -}}
    {%- endif -%}
    {{- message.content ~ '<close>' -}}
{%- endfor -%}
"""
"""Codestral and other early models of Mistral's have such a template."""


@pytest.mark.parametrize("call_id", ["unknown", "c_1"])
def test_a_result_is_shown_where_calls_are_text_and_the_system_text_moves(call_id):
    tokenizer = FakeTokenizer(SYSTEM_WITH_LAST_QUESTION, ("<open>", "<close>"), ("<close>",))
    preparer = Preparer(tokenizer, Family(name="generic"))
    assert preparer.facts.moving == {"system"}
    talk = (system("s"), user("a"), reply("", call("c1")), result("shown507x", call_id), user("b"))
    prompt = preparer.prepare(ChatRequest(messages=talk))
    assert "shown507x" in tokenizer.decode(prompt.tokens.ids)


def test_only_results_answer_calls():
    strange = replace(user("x"), tool_call_id="a")
    assert list(map(Calls("ordinal").renamed, (reply("", call("a")), strange)))[1].tool_call_id is None


@pytest.mark.parametrize("trait", TRAITS)
def test_a_clients_spelling_of_an_id_never_reaches_the_prompt(trait):
    def talk(*ids: str) -> tuple[Message, ...]:
        first, two = ids
        made = reply("", call(first, path="p"), call(two, "read"))
        return (user("a"), made, result("r", first), result("s", two), reply("b"), user("c"))

    ours = shown(trait, *talk("callabc", "calldef"))
    assert "callabc" not in ours
    assert "calldef" not in ours
    assert shown(trait, *talk("toolu_01A-é", "functions.write:9")) == ours


@pytest.mark.parametrize(
    ("trait", "first"), [("tools_before_last_user", "000000000"), ("kimi", "functions.write:0")]
)
def test_ids_have_the_form_that_the_model_knows(trait, first):
    talk = (user("a"), reply("", call("x", path="p")), result("r", "x"), user("b"))
    assert shown(trait, *talk).count(first) == 2


@pytest.mark.parametrize("trait", NATIVE_CALLS)
def test_ids_of_a_prefix_do_not_change_when_the_conversation_grows(trait):
    first = (user("a"), reply("", call("x", path="p")), result("r", "x"))
    more = (reply("", call("y", path="q")), result("s", "y"))
    short, long = prepared(trait, *first), prepared(trait, *first, *more)
    kept = short.boundaries[-1].tokens
    assert long.tokens.ids[:kept] == short.tokens.ids[:kept]
    assert text_of(trait, long.tokens.ids[kept:]).count("q") == 1
