"""Clients that change what they send again, and what they have a right to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from random import Random

from start_llm.core.chat import ChatRequest, Json, KeptReasoning, Message, Thinking, ToolCall
from tests.prompt.fakes import reply, result, system, user
from tests.prompt.replies import TOOLS
from tests.transcripts.now import Now, check_now
from tests.transcripts.world import (
    BILLING,
    CARRIER,
    MOVING,
    OWN,
    SHAPES,
    Reply,
    Server,
    form_of,
    visible_words,
    without_reasoning,
    words,
)

TENANTS = (b"", b"other")
SESSIONS = (None, "one", "two")
PRIVATE = "mkrt"
"""Words that nobody else may read."""


@dataclass
class Talk:
    """A conversation as its client keeps it, up to what it asks next.

    Attributes:
        session: a bucket, if it is no name.
        name: what its client calls it.
        own: by the word of a message, the message id that was sent with it last.
        now: what its first messages say of now.
        known: what the prompts of this conversation have said and reasoning, for each tenant; a fork knows
            what was said before it.
    """

    tenant: bytes
    session: str | None
    messages: list[Message]
    name: str | None = None
    own: dict[str, str] = field(default_factory=dict[str, str])
    now: Now = field(default_factory=Now)
    known: dict[bytes, set[str]] = field(default_factory=dict[bytes, "set[str]"])

    @property
    def words_so_far(self) -> tuple[str, ...]:
        return tuple(word for message in self.messages for word in visible_words(message))

    @property
    def calls(self) -> int:
        return sum(len(message.tool_calls) for message in self.messages)

    def copy(self, count: int) -> Talk:
        known = {tenant: set(words_so_far) for tenant, words_so_far in self.known.items()}
        return replace(self, messages=self.messages[:count], own=dict(self.own), known=known)


@dataclass(frozen=True)
class _ReasoningOf:
    """The owner of a reasoning, and the words before it."""

    tenant: bytes
    name: str | None
    after: tuple[str, ...]


class World:
    """Some clients of one server.

    Args:
        strict: clients and model change nothing that a template shows.
    """

    def __init__(self, trait: str, kept: KeptReasoning, random: Random, *, strict: bool = False) -> None:
        self.server = Server(trait, kept)
        self._trait, self._kept, self._random, self._strict = trait, kept, random, strict
        self._count = 0
        self._talks: list[Talk] = []
        self._replies: dict[tuple[str, ...], Reply] = {}
        self._reasoning_texts: dict[str, set[_ReasoningOf]] = {}
        self._nows: set[tuple[bytes, str]] = set()
        self._named: dict[tuple[bytes, str], set[str]] = {}

    def live(self, requests: int) -> None:
        """So many requests of clients, each checked."""
        for _ in range(requests):
            if self._maybe(0.02):
                self.server.restart()
            talk = self._choose()
            request = self._request(talk)
            reply_ = self._reply(talk, on=request.thinking.on is not False)
            form = form_of(self._trait, reply_.shape, on=request.thinking.on is not False)
            assert form is not None
            read, received = self.server.answer(request, reply_.text(form, talk.calls), reply_)
            self._check(read, request, talk)
            self._check_now(read, request, talk)
            self._note(read, request, reply_, talk)
            self._go_on(talk, received)

    # ----------------------------------------------------------------------------------------- what is asked

    def word(self, kind: str = "v") -> str:
        self._count += 1
        return f"{kind}{self._count}x"

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance

    def _choose(self) -> Talk:
        if not self._talks or self._maybe(0.2):
            self._talks.append(self._new())
        elif self._maybe(0.35):
            self._talks.append(self._fork(self._random.choice(self._talks)))
        else:
            return self._talks[-1 if self._maybe(0.6) else self._random.randrange(len(self._talks))]
        return self._talks[-1]

    def _new(self) -> Talk:
        """Perhaps with the words of another one, which it knows nothing of."""
        first = [] if self._maybe(0.3) else [system(self.word())]
        messages = [*first, user(self.word())]
        if self._talks and not self._strict and self._maybe(0.7):
            other = self._random.choice(self._talks).messages
            messages = other[: next(n for n, message in enumerate(other, 1) if message.role == "user")]
        talk = Talk(self._random.choice(TENANTS), self._random.choice(SESSIONS), list(messages))
        talk.name = self._name()
        self._give_id(talk)
        talk.now = Now(reminds=self._maybe(0.5)).other(self._random, self.word)
        return talk

    def _fork(self, talk: Talk) -> Talk:
        """At any message that asks something; perhaps by somebody else, perhaps with another question."""
        ends = [
            end
            for end, (last, following) in enumerate(pairwise([*talk.messages, None]), 1)
            if (last and last.role == "user") or (last and last.role == "tool" and not _is_result(following))
        ]
        fork = talk.copy(self._random.choice(ends))
        fork.session = self._random.choice(SESSIONS)
        if self._maybe(0.7):
            fork.name = self._name()
        if self._maybe(0.15):
            fork.tenant = self._random.choice(TENANTS)
        if fork.messages[-1].role == "user" and self._maybe(0.3):
            fork.messages[-1] = user(self.word())
            self._give_id(fork)
        return fork

    def _name(self) -> str | None:
        return self._random.choice((None, "always the same", self.word("n")))

    def _give_id(self, talk: Talk) -> None:
        if self._maybe(0.4):
            talk.own[visible_words(talk.messages[-1])[0]] = self.word("m")

    def _request(self, talk: Talk) -> ChatRequest:
        if not self._strict and self._maybe(0.2):
            talk.now = talk.now.other(self._random, self.word)
        self._nows |= {(talk.tenant, word) for word in talk.now.words}
        tools = list(TOOLS)
        if not self._strict and self._maybe(0.2):
            self._random.shuffle(tools)
        return ChatRequest(
            messages=(*self._drifted(talk), *self._carriers()),
            tools=tuple(tools),
            thinking=Thinking(on=self._random.choice((True, True, None, False))),
            session_id=talk.session,
            conversation_id=talk.name,
            tenant=talk.tenant,
        )

    # ------------------------------------------------------------------------------------------------- drift

    def _carriers(self) -> list[Message]:
        """Gone in the next request."""
        is_one = self._trait != MOVING and not self._strict and self._maybe(0.2)
        return [user(CARRIER.format(self.word("c")))] if is_one else []

    def _drifted(self, talk: Talk) -> list[Message]:
        messages = self._with_new_ids([self._sent(message, talk) for message in talk.messages])
        drifted: list[Message] = []
        for is_result, run in groupby(messages, key=lambda message: message.role == "tool"):
            neighbours = list(run)
            if is_result and self._maybe(0.5):
                self._random.shuffle(neighbours)
            drifted += neighbours
        return drifted

    def _sent(self, message: Message, talk: Talk) -> Message:
        content = message.content
        match message.role:
            case "system" if message is talk.messages[0]:
                content = talk.now.system + content
                if self._maybe(0.5):
                    content = BILLING.format(self.word("b")) + content
            case "user":
                content = self._own_lines(visible_words(message)[0], talk) + content
                if message is next(item for item in talk.messages if item.role == "user"):
                    content = talk.now.reminder + content
            case "assistant":
                message = replace(message, reasoning=self._reasoning(message.reasoning))
            case _:
                pass
        if content and self._maybe(0.2):
            content += self._random.choice(("\n", "  ", "\n\n"))
        calls = tuple(replace(item, arguments=self._spelled(item)) for item in message.tool_calls)
        return replace(message, content=content, tool_calls=calls)

    def _own_lines(self, word: str, talk: Talk) -> str:
        if word not in talk.own:
            return ""
        if not self._strict and self._maybe(0.2):
            talk.own[word] = self.word("m")
        lines = OWN.format(talk.own[word])
        if not self._strict and self._maybe(0.1):
            lines = "".join(line for line in lines.splitlines(True) if "message_id" not in line)
        return lines

    def _reasoning(self, reasoning: str | None) -> str | None:
        match self._random.randrange(10):
            case 0 | 1 | 2 | 3:
                return None
            case 4:
                return f"\n {reasoning}\n" if reasoning else None
            case 5:
                return self.word("t")
            case _:
                return reasoning

    def _spelled(self, call: ToolCall) -> dict[str, Json]:
        items = list(call.arguments.items())
        if not self._strict and self._maybe(0.2):
            items.reverse()
        as_float = self._maybe(0.3)
        return {name: (float if as_float else int)(value) if isinstance(value, int | float) else value
                for name, value in items}  # fmt: skip

    def _with_new_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Other ids for all calls, in each request; results have them without punctuation at times."""
        if self._maybe(0.5):
            return list(messages)
        names = {call.id: f"call_{self.word('i')}" for message in messages for call in message.tool_calls}
        bare = self._maybe(0.3)

        def named(call_id: str) -> str:
            return names[call_id].replace("_", "") if bare else names[call_id]

        return [
            replace(
                message,
                tool_calls=tuple(replace(call, id=names[call.id]) for call in message.tool_calls),
                tool_call_id=named(message.tool_call_id) if message.tool_call_id else None,
            )
            for message in messages
        ]

    # ------------------------------------------------------------------------------------------- what is said

    def _reply(self, talk: Talk, *, on: bool) -> Reply:
        """The one that this conversation had before, perhaps with other reasoning; or a new one."""
        known = self._replies.get(talk.words_so_far)
        shapes = [shape for shape in SHAPES if form_of(self._trait, shape, on=on)]
        if known and known.shape in shapes and self._maybe(0.8):
            shape = (
                replace(known.shape, reasoning=not known.shape.reasoning) if self._maybe(0.2) else known.shape
            )
            new = known.reasoning if self._maybe(0.3) else self.word("t")
            return replace(known, reasoning=new, shape=shape if shape in shapes else known.shape)
        shape = self._random.choice(shapes)
        return Reply(
            shape,
            visible=tuple(self.word() for _ in range(3)),
            reasoning=self.word("t"),
            tidy=self._strict or self._maybe(0.7),
            cut=self._random.random() if self._maybe(0.15) else None,
            stop=self._maybe(0.3),
        )

    def _go_on(self, talk: Talk, received: Message) -> None:
        """Nothing was said: the client asks again, or something else."""
        if received.content or received.tool_calls:
            ids = {call.id: self.word("i") for call in received.tool_calls}
            calls = tuple(replace(call, id=ids[call.id]) for call in received.tool_calls)
            calls = received.tool_calls if self._maybe(0.7) else calls
            mine = reply(self.word()) if not calls and self._maybe(0.1) else received
            talk.messages.append(replace(mine, tool_calls=calls))
            results = [result(self.word(), call.id) for call in calls]
            talk.messages += results
            if results and self._maybe(0.8):
                return
        elif self._maybe(0.5):
            return
        else:
            talk.messages.pop()
        if self._trait != MOVING and talk.messages and self._maybe(0.1):
            talk.messages.append(system(self.word()))
        talk.messages.append(user(self.word()))
        self._give_id(talk)

    # ------------------------------------------------------------------------------------------------ the law

    def _note(self, read: str, request: ChatRequest, made: Reply, talk: Talk) -> None:
        asked = tuple(word for message in request.messages for word in visible_words(message))
        self._replies[asked] = replace(made, cut=None)
        reasoning = _ReasoningOf(request.tenant, talk.name, _exactly(request.messages))
        self._reasoning_texts.setdefault(made.reasoning, set()).add(reasoning)
        learned = {*words(read, PRIVATE), made.reasoning}
        talk.known.setdefault(talk.tenant, set()).update(learned)
        if talk.name:
            self._named.setdefault((talk.tenant, talk.name), set()).update(learned)

    def _check(self, read: str, request: ChatRequest, talk: Talk) -> None:
        fresh = self.server.fresh(request)
        assert words(read, "v") == words(fresh, "v"), "hidden, added or moved"
        assert words(read, "bi") == [], "no content"
        assert _is_in(words(fresh, "vt"), words(read, "vt")), "reasoning is hidden"
        self._check_reasoning(words(read, "vt"), request, talk)
        self._check_foreign(read, request, talk)
        if self._strict:
            assert without_reasoning(read) == without_reasoning(fresh)

    def _check_reasoning(self, seen: Sequence[str], request: ChatRequest, talk: Talk) -> None:
        """Each is what the client sent with this reply; or, if that is nothing, its own; or what the model
        reasoning after the very same words."""
        messages = list(request.messages)
        after: set[str] = set()
        for word in seen:
            if word[0] == "v":
                after.add(word)
                continue
            assert self._kept != "false"
            place = _place(messages, after)
            echoed = words(messages[place].reasoning or "", "t")
            before = _exactly(request.messages[:place])
            is_equal = any(
                made.after == before and made.tenant == request.tenant and _are_one(made.name, talk.name)
                for made in self._reasoning_texts.get(word, ())
            )
            assert word in echoed if echoed else is_equal or self._is_own(word, talk), f"{word} is foreign"
            messages[place] = replace(messages[place], reasoning=word)
        if self._kept == "template":
            shown = self.server.fresh(replace(request, messages=tuple(messages)))
            assert words(shown, "vt") == list(seen), "reasoning that the template does not show"

    def _check_foreign(self, read: str, request: ChatRequest, talk: Talk) -> None:
        """All that the client says is read; and nothing else that was not said in this conversation."""
        sent = {word for message in request.messages for word in words(message.content, "mkr")}
        seen = set(words(read, "mkr"))
        assert {word for word in sent if word[0] == "m"} <= seen, "hidden"
        for word in seen - sent:
            assert self._is_own(word, talk), f"{word} is foreign"

    def _is_own(self, word: str, talk: Talk) -> bool:
        """It was read or reasoning in this conversation before, or in one that the client calls the same."""
        named = self._named.get((talk.tenant, talk.name), ()) if talk.name else ()
        return word in talk.known.get(talk.tenant, ()) or word in named

    def _check_now(self, read: str, request: ChatRequest, talk: Talk) -> None:
        check_now(read, request.messages)
        assert {(talk.tenant, word) for word in words(read, "dkr")} <= self._nows, "of another tenant"
        assert words(read, "c") == words(request.messages[-1].content, "c"), "a carrier that is gone"


def _exactly(messages: Sequence[Message]) -> tuple[str, ...]:
    """Messages as they are sent, without what is no content."""
    return tuple(
        sorted(
            repr(
                (
                    message.role,
                    re.sub(r"x-anthropic-billing-header:.*\n", "", message.content),
                    (message.reasoning or "").strip(),
                    [(call.name, sorted(call.arguments.items())) for call in message.tool_calls],
                )
            )
            for message in messages
            if not words(message.content, "c")
        )
    )


def _are_one(name: str | None, other: str | None) -> bool:
    return name is None or other is None or name == other


def _is_result(message: Message | None) -> bool:
    return message is not None and message.role == "tool"


def _place(messages: Sequence[Message], after: set[str]) -> int:
    """The reply that comes when these words have been said."""
    preceding: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "assistant" and preceding == after:
            return index
        preceding |= set(visible_words(message))
    raise AssertionError("reasoning stands where no reply is")


def _is_in(inner: Sequence[str], outer: Sequence[str]) -> bool:
    rest = iter(outer)
    return all(word in rest for word in inner)
