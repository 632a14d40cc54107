"""An agent works for six turns: every call is read, and what was computed is gone on from.

The model writes what its template shows, the client sends it back in its own way, and each prompt is bound to
what was computed before. No engine: the tokens that the next prompt shares with those are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, Message, Thinking, ToolCall
from start_llm.core.events import CallStarted, Finished, Text, Usage
from start_llm.formats.reading.schema import Tools
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from start_llm.transcripts.turn import Turn
from tests.prompt.echoes import CLIENTS, Client, understood
from tests.prompt.fakes import call, family_of, fresh_preparer, reply, system, user
from tests.prompt.replies import REASONING_FORMS, TOOLS, Answer, answer_of, next_messages, turn
from tests.templates.traits import TRAITS, trait_tokenizer
from tests.transcripts.fakes import transcripts

pytestmark = [pytest.mark.product, pytest.mark.checked(6)]

WINDOW, CHANCE = 10**9, 100.0
ASKED = (system("You are an agent. " * 40), user("Mend it."))
REPLIES = (
    reply("", call(path="src/a.py", text="x = 1\n")),
    reply("", call(path="src/b.py", text="    return x\n", count=3, ratio=2.0)),
    reply("I look once more.", call(path="größe.py", lines=["1", "two"], flag=True)),
    reply("", call(path="x"), call("c2", "now")),
    reply("", call(name="now")),
    reply("", call(path="x", text="</done> & more")),
    reply("It is mended."),
)
ONE_CALL = frozenset({"dates", "strict_channels"})
"""Traits whose template has one call in a message."""
NO_TEXT = frozenset({"dates", "bare_call_list"})
"""Traits whose template has no text beside calls in one message."""
MOVES_TOOLS = frozenset({"tools_before_last_user"})
"""Traits whose template puts the tools and the system text before the last question."""


def replies_of(trait: str) -> list[Message]:
    """Those that a model of this trait can give."""
    held = [answer for answer in REPLIES if not (trait in NO_TEXT and answer.content and answer.tool_calls)]
    return [answer for answer in held if not (trait in ONE_CALL and len(answer.tool_calls) > 1)]


@dataclass
class Session:
    """The result of a session.

    Attributes:
        shared, computed: tokens of each prompt that stand at the beginning of the next one, and all of them.
    """

    calls: int = 0
    contents: list[str] = field(default_factory=list[str])
    shared: int = 0
    computed: int = 0


class Agent:
    """One client with one model."""

    def __init__(self, trait: str, client: Client, *, on: bool) -> None:
        tokenizer = trait_tokenizer(trait)
        self._trait, self._client, self._on = trait, client, on
        self._known = transcripts(
            tokenizer.token_bytes, lambda text: tokenizer.encode(text, as_document=False)
        )
        self._preparer = fresh_preparer(trait, restore_reasoning=self._known.restore_reasoning)
        self._messages = ASKED
        self._computed: list[int] = []
        self.session = Session()

    def work(self, replies: Sequence[Message]) -> Session:
        for message in replies:
            self._turn(self._with_reasoning(message))
        return self.session

    def _with_reasoning(self, message: Message) -> Message:
        thinks = self._on and self._trait in REASONING_FORMS
        return (
            replace(message, reasoning="I think about it, and then about something else.")
            if thinks
            else message
        )

    def _turn(self, message: Message) -> None:
        options: dict[str, Any] = {"tools": TOOLS, "thinking": Thinking(on=self._on)}
        prompt = self._preparer.prepare(ChatRequest(messages=self._messages, **options))
        bound = Turn.begin(self._known, prompt, WINDOW)
        self._count(bound.tokens.ids)
        bound.record_submitted()
        output = turn(self._trait, message, on=self._on, talk=self._messages).reply
        assert understood(self._trait, prompt, output)
        answer, ids = self._read(bound, output, prompt.reasoning_is_open)
        self.session.calls += len(answer.calls)
        self.session.contents.append(answer.content)
        back = self._client.echo(answer)
        calls = [replace(entry, id=f"call_{name}") for entry, name in zip(back.tool_calls, ids, strict=True)]
        back = replace(back, tool_calls=tuple[ToolCall, ...](calls))
        self._messages = (*self._messages, back, *next_messages(back))

    def _count(self, ids: tuple[int, ...]) -> None:
        pairs = zip(self._computed, ids, strict=False)
        self.session.shared += next((i for i, (a, b) in enumerate(pairs) if a != b), len(self._computed))
        self.session.computed += len(self._computed)

    def _read(self, bound: Turn, text: str, reasoning_is_open: bool) -> tuple[Answer, list[str]]:
        """As the service reads a reply, to the end that the model gives it."""
        tokenizer = trait_tokenizer(self._trait)
        written = tokenizer.encode(text, as_document=False)
        splitter = make_splitter(
            family_of(self._trait), Tools(TOOLS), reasoning_is_open=reasoning_is_open, thinking=self._on
        )
        stream = OutputStream(splitter)
        events = stream.feed(Text(text, tuple(written)))
        rest, end = stream.close(Finished("stop", Usage(1, 0, len(written))))
        for event in (*events, *rest):
            bound.add_output(event)
        bound.add_generated_tokens(
            [*written, *tokenizer.encode(TRAITS[self._trait].eos[0], as_document=False)]
        )
        bound.record_reply(
            end, is_whole=stream.is_whole, reply_surprisal_bits=CHANCE, reasoning_surprisal_bits=CHANCE
        )
        self._computed = [*bound.tokens.ids, *written]
        ids = [event.id for event in (*events, *rest) if isinstance(event, CallStarted)]
        return answer_of([*events, *rest], end), ids


EVERY_CLIENT = pytest.mark.parametrize("client", CLIENTS)
EVERY_TRAIT = pytest.mark.parametrize("trait", TRAITS)
THINKING = pytest.mark.parametrize("on", [True, False])


@pytest.mark.sample(32)
@pytest.mark.checked(48)
@THINKING
@EVERY_CLIENT
@EVERY_TRAIT
def test_every_call_is_read_and_nothing_is_computed_again(trait, client, on):
    replies = replies_of(trait)
    session = Agent(trait, CLIENTS[client], on=on).work(replies)
    assert session.calls == sum(len(message.tool_calls) for message in replies)
    assert [content.strip() for content in session.contents] == [message.content for message in replies]
    assert session.shared == session.computed


@pytest.mark.sample(64)
@pytest.mark.checked(48)
@THINKING
@EVERY_CLIENT
@EVERY_TRAIT
def test_a_second_question_goes_on_from_all_that_was_computed(trait, client, on):
    replies = replies_of(trait)
    session = Agent(trait, CLIENTS[client], on=on).work([*replies, *replies])
    least = 0.99 if trait not in MOVES_TOOLS else 0.9
    assert session.shared / session.computed >= least
