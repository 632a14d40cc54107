"""The session id is found wherever a client puts it, and is never an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.chat import Lineage
from start_llm.protocols.fields import Fields
from start_llm.protocols.sessions import (
    BRANCH_KEYS,
    PARENT_KEYS,
    conversation_id,
    lineage,
    session_id,
)
from tests.protocols.helpers import body

BODY_KEYS = ["session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key"]
NESTED_OBJECTS = ["metadata", "extra_body"]
HEADERS = ["x-claude-code-session-id", "x-session-id", "session_id", "session-id"]
HEADERS += ["x-session-affinity", "x-client-request-id"]
CLAUDE = "user_0a1b_account_2c3d_session_4e5f-66"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(BODY_KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)


def session_of(headers: dict[str, str] | None = None, /, **fields) -> str | None:
    return session_id(body(**fields), headers or {})


@pytest.mark.parametrize("key", BODY_KEYS)
def test_every_name_works_in_the_body_and_inside_its_objects(key):
    assert session_of(**{key: "abc"}) == "abc"
    for name in NESTED_OBJECTS:
        assert session_of(**{name: {key: "abc"}}) == "abc"


@pytest.mark.parametrize("header", HEADERS)
def test_every_header_works(header):
    assert session_of({header: "abc"}) == "abc"


def test_the_first_place_wins():
    places = [{name: name} for name in BODY_KEYS]
    places += [{"metadata": {"thread_id": "in metadata"}}, {"extra_body": {"chat_id": "in extra_body"}}]
    order = [*BODY_KEYS, "in metadata", "in extra_body"]
    for start, expected in enumerate(order):
        merged = {name: value for place in reversed(places[start:]) for name, value in place.items()}
        assert session_of({HEADERS[0]: "header"}, **merged) == expected
    for start, header in enumerate(HEADERS):
        assert session_of({name: name for name in reversed(HEADERS[start:])}) == header


def test_claudes_user_id_holds_a_session_in_both_of_its_forms():
    assert session_of(metadata={"user_id": CLAUDE}) == "4e5f-66"
    assert session_of(metadata={"user_id": '{"device_id": "d", "session_id": "4e5f"}'}) == "4e5f"
    assert session_of({"x-session-id": "header"}, metadata={"user_id": CLAUDE}) == "4e5f-66"
    assert session_of(metadata={"user_id": CLAUDE, "session_id": "plain"}) == "plain"


@pytest.mark.parametrize(
    "user_id",
    ["user-17", "", "{", '{"session_id"', '{"session_id": null}', '{"a":' * 100_000, 5, None, ["x"]],
)
def test_a_user_id_without_a_session_gives_none(user_id):
    assert session_of(metadata={"user_id": user_id}) is None


@pytest.mark.parametrize("value", [None, "", "  ", True, False, 1.5, [], {}, ["abc"], {"id": "abc"}])
def test_a_value_that_is_no_id_is_passed_over(value):
    assert session_of(session_id=value, chat_id="next") == "next"


def test_a_number_is_an_id_and_blanks_around_one_are_not_part_of_it():
    assert session_of(session_id=17) == "17"
    assert session_of({"x-session-id": " abc\t"}) == "abc"


OF_AN_AGENT = "x-claude-code-agent-id"
LONG = "a" * 200
PAIRS = {
    "equal in their first 200 characters": ((f"{LONG}b",), (f"{LONG}c",)),
    "a blank between session and agent": (("x y",), ("x", "y")),
    "a blank in either": (("x y", "z"), ("x", "y z")),
    "what is written for two": (("x", "y"), ('["x", "y"]',)),
    "what is written for a long one": ((f"{LONG}b",), None),
}


def name_of(session: str, agent: str | None = None) -> str:
    named = conversation_id(body(session_id=session), {OF_AN_AGENT: agent} if agent else {})
    assert named
    return named


@pytest.mark.parametrize("pair", PAIRS)
def test_different_ids_are_different_names(pair):
    first, other = PAIRS[pair]
    assert name_of(*first) != name_of(*other or (name_of(*first),))


@given(
    st.lists(st.text('xy "[],#', min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=2),
    st.lists(st.text('xy "[],#', min_size=1, max_size=4).filter(str.strip), min_size=1, max_size=2),
)
def test_equal_names_are_of_equal_ids(ids, other):
    is_same = [word.strip() for word in ids] == [word.strip() for word in other]
    assert (name_of(*ids) == name_of(*other)) == is_same


@pytest.mark.parametrize("session", [LONG, "a" * 5000, '"' * 150, "é" * 100, "[" * 198])
def test_no_name_is_longer_than_two_hundred_characters(session):
    assert len(session_of(session_id=session) or "") <= 200
    assert session_of(session_id=LONG) == LONG


@pytest.mark.parametrize("word", ["default", "Undefined", "0", "null", "None", "main", "[object Object]"])
def test_a_placeholder_is_a_session_and_no_name_of_a_conversation(word):
    nil = "00000000-0000-0000-0000-000000000000"
    for placeholder in (word, nil):
        sent = body(session_id=placeholder)
        assert session_id(sent, {}) == placeholder or placeholder.startswith("[")
        assert conversation_id(sent, {}) is None
        assert conversation_id(sent, {OF_AN_AGENT: "b"}) is None
        assert conversation_id(sent, {"x-session-id": "real"}) == "real"


def test_nothing_given_gives_none():
    assert session_of(metadata={"other": 1}, extra_body=[], user="somebody") is None


@given(data=st.dictionaries(st.sampled_from([*BODY_KEYS, *NESTED_OBJECTS, "user"]), json_values))
def test_whatever_a_client_sends_is_never_an_error(data):
    given_id = session_id(Fields(data), {})
    assert given_id is None or given_id.strip() == given_id != ""


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("keys", "name"), [(PARENT_KEYS, "parent"), (BRANCH_KEYS, "branch")])
def test_where_a_session_comes_from_has_several_names_too(keys, name, nested):
    for key in keys:
        fields = {"metadata": {key: " abc"}} if nested else {key: " abc"}
        assert lineage(body(**fields)) == Lineage(**{name: "abc"})
    assert lineage(body(session_id="abc", parent_id={}, branch=True)) == Lineage()
