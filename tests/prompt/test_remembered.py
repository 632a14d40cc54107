"""Memories of conversations change no prompt, and only new messages are scanned."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from start_llm.core.canonical import OmittedText
from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.core.prompt import Prompt
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt import remembered
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import call, fresh_preparer, function, reply, result, system, user

TOOLS = (function("write", path={"type": "string"}),)
LATE = (function("find", path={"type": "string"}), function("find", text={"type": "string"}))
POLICIES = (
    PromptPolicy(),
    PromptPolicy(drift="exact"),
    PromptPolicy(with_rules=False),
    PromptPolicy(checks_keys=True),
    PromptPolicy(kept_reasoning="false", shortens_writes=True),
)
TRAITS = ("strips_old_reasoning", "channels", "kimi", "stop_opens_next", "no_system")
CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nx\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
QUESTIONS = (
    "Why?",
    "Why? \n",
    "[Mon 2026-11-23 12:00 UTC] Why?",
    "[Tue 2026-11-24 12:00 UTC] Why?",
    "Current time is 12:00\nWhy?",
    "",
    CARRIER,
)
SYSTEMS = ("Be brief.", "Be brief.\nToday's date: 2026-11-23\n", "Be brief.\nToday's date: 2026-11-24\n")
ARGUMENTS: tuple[dict[str, Json], ...] = (
    {"path": "a", "content": "long"},
    {"content": "long", "path": "a"},
    {"path": 1},
    {"path": 1.0},
    {"path": True},
    {"path": [0.0, {"a": None, "b": 1}]},
    {"path": [-0.0, {"a": None, "b": 1}]},
    {"path": [0.0, {"b": 1, "a": None}]},
)
REPLIES = ("So.", "So.\n", "<think>Hm.</think>So.", "")
REASONING = (None, "Hm.", "Ha.", "")
NAMES = ("", "a" * 24, "b" * 24)
IDS = ("c1", "c2", "c_1", "")


def preparer(trait: str = TRAITS[0], policy: PromptPolicy = POLICIES[0]) -> Preparer:
    return fresh_preparer(trait, policy=policy)


def parsed(**request: Any) -> ChatRequest:
    """As the next request brings it: nothing in it is the same object as before."""
    return pickle.loads(pickle.dumps(ChatRequest(tools=TOOLS, **request)))


type PromptFacts = tuple[Prompt, list[tuple[OmittedText, ...]], list[int]]


def facts_of(preparing: Preparer, request: ChatRequest) -> PromptFacts | str:
    """All that is in a prompt, also what does not count when it is compared."""
    try:
        prompt = preparing.prepare(request)
    except InvalidRequest as error:
        return str(error)
    assert prompt.conversation
    messages = prompt.conversation.canonical
    return prompt, [message.omitted for message in messages], [message.omitted_chars for message in messages]


# ---------------------------------------------------------------------------------------------- same prompts


class Talk:
    """A conversation, and what a client may do to it before it sends it again."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.messages: list[Message] = [system(SYSTEMS[0]), user("Begin.")]
        self.late_tools = LATE[:1]

    def change(self) -> None:
        changes = (
            *[self._ask] * 3,
            *[self._answer] * 3,
            self._edit,
            self._call_otherwise,
            self._mix_results,
            self._forget,
            self._begin_otherwise,
            self._offer_otherwise,
        )
        self._one_of(changes)()

    def _one_of[T](self, some: Sequence[T]) -> T:
        return self._random.choice(some)

    def _place(self) -> int:
        return self._random.randrange(len(self.messages))

    def _ask(self) -> None:
        self.messages.append(user(self._one_of(QUESTIONS)))

    def _answer(self) -> None:
        calls = [
            ToolCall(self._one_of(IDS), "write", self._one_of(ARGUMENTS))
            for _ in range(self._one_of((0, 0, 1, 2, 3)))
        ]
        message = reply(self._one_of(REPLIES), *calls, reasoning=self._one_of(REASONING))
        self.messages.append(replace(message, reply_name=self._one_of(NAMES)))
        self.messages += [self._result(tool_call.id) for tool_call in calls[: self._one_of((1, 2, 3, 4))]]

    def _result(self, call_id: str) -> Message:
        references = self._one_of(((), (), ("find",)))
        return result(self._one_of(("done", "done ")), call_id, tool_references=references)

    def _edit(self) -> None:
        place = self._place()
        message = self.messages[place]
        texts = {"user": QUESTIONS, "system": SYSTEMS, "assistant": REPLIES, "tool": ("done", "failed")}
        self.messages[place] = replace(message, content=self._one_of(texts[message.role]))
        if message.role == "assistant":
            self.messages[place] = replace(
                self.messages[place], reasoning=self._one_of(REASONING), reply_name=self._one_of(NAMES)
            )

    def _call_otherwise(self) -> None:
        calling = [place for place, message in enumerate(self.messages) if message.tool_calls]
        if calling:
            place = self._one_of(calling)
            first, *others = self.messages[place].tool_calls
            other = replace(first, arguments=self._one_of(ARGUMENTS), id=self._one_of((first.id, *IDS)))
            self.messages[place] = replace(self.messages[place], tool_calls=(other, *others))

    def _mix_results(self) -> None:
        """Two that follow each other change places, or one comes late."""
        places = [place for place, message in enumerate(self.messages) if message.role == "tool"]
        if places:
            place = self._one_of(places)
            before = self.messages[place - 1]
            if before.role == "tool":
                self.messages[place - 1 : place + 1] = [self.messages[place], before]
            else:
                self.messages.insert(place, self._result(self._one_of(IDS)))

    def _forget(self) -> None:
        del self.messages[self._place() + 1 :]

    def _begin_otherwise(self) -> None:
        """The system text changes, or is new."""
        first = system(self._one_of(SYSTEMS))
        self.messages[: self._one_of((0, 1, 1))] = [first]

    def _offer_otherwise(self) -> None:
        self.late_tools = (self._one_of(LATE),)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(TRAITS), st.sampled_from(POLICIES), st.integers(0, 2**32))
@pytest.mark.long
def test_a_preparer_that_has_seen_others_makes_the_same_prompts(trait, policy, seed):
    random, remembers = Random(seed), preparer(trait, policy)
    talks = [Talk(random) for _ in range(2)]
    for _ in range(12):
        talk = talks[random.random() < 0.2]
        talk.change()
        tenant = random.choice((b"", b"", b"another"))
        request = parsed(messages=tuple(talk.messages), late_tools=talk.late_tools, tenant=tenant)
        assert facts_of(remembers, request) == facts_of(preparer(trait, policy), request)


def same_prompt(*requests: Sequence[Message]) -> bool:
    """True if a preparer that has seen them all makes of the last one what another makes of it alone."""
    remembers = preparer()
    *_, last = (facts_of(remembers, parsed(messages=tuple(messages))) for messages in requests)
    return last == facts_of(preparer(), parsed(messages=tuple(requests[-1])))


@pytest.mark.parametrize("now", ARGUMENTS)
@pytest.mark.parametrize("was", ARGUMENTS)
def test_a_call_is_shown_as_it_is_spelled(was, now):
    first, other = (
        [user("Go."), reply("", call(**arguments)), result("done"), user("And?")] for arguments in (was, now)
    )
    assert same_prompt(first, other)


def test_results_stand_as_their_calls_do_however_many_come_later():
    begun = [user("Go."), reply("", call("a"), call("b"), call("c"))]
    late, early = result("late", "c"), [result("first", "a"), result("second", "b")]
    assert same_prompt([*begun, late], [*begun, late, *early], [*begun, late, user("And?")])
    assert same_prompt([*begun, late, *early], [*begun, late, early[0], user("And?")])
    assert same_prompt([*begun, *early, late], [*begun, late, *early], [*begun, *early, late])


def test_calls_that_an_edit_has_taken_back_do_not_count():
    begun = [user("Go."), reply("", call("a")), result("done", "a"), user("And?")]
    assert same_prompt(
        [*begun, reply("", call("b")), result("done", "b")], [*begun[:1], user("Stop."), *begun]
    )


def test_what_only_a_first_message_has_is_no_content_of_a_later_one():
    begun = [user("Go."), reply("So.")]
    assert same_prompt(begun, [*begun, user("Runtime: agent=main | host=here\nAnd?")])


def test_what_a_reply_is_called_counts():
    begun = [user("Go."), reply("So."), user("And?")]
    named = replace(begun[1], reply_name="a" * 24)
    assert same_prompt(begun, [begun[0], named, begun[2]])


# ---------------------------------------------------------------------------------------- what is looked at


def many(count: int) -> list[Message]:
    """So many messages, of which each fourth makes a call."""
    messages = [system("Be brief.\n\ngitStatus: clean\n\nRecent commits:\n1a2b3c clean\n\n"), user("Begin.")]
    for number in range(count // 4):
        made = call(f"c{number}", path=f"file{number}")
        messages += [reply(f"Let me see {number}.", made), result(f"done {number}", f"c{number}")]
        messages += [reply(f"Thus {number}."), user(f"And {number}?")]
    return messages


def scanned_messages(preparing: Preparer, messages: Sequence[Message]) -> int:
    """Messages that a request takes a look at."""
    before = preparing._reader._remembered.scanned_messages
    preparing.prepare(parsed(messages=tuple(messages)))
    return preparing._reader._remembered.scanned_messages - before


@pytest.mark.thorough
def test_of_a_long_conversation_only_what_is_new_is_looked_at():
    messages, remembers = many(4000), preparer()
    assert scanned_messages(remembers, messages) == len(messages)
    assert scanned_messages(remembers, messages) == 0
    messages += [reply("So."), user("And?")]
    assert scanned_messages(remembers, messages) == 2
    messages[0] = replace(messages[0], content=messages[0].content.replace("clean", "dirty"))
    assert scanned_messages(remembers, messages) == 1
    messages[-1] = user("Or?")
    messages += [reply("So.", call("c", path="x")), result("done", "c")]
    assert scanned_messages(remembers, messages) == 3


def test_what_follows_a_call_that_changed_is_looked_at():
    messages, remembers = many(40), preparer()
    scanned_messages(remembers, messages)
    messages[10] = replace(messages[10], tool_calls=(call("another", path="y"),))
    assert scanned_messages(remembers, messages) == len(messages) - 10


def test_a_late_tool_is_looked_up_in_each_request():
    messages, remembers = many(40), preparer()
    messages[3] = replace(messages[3], tool_references=("find",))
    scanned_messages(remembers, messages)
    for late_tools in ((LATE[0],), (LATE[1],)):
        request = parsed(messages=tuple(messages), late_tools=late_tools)
        assert facts_of(remembers, request) == facts_of(preparer(), request)
    assert scanned_messages(remembers, messages) == 1


def test_the_conversations_of_latest_use_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "_MAX_CONVERSATIONS", 2)
    remembers = preparer()
    talks = [[user(f"Begin {name}."), reply("So.", call(name)), result(name, name)] for name in "abc"]
    assert [scanned_messages(remembers, talk) for talk in talks] == [3, 3, 3]
    assert [scanned_messages(remembers, talks[at]) for at in (2, 1, 0)] == [0, 0, 3]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(remembered, "_MAX_BYTES", 4000)
    remembers = preparer()
    assert [scanned_messages(remembers, [user("x" * 4000)]) for _ in range(2)] == [1, 1]
    assert [scanned_messages(remembers, [user("x" * 500)]) for _ in range(2)] == [1, 0]
    assert [scanned_messages(remembers, [user("x"), reply("x")] * 2) for _ in range(2)] == [4, 4], (
        "each weighs"
    )
