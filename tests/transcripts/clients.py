"""Clients that change what they send again, and what they have a right to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from random import Random

from start_llm.core.chat import ChatRequest, Json, KeptThoughts, Message, Thinking, ToolCall
from tests.prompt.fakes import result, system, user
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
    said_in,
    without_thoughts,
    words,
)

TENANTS = (b"", b"other")
SESSIONS = (None, "one", "two")


@dataclass
class Talk:
    """A conversation as its client keeps it, up to what it asks next.

    Attributes:
        own: by the word of a message, the message id that was sent with it last.
        now: what its first messages say of now.
        nows: for each tenant all that was ever sent in this chat: by all who go on from its replies.
        moved: some replies were written for another tenant: whose they are cannot be told then.
    """

    tenant: bytes
    session: str | None
    messages: list[Message]
    own: dict[str, str] = field(default_factory=dict[str, str])
    now: Now = field(default_factory=Now)
    nows: dict[bytes, set[str]] = field(default_factory=dict[bytes, "set[str]"])
    moved: bool = False

    @property
    def said(self) -> tuple[str, ...]:
        return tuple(word for message in self.messages for word in said_in(message))

    @property
    def calls(self) -> int:
        return sum(len(message.tool_calls) for message in self.messages)

    def copy(self, count: int) -> Talk:
        messages = self.messages[:count]
        is_this_chat = any(message.role == "assistant" for message in messages)
        nows = self.nows if is_this_chat else dict[bytes, "set[str]"]()
        return replace(self, messages=messages, own=dict(self.own), nows=nows)


@dataclass(frozen=True)
class _Thought:
    """Whose a thought is, and all that had been said before it."""

    tenant: bytes
    behind: frozenset[str]


class World:
    """Some clients of one server.

    Args:
        strict: clients and model change nothing that a template shows.
    """

    def __init__(self, trait: str, kept: KeptThoughts, random: Random, *, strict: bool = False) -> None:
        self.server = Server(trait, kept)
        self._trait, self._kept, self._random, self._strict = trait, kept, random, strict
        self._count = 0
        self._talks: list[Talk] = []
        self._replies: dict[tuple[str, ...], Reply] = {}
        self._thoughts: dict[str, set[_Thought]] = {}
        self._nows: set[tuple[bytes, str]] = set()
        self._read_with: dict[tuple[bytes, tuple[str, ...]], list[set[str]]] = {}

    def live(self, requests: int) -> None:
        """So many requests of clients, each checked."""
        for _ in range(requests):
            talk = self._choose()
            request = self._request(talk)
            reply_ = self._reply(talk, on=request.thinking.on is not False)
            form = form_of(self._trait, reply_.shape, on=request.thinking.on is not False)
            assert form is not None
            read, said = self.server.answer(request, reply_.text(form, talk.calls), reply_)
            self._check(read, request)
            self._check_now(read, request, talk)
            self._note(read, request, reply_, said)
            self._go_on(talk, said)

    # ----------------------------------------------------------------------------------------- what is asked

    def word(self, kind: str = "v") -> str:
        self._count += 1
        return f"{kind}{self._count}x"

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance

    def _choose(self) -> Talk:
        if not self._talks or self._maybe(0.1):
            self._talks.append(self._new())
        elif self._maybe(0.35):
            self._talks.append(self._fork(self._random.choice(self._talks)))
        else:
            return self._talks[-1 if self._maybe(0.6) else self._random.randrange(len(self._talks))]
        return self._talks[-1]

    def _new(self) -> Talk:
        first = [] if self._trait == MOVING or self._maybe(0.3) else [system(self.word())]
        talk = Talk(self._random.choice(TENANTS), self._random.choice(SESSIONS), [*first, user(self.word())])
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
        if self._maybe(0.15):
            fork.tenant = self._random.choice(TENANTS)
            fork.moved = talk.moved or fork.tenant != talk.tenant
        if fork.messages[-1].role == "user" and self._maybe(0.3):
            fork.messages[-1] = user(self.word())
            self._give_id(fork)
        return fork

    def _give_id(self, talk: Talk) -> None:
        if self._maybe(0.4):
            talk.own[said_in(talk.messages[-1])[0]] = self.word("m")

    def _request(self, talk: Talk) -> ChatRequest:
        if not self._strict and self._maybe(0.2):
            talk.now = talk.now.other(self._random, self.word)
        talk.nows.setdefault(talk.tenant, set()).update(talk.now.words)
        self._nows |= {(talk.tenant, word) for word in talk.now.words}
        tools = list(TOOLS) if self._trait != MOVING else []
        if not self._strict and self._maybe(0.2):
            self._random.shuffle(tools)
        return ChatRequest(
            messages=(*self._drifted(talk), *self._carriers()),
            tools=tuple(tools),
            thinking=Thinking(on=self._random.choice((True, True, None, False))),
            session_id=talk.session,
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
                content = self._own_lines(said_in(message)[0], talk) + content
                if message is next(one for one in talk.messages if one.role == "user"):
                    content = talk.now.reminder + content
            case "assistant":
                message = replace(message, reasoning=self._thought(message.reasoning))
            case _:
                pass
        if content and self._maybe(0.2):
            content += self._random.choice(("\n", "  ", "\n\n"))
        calls = tuple(replace(one, arguments=self._spelled(one)) for one in message.tool_calls)
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

    def _thought(self, thought: str | None) -> str | None:
        match self._random.randrange(10):
            case 0 | 1 | 2 | 3:
                return None
            case 4:
                return f"\n {thought}\n" if thought else None
            case 5:
                return self.word("t")
            case _:
                return thought

    def _spelled(self, one: ToolCall) -> dict[str, Json]:
        items = list(one.arguments.items())
        if not self._strict and self._maybe(0.2):
            items.reverse()
        as_float = self._maybe(0.3)
        return {name: (float if as_float else int)(value) if isinstance(value, int | float) else value
                for name, value in items}  # fmt: skip

    def _with_new_ids(self, messages: Sequence[Message]) -> list[Message]:
        """Other ids for all calls, in each request; results have them without punctuation at times."""
        if self._maybe(0.5):
            return list(messages)
        names = {one.id: f"call_{self.word('i')}" for message in messages for one in message.tool_calls}
        bare = self._maybe(0.3)

        def named(call_id: str) -> str:
            return names[call_id].replace("_", "") if bare else names[call_id]

        return [
            replace(
                message,
                tool_calls=tuple(replace(one, id=names[one.id]) for one in message.tool_calls),
                tool_call_id=named(message.tool_call_id) if message.tool_call_id else None,
            )
            for message in messages
        ]

    # ------------------------------------------------------------------------------------------- what is said

    def _reply(self, talk: Talk, *, on: bool) -> Reply:
        """The one that this conversation had before, perhaps with another thought; or a new one."""
        known = self._replies.get(talk.said)
        shapes = [shape for shape in SHAPES if form_of(self._trait, shape, on=on)]
        if known and known.shape in shapes and self._maybe(0.6):
            shape = replace(known.shape, thought=not known.shape.thought) if self._maybe(0.2) else known.shape
            new = known.thought if self._maybe(0.3) else self.word("t")
            return replace(known, thought=new, shape=shape if shape in shapes else known.shape)
        shape = self._random.choice(shapes)
        return Reply(
            shape,
            visible=tuple(self.word() for _ in range(3)),
            thought=self.word("t"),
            tidy=self._strict or self._maybe(0.7),
            cut=self._random.random() if self._maybe(0.15) else None,
            stop=self._maybe(0.3),
        )

    def _go_on(self, talk: Talk, said: Message) -> None:
        """Nothing was said: the client asks again, or something else."""
        if said.content or said.tool_calls:
            ids = {one.id: self.word("i") for one in said.tool_calls}
            calls = tuple(replace(one, id=ids[one.id]) for one in said.tool_calls)
            talk.messages.append(replace(said, tool_calls=calls))
            results = [result(self.word(), one.id) for one in calls]
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

    def _note(self, read: str, request: ChatRequest, made: Reply, said: Message) -> None:
        asked = tuple(word for message in request.messages for word in said_in(message))
        self._replies[asked] = replace(made, cut=None)
        self._thoughts.setdefault(made.thought, set()).add(_Thought(request.tenant, frozenset(asked)))
        self._read_with.setdefault((request.tenant, _name(said)), []).append(set(words(read, "mt")))

    def _check(self, read: str, request: ChatRequest) -> None:
        fresh = self.server.fresh(request)
        assert words(read, "v") == words(fresh, "v"), "hidden, added or moved"
        assert words(read, "bi") == [], "no content"
        assert _is_in(words(fresh, "vt"), words(read, "vt")), "a thought is hidden"
        self._check_thoughts(words(read, "vt"), request)
        self._check_own(set(words(read, "m")), request)
        if self._strict:
            assert without_thoughts(read) == without_thoughts(fresh)

    def _check_thoughts(self, seen: Sequence[str], request: ChatRequest) -> None:
        """Each is what the client sent with this reply; or, if that is nothing, ours, or an earlier one."""
        messages = list(request.messages)
        behind: set[str] = set()
        for word in seen:
            if word[0] == "v":
                behind.add(word)
                continue
            assert self._kept != "false"
            place = _place(messages, behind)
            echoed = words(messages[place].reasoning or "", "t")
            is_ours = _Thought(request.tenant, frozenset(behind)) in self._thoughts.get(word, ())
            is_kept = any(word in made for made in self._made_behind(place, request))
            assert word in echoed if echoed else is_ours or is_kept, f"{word} is foreign"
            messages[place] = replace(messages[place], reasoning=word)
        if self._kept == "template":
            shown = self.server.fresh(replace(request, messages=tuple(messages)))
            assert words(shown, "vt") == list(seen), "a thought that the template does not show"

    def _check_own(self, seen: set[str], request: ChatRequest) -> None:
        """An earlier value stays where a reply was made with it that the client has sent back."""
        for index, message in enumerate(request.messages):
            sent = words(message.content, "m")
            if sent and sent[0] not in seen:
                made = self._made_behind(index, request)
                assert any(sent[0] not in one for one in made), f"{sent[0]} is hidden"
        sent = {word for message in request.messages for word in words(message.content, "m")}
        for word in seen - sent:
            made = self._made_behind(-1, request)
            assert any(word in one for one in made), f"{word} is foreign"

    def _check_now(self, read: str, request: ChatRequest, talk: Talk) -> None:
        """And what was so is this chat's, or no more than a date."""
        check_now(read, request.messages)
        assert talk.moved or set(words(read, "kr")) <= talk.nows[talk.tenant], "of another chat"
        assert {(talk.tenant, word) for word in words(read, "dkr")} <= self._nows, "of another tenant"
        assert words(read, "c") == words(request.messages[-1].content, "c"), "a carrier that is gone"

    def _made_behind(self, index: int, request: ChatRequest) -> list[set[str]]:
        """The message ids and thoughts that our replies behind this message were made with."""
        replies = [message for message in request.messages[index + 1 :] if message.role == "assistant"]
        return [
            ids for message in replies for ids in self._read_with.get((request.tenant, _name(message)), ())
        ]


def _name(message: Message) -> tuple[str, ...]:
    """A reply by what it says."""
    return (message.content.strip(), *said_in(message))


def _is_result(message: Message | None) -> bool:
    return message is not None and message.role == "tool"


def _place(messages: Sequence[Message], behind: set[str]) -> int:
    """The reply that comes when these words have been said."""
    said: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "assistant" and said == behind:
            return index
        said |= set(said_in(message))
    raise AssertionError("a thought stands where no reply is")


def _is_in(inner: Sequence[str], outer: Sequence[str]) -> bool:
    rest = iter(outer)
    return all(word in rest for word in inner)
