"""The ends of messages that are found where a conversation grew are those that the whole of it has."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from start_llm.core.chat import ChatRequest, Message
from start_llm.prompt import growing
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import (
    NOON,
    WatchedTokenizer,
    call,
    family_of,
    fresh_preparer,
    function,
    reply,
    result,
    system,
    user,
)
from tests.templates.traits import TRAITS, trait_tokenizer

pytestmark = pytest.mark.sample(3)

TOOLS = (function("write", path={"type": "string"}),)
TEXTS = ("", "Hm.", "  two\n", "<think>", "x" * 50, "one\n\ntwo", "é", "</think>\nSo", "one")


class Growing:
    """A conversation that is asked again and again, at times from an earlier message on, or edited."""

    def __init__(self, trait: str, random: Random) -> None:
        self._has_tools = trait != "tools_before_last_user"
        self._random = random
        self._count = 0
        self.messages: list[Message] = [user("Begin.")]
        if self._has_tools and random.random() < 0.8:
            self.messages.insert(0, system(self._text()))

    def grow(self) -> None:
        match self._random.randrange(9):
            case 0 if len(self.messages) > 3:
                del self.messages[self._random.randrange(2, len(self.messages)) :]
            case 1:
                edited = self._random.randrange(len(self.messages))
                if self.messages[edited].role == "user":
                    self.messages[edited] = user(self._text())
            case 2:
                self.messages[0] = replace(self.messages[0], content=self._text("Be brief."))
            case _:
                pass
        if self.messages[-1].role in ("user", "tool"):
            self._say()
        if self._random.random() < 0.6:
            self.messages.append(user(self._text()))

    def _say(self) -> None:
        reasoning = self._text() if self._random.random() < 0.4 else None
        if not self._has_tools or self._random.random() < 0.4:
            self.messages.append(reply(self._text() or "So.", reasoning=reasoning))
            return
        calls = [call(self._text(f"c{n}"), path=self._text()) for n in range(self._random.randint(1, 2))]
        self.messages.append(reply(self._random.choice(("", "See.")), *calls, reasoning=reasoning))
        self.messages += [result(self._text(), made_call.id) for made_call in calls]

    def _text(self, begins: str = "") -> str:
        self._count += 1
        return begins + self._random.choice(TEXTS) + (f"{self._count}" if self._random.random() < 0.7 else "")


@pytest.mark.sample(64)
@pytest.mark.parametrize("trait", TRAITS)
def test_what_is_found_where_it_grew_is_what_is_found_in_the_whole(
    trait: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(growing, "_WORTH", 1)
    asked = 0
    for seed in range(6):
        talk, remembers = Growing(trait, Random(f"{trait} {seed}")), fresh_preparer(trait)
        for _ in range(8):
            talk.grow()
            if talk.messages[-1].role == "assistant":
                continue
            request = ChatRequest(messages=tuple(talk.messages), tools=TOOLS if talk._has_tools else ())
            assert remembers.prepare(request) == fresh_preparer(trait).prepare(request)
            asked += 1
    assert asked > 20


WITHOUT_A_TAIL = ("tools_before_last_user", "system_with_last_word", "refuses_empty_replies")
"""The whole is rendered once more, to find that out."""


@pytest.mark.sample(12)
@pytest.mark.parametrize("trait", TRAITS)
def test_a_long_conversation_that_grew_is_rendered_once(trait: str):
    """And what is new a few times, which is short."""
    tokenizer = WatchedTokenizer(trait_tokenizer(trait))
    remembers = Preparer(tokenizer, family_of(trait), now=lambda: NOON)
    messages = [user("Begin.")]
    for number in range(60):
        messages += [reply(f"Reply {number}."), user(f"Question {number}?")]
    remembers.prepare(ChatRequest(messages=tuple(messages)))
    grown = [*messages, reply("And more."), user("Even more?")]
    for talk in (grown, [user("Begin now."), *grown[1:], reply("So."), user("And?")]):
        tokenizer.rendered.clear()
        request = ChatRequest(messages=tuple(talk))
        assert remembers.prepare(request) == fresh_preparer(trait).prepare(request)
        whole, *others = tokenizer.rendered
        is_marked = trait in WITHOUT_A_TAIL or (trait == "plain" and talk is not grown)
        if not is_marked:
            assert others
            assert sum(map(len, others)) < len(whole) / 4


@pytest.mark.sample(64)
@pytest.mark.parametrize("trait", TRAITS)
def test_a_system_text_that_changes_moves_what_follows(trait: str):
    """Nothing but the beginning is marked anew, where a template closes a question.

    A text that is empty cannot be marked everywhere. Then no place is known that would not be found anew.
    """
    tokenizer = WatchedTokenizer(trait_tokenizer(trait))
    remembers = Preparer(tokenizer, family_of(trait), now=lambda: NOON)
    messages = [user("Begin.")]
    for number in range(60):
        messages += [
            reply("", call(f"c{number}", path="x")),
            result("done", f"c{number}"),
            user(f"{number}?"),
        ]
    for wording in ("", "Be brief.", "Be brief, please.", "Be brief, <|im_end|> please.", "Be", ""):
        tokenizer.rendered.clear()
        request = ChatRequest(messages=(system(wording), *messages), tools=TOOLS)
        assert remembers.prepare(request) == fresh_preparer(trait).prepare(request)
        if wording not in ("Be brief.", "") and trait not in ("plain", *WITHOUT_A_TAIL):
            assert sum(map(len, tokenizer.rendered)) < 1.5 * len(tokenizer.rendered[0])
