"""Conversations with one root are one: whatever requests ask for, they begin with the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest

from start_llm.core.canonical import Root
from start_llm.core.chat import ChatRequest, Json, Message, Thinking
from start_llm.prompt.template_audit.facts import BUDGET_OPTION, TemplateFacts
from tests.prompt.fakes import call, function, preparer_of, reply, result, system, user
from tests.templates.traits import SEEING, TRAITS

pytestmark = [pytest.mark.product, pytest.mark.sample(12)]

TOOLS = [function("write", path={"type": "string"})]
WISHES = [
    Thinking(on=on, effort=effort, budget=budget)
    for on, effort, budget in (
        (None, None, None),
        (True, None, None),
        (False, None, None),
        (True, "low", None),
        (True, "high", 700),
        (False, "high", None),
        (None, "medium", 0),
        (True, None, 3),
    )
]
OPTIONS: Sequence[Mapping[str, Json]] = (
    {},
    {"preserve_thinking": True},
    {"preserve_thinking": False, "clear_thinking": False},
    {"enable_thinking": "yes"},
    {"thinking": 1, "documents": []},
    {BUDGET_OPTION: -1},
)
TALKS = (
    (user("w1w"),),
    (user("w1w"), reply("w2w", reasoning="w3w"), user("w4w")),
    (user("w1w"), reply("", call(path="w2w"), reasoning="w3w"), result("w4w")),
    (user("w1w"), reply("", call(path="w2w"), reasoning="w3w"), result("w4w"), reply("w5w"), user("w6w")),
)


def _requests(messages: tuple[Message, ...], tools: Sequence[Mapping[str, Json]]) -> Iterator[ChatRequest]:
    for thinking, options in product(WISHES, OPTIONS):
        yield ChatRequest(messages=messages, tools=tuple(tools), thinking=thinking, template_options=options)


@pytest.mark.thorough
@pytest.mark.parametrize("tools", [(), TOOLS], ids=["no tools", "a tool"])
@pytest.mark.parametrize("lead", [(), (system("w0w"),)], ids=["no system", "a system text"])
@pytest.mark.parametrize("trait", TRAITS | SEEING)
def test_what_is_left_out_of_the_root_changes_nothing_in_front_of_the_generation_prompt(trait, lead, tools):
    for talk in TALKS:
        read: dict[Root, tuple[int, ...]] = {}
        for request in _requests((*lead, *talk), tools):
            prompt = preparer_of(trait).prepare(request)
            assert prompt.conversation
            if prompt.boundaries:
                tokens = prompt.tokens.ids[: prompt.boundaries[-1].tokens]
                assert read.setdefault(prompt.conversation.root, tokens) == tokens


SWITCHED = TemplateFacts(
    generation_prompt_options=frozenset({"enable_thinking", BUDGET_OPTION}),
    tried_options={
        "enable_thinking": (None, True, False),
        "effort": (None, "low"),
        BUDGET_OPTION: (None, 0, 512),
    },
)


@pytest.mark.parametrize(
    ("options", "in_front"),
    [
        ({"enable_thinking": True}, ()),
        ({"enable_thinking": True, "effort": "low"}, ("effort",)),
        ({"enable_thinking": False, BUDGET_OPTION: 77}, ()),
        ({"enable_thinking": 1}, ("enable_thinking",)),
        ({BUDGET_OPTION: -5, "enable_thinking": True}, (BUDGET_OPTION, "enable_thinking")),
        ({BUDGET_OPTION: True}, (BUDGET_OPTION,)),
        ({"enable_thinking": True, "effort": "great"}, ("enable_thinking", "effort")),
        ({"enable_thinking": True, "documents": []}, ("enable_thinking", "documents")),
    ],
)
def test_in_doubt_an_option_belongs_to_the_root(options, in_front):
    assert tuple(SWITCHED.options_in_front(options)) == in_front
