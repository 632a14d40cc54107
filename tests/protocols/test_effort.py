"""Every field that speaks of thinking is read, in every place, and the strongest one wins."""

from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from start_llm.core.chat import Thinking
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.effort import CONSUMED_TEMPLATE_OPTIONS, read_thinking, unread_template_options
from start_llm.protocols.fields import Fields, parse_body
from tests.protocols.helpers import body

NESTED = ["chat_template_kwargs", "metadata", "extra_body"]
PLACES = ["", *NESTED]
"""The strongest first; "" is the top level."""
PAIRS_OF_PLACES = list(combinations(PLACES, 2))
OFF_WORDS = ["off", "none", "disable", "disabled", "false", "0", "no", "chat", "no_think"]
ON_WORDS = ["on", "enable", "enabled", "adaptive", "auto", "default", "true", "1", "yes", "thinking", "think"]
EFFORT_WORDS = {word: word for word in ["minimal", "low", "medium", "high", "xhigh"]} | {"max": "xhigh"}
WORDS = {
    **{word: Thinking(on=False) for word in OFF_WORDS},
    **{word: Thinking(on=True) for word in ON_WORDS},
    **{word: Thinking(on=True, effort=effort) for word, effort in EFFORT_WORDS.items()},
}
SAMPLES = {"a boolean": True, "a number": 2, "a string": "on", "an array": ["on"], "an object": {}}
ACCEPTED = {
    "thinking_budget": {"a number"},
    "enable_thinking": {"a boolean"},
    "thinking": {"a boolean", "a string", "an object"},
    "thinking.type": {"a string"},
    "thinking.budget_tokens": {"a number"},
    "reasoning_effort": {"a string"},
    "reasoning": {"a boolean", "a string", "an object"},
    "reasoning.enabled": {"a boolean"},
    "reasoning.effort": {"a string"},
    "reasoning.level": {"a string"},
    "reasoning.type": {"a string"},
    "reasoning.max_tokens": {"a number"},
    "output_config": {"an object"},
    "output_config.effort": {"a string"},
}
"""The JSON types that each field takes; every other one is wrong."""
FIELDS = list(ACCEPTED)
SWITCHES = [path for path, kinds in ACCEPTED.items() if "a boolean" in kinds]
WORD_FIELDS = [path for path, kinds in ACCEPTED.items() if "a string" in kinds]
BUDGETS = [path for path, kinds in ACCEPTED.items() if "a number" in kinds]
ON_AND_OFF: list[tuple[str, Any, Any]] = [
    ("enable_thinking", True, False),
    ("thinking", "on", "off"),
    ("thinking", {"type": "adaptive"}, {"type": "disabled"}),
    ("reasoning_effort", "default", "none"),
    ("reasoning", {"enabled": True}, {"enabled": False}),
    ("output_config", {"effort": "default"}, {"effort": "none"}),
]
"""The fields that switch, the strongest first, and what switches each on and off."""
EFFORTS = [
    ("thinking", "low"),
    ("reasoning_effort", "medium"),
    ("reasoning", {"effort": "high"}),
    ("output_config", {"effort": "max"}),
]
"""The fields that give an effort, the strongest first; no two give the same."""


def nest(path: str, value: Any) -> dict[str, Any]:
    """The object that holds `value` at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def in_place(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {place: fields} if place else fields


def read(fields: dict[str, Any]) -> Thinking:
    return read_thinking(body(**fields))


def refusal(fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        read(fields)
    return refused.value


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", SWITCHES)
def test_a_switch_is_read_in_every_place(path, place):
    for on in (True, False):
        assert read(in_place(place, nest(path, on))) == Thinking(on=on)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", WORD_FIELDS)
def test_every_word_is_read_in_every_place_however_it_is_spelt(path, place):
    for word, expected in WORDS.items():
        for spelling in (word, word.upper(), f" {word.title()}\n"):
            assert read(in_place(place, nest(path, spelling))) == expected, spelling


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", BUDGETS)
def test_a_budget_is_read_in_every_place_and_zero_means_off(path, place):
    for tokens in (1, 1024, 10**15):
        assert read(in_place(place, nest(path, tokens))) == Thinking(budget=tokens)
    assert read(in_place(place, nest(path, 0))) == Thinking(on=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", WORD_FIELDS)
def test_a_word_that_nobody_knows_is_as_if_absent(path, place):
    for word in ("", "ultra", "highest", "no thinking", "2", "🐟"):
        assert read(in_place(place, nest(path, word))) == Thinking()


@pytest.mark.parametrize("name", ["thinking_mode", "thinking_effort"])
def test_a_word_for_the_template_alone_is_read_there_and_nowhere_else(name):
    for word, expected in WORDS.items():
        assert read({"chat_template_kwargs": {name: word}}) == expected
        assert read({name: word, "metadata": {name: word}}) == Thinking()
    assert read({"chat_template_kwargs": {name: "max", "thinking": False}}) == Thinking(
        on=False, effort="xhigh"
    )


def test_an_unknown_word_leaves_the_weaker_fields_their_say():
    assert read({"thinking": "ultra", "reasoning_effort": "low"}) == Thinking(on=True, effort="low")
    assert read({"reasoning_effort": "ultra", "metadata": {"thinking": False}}) == Thinking(on=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("path", FIELDS)
def test_null_is_absent_everywhere(path, place):
    assert read(in_place(place, nest(path, None))) == Thinking()
    stronger = in_place(place, nest(path, None))
    weaker = {"extra_body": {"enable_thinking": False, "thinking": {"budget_tokens": 7}}}
    if place != "extra_body":
        assert read(stronger | weaker) == Thinking(on=False, budget=7)


def test_a_body_without_any_such_field_says_nothing():
    assert read({}) == Thinking()
    assert read(dict.fromkeys(PLACES[1:])) == Thinking()
    assert read({"model": "m", "messages": [], "metadata": {"user_id": "on"}, "on": True}) == Thinking()
    assert read({"reasoning": {"summary": "auto"}, "output_config": {"format": "text"}}) == Thinking()


@pytest.mark.parametrize(("strong", "weak"), PAIRS_OF_PLACES)
def test_of_two_places_the_stronger_wins_whatever_the_fields(strong, weak):
    for strong_name, strong_on, strong_off in ON_AND_OFF:
        for weak_name, weak_on, weak_off in ON_AND_OFF:
            on = in_place(weak, {weak_name: weak_off}) | in_place(strong, {strong_name: strong_on})
            off = in_place(weak, {weak_name: weak_on}) | in_place(strong, {strong_name: strong_off})
            assert read(on).on is True
            assert read(off).on is False


@pytest.mark.parametrize(("strong", "weak"), PAIRS_OF_PLACES)
def test_of_two_places_the_stronger_gives_effort_and_budget(strong, weak):
    weak_fields = in_place(weak, {"thinking": "high", "thinking_budget": 1})
    strong_fields = in_place(strong, {"output_config": {"effort": "low"}, "reasoning": {"max_tokens": 2}})
    assert read(weak_fields | strong_fields) == Thinking(on=True, effort="low", budget=2)


@pytest.mark.parametrize(
    ("strong", "weak"), [pair for pair in combinations(ON_AND_OFF, 2) if pair[0][0] != pair[1][0]]
)
def test_of_two_fields_in_one_place_the_stronger_switches(strong, weak):
    for place in PLACES:
        assert read(in_place(place, {weak[0]: weak[2], strong[0]: strong[1]})).on is True
        assert read(in_place(place, {weak[0]: weak[1], strong[0]: strong[2]})).on is False


def test_the_effort_comes_from_the_strongest_field_that_gives_one():
    for start, expected in enumerate(["low", "medium", "high", "xhigh"]):
        fields = dict(reversed(EFFORTS[start:]))
        for place in PLACES:
            assert read(in_place(place, fields)) == Thinking(on=True, effort=expected)


def test_the_budget_comes_from_the_strongest_field_that_gives_one():
    fields = {"reasoning": {"max_tokens": 3}, "thinking": {"budget_tokens": 2}, "thinking_budget": 1}
    for expected in (1, 2, 3):
        assert read(fields) == Thinking(budget=expected)
        fields.popitem()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, Thinking(on=True, budget=9)),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, Thinking(on=False, budget=9)),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, Thinking(on=False)),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, Thinking(on=True)),
        ({"thinking": {}}, Thinking()),
        ({"reasoning": {"effort": "high", "summary": "auto"}}, Thinking(on=True, effort="high")),
        ({"reasoning": {"enabled": True, "effort": "none"}}, Thinking(on=True)),
        ({"reasoning": {"enabled": False, "effort": "high"}}, Thinking(on=False, effort="high")),
        ({"reasoning": {"enabled": True, "max_tokens": 0}}, Thinking(on=False)),
        ({"reasoning": {"effort": "low", "level": "high", "type": "max"}}, Thinking(on=True, effort="low")),
        ({"reasoning": {"type": "disabled", "level": "high"}}, Thinking(on=True, effort="high")),
        ({"reasoning": {"max_tokens": 64}}, Thinking(budget=64)),
        ({"enable_thinking": True, "thinking_budget": 0}, Thinking(on=False)),
        ({"reasoning_effort": "high", "thinking_budget": 0}, Thinking(on=False, effort="high")),
        ({"enable_thinking": False, "thinking_budget": 64}, Thinking(on=False, budget=64)),
        ({"enable_thinking": False, "reasoning_effort": "low"}, Thinking(on=False, effort="low")),
        ({"reasoning_effort": "none", "reasoning": "high"}, Thinking(on=False, effort="high")),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            Thinking(on=True, effort="high"),
        ),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            Thinking(on=False),
        ),
        (
            {"thinking_budget": 64, "chat_template_kwargs": {"enable_thinking": False}},
            Thinking(on=False, budget=64),
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max", "format": {}}},
            Thinking(on=True, effort="xhigh"),
        ),
        (
            {"enable_thinking": True, "metadata": {"reasoning_effort": "low", "thinking_budget": 5}},
            Thinking(on=True, effort="low", budget=5),
        ),
    ],
)
def test_each_part_of_the_answer_comes_from_the_strongest_field_that_gives_it(fields, expected):
    assert read(fields) == expected


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("path", ACCEPTED)
def test_a_wrong_type_is_refused_by_its_path_at_the_top_level_and_ignored_elsewhere(path, kind):
    fields = nest(path, SAMPLES[kind])
    if kind in ACCEPTED[path]:
        read(fields)
        return
    error = refusal(fields)
    assert error.param == path
    assert error.message.startswith(f"'{path}' must be a")
    assert error.message.endswith(f", not {kind}.")
    for place in NESTED:
        assert read(in_place(place, fields)) == Thinking()


def test_a_wrong_type_is_refused_even_where_a_stronger_field_decides():
    fields = {"enable_thinking": True, "reasoning": {"enabled": True, "effort": 3}}
    assert refusal(fields).param == "reasoning.effort"


def test_what_cannot_be_read_in_a_free_place_hides_nothing_beside_it():
    fields = {
        "enable_thinking": 1,
        "thinking": {"type": ["on"], "budget_tokens": 6},
        "reasoning_effort": "low",
    }
    for place in NESTED:
        assert read(in_place(place, fields)) == Thinking(on=True, effort="low", budget=6)


@pytest.mark.parametrize("value", [True, 5, "on", ["on"]])
def test_the_places_themselves_may_be_anything_but_the_template_options(value):
    assert read({"metadata": value, "extra_body": value}) == Thinking()
    assert refusal({"chat_template_kwargs": value}).param == "chat_template_kwargs"


@pytest.mark.parametrize("path", BUDGETS)
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (-1, "must be a whole number of tokens, 0 or more"),
        (0.5, "must be a whole number of tokens, 0 or more"),
        (1e-300, "must be a whole number of tokens, 0 or more"),
        (-1e308, "must be a whole number of tokens, 0 or more"),
        (True, "must be a number, not a boolean"),
        (False, "must be a number, not a boolean"),
        ("64", "must be a number, not a string"),
    ],
)
def test_a_budget_that_is_no_count_is_refused_by_its_path(path, value, problem):
    error = refusal(nest(path, value))
    assert (error.param, error.message) == (path, f"'{path}' {problem}.")
    for place in NESTED:
        assert read(in_place(place, nest(path, value))) == Thinking()


@pytest.mark.parametrize("digits", ["9" * 30, "9" * 400, "9" * 5000, "1e300", "1e999"])
def test_a_budget_larger_than_any_reasoning_is_fine(digits):
    thinking = read_thinking(parse_body(b'{"thinking": {"budget_tokens": %s}}' % digits.encode()))
    assert thinking == Thinking(budget=2**63 - 1)


def test_a_whole_float_is_a_budget_of_integer_type():
    budget = read({"thinking_budget": 64.0}).budget
    assert budget == 64
    assert isinstance(budget, int)


def test_template_options_lose_what_was_read_from_them_and_keep_the_rest():
    options: dict[str, Any] = {
        "enable_thinking": False,
        "thinking": {"type": "enabled"},
        "reasoning_effort": "high",
        "thinking_budget": 0,
    }
    others: dict[str, Any] = {
        "preserve_thinking": True,
        "reasoning": "high",
        "date": None,
        "output_config": {"effort": "low"},
    }
    assert options.keys() == CONSUMED_TEMPLATE_OPTIONS
    assert unread_template_options(options | others) == others
    assert unread_template_options(dict.fromkeys(options)) == {}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_thinking": "false"},
        {"enable_thinking": 0},
        {"thinking": "ultra"},
        {"thinking": ["on"]},
        {"thinking": {"type": 1}},
        {"thinking": {}},
        {"reasoning_effort": "ultra"},
        {"reasoning_effort": 3},
        {"thinking_budget": "64"},
        {"thinking_budget": -1},
    ],
)
def test_a_template_option_that_says_nothing_to_the_server_is_left_to_the_template(options):
    assert read({"chat_template_kwargs": options}) == Thinking()
    assert unread_template_options(options) == options


NAMES = sorted({name for path in FIELDS for name in path.split(".")} | set(NESTED))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(sorted(WORDS)) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=5)
    ),
    max_leaves=12,
)


@pytest.mark.thorough
@given(data=st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values, max_size=8))
@example(data={"thinking_budget": float("nan")})
@example(data={"thinking_budget": -float("inf")})
@example(data={"thinking": {"budget_tokens": 10**400}})
def test_whatever_a_client_sends_is_read_or_refused_by_name(data):
    try:
        thinking = read_thinking(Fields(data))
    except InvalidRequest as error:
        assert error.param is not None
        assert error.param.split(".")[0] in data
        return
    assert thinking.on in (None, True, False)
    assert thinking.effort is None or thinking.effort in EFFORT_WORDS.values()
    assert thinking.budget is None or 1 <= thinking.budget < 2**63


@given(place=st.sampled_from(NESTED[1:]), value=json_values)
def test_free_places_are_never_an_error(place, value):
    assert isinstance(read_thinking(Fields({place: value})), Thinking)


@pytest.mark.thorough
@given(options=st.dictionaries(st.sampled_from(NAMES) | st.text(), json_values, max_size=8))
def test_template_options_are_split_between_the_server_and_the_template(options):
    left = unread_template_options(options)
    assert options.keys() - left.keys() <= CONSUMED_TEMPLATE_OPTIONS
    assert all(left[name] is options[name] for name in left)
    for name in left.keys() & CONSUMED_TEMPLATE_OPTIONS:
        assert read_thinking(Fields({"chat_template_kwargs": {name: left[name]}})) == Thinking()
