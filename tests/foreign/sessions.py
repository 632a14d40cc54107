"""Sessions of one user that say the same words, at once, and differ in what keys leave out.

Words of two kinds stand in what they send: `s3n17q` is the seventeenth secret of session 3, in a git status,
a block, instructions, a message id, a carrier that the next request does not have, or a thought that it has
edited; `w2w` is said by all of them, so that beginnings meet. No prompt may hold a secret of another session,
or a thought that another one drew behind its carrier; each holds all that its request says, the common words
and the lines of its metadata in their order, and its own clock last. Who has tokens of its own reads no other
clock.

Bare sessions have no system text and no tools, and a template whose option for thoughts acts there alone.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Literal

from tests.foreign.forms import FORMS, Call, Form, Message, Request
from tests.proxy.conftest import KEY
from tests.transcripts.world import CARRIER

SECRET, WORD = re.compile(r"s\d+n\d+q"), re.compile(r"\bw\d+w\b")
RULES = "You are brief and say what you see. " * 4
PATIENCE_S = 60
_DAY = date(2026, 1, 1)
_LONGEST = 16
"""Messages, until a client begins anew."""
_COMMON = ("Done.", "It is w1w.", "    w2w")
"""Replies that clients write themselves."""
_CLOCK = re.compile(r"Current date: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_TO_THE_MINUTE = len("2026-01-01 10:00")
_LONG = "an id in which a client writes everything that it knows of its user, " * 4
_PLACEHOLDERS = ("default", "undefined", "0", "null", "None", "main")
_THINKS = {"enable_thinking": True, "thinking_budget": 12, "parallel_tool_calls": False}
WRITES_THOUGHTS = "Write your thoughts"
"""In the system text of a bare session whose request turns thoughts on."""
_SHORTEST_THOUGHT = 12
_RESULTS = ("{}    return {}", "{}        return {}", "{}return {}\n\n", "{}\treturn {} ", "\n{}return {}")

type Ports = tuple[int, int | None]
type Prompt = Callable[[], str]
"""The prompt that the model read last."""


@dataclass
class Session:
    """A conversation as its client keeps it.

    Attributes:
        number: in its secrets.
        named, headers: what its client says that it is.
        known: secrets that were ever said in it; a fork knows what was said before it.
        ids: by the index of a question, the message id that it was sent with.
        people: by the index of a question, the lines of who sent it and who received it.
        is_named: it has a name that nobody else has.
        has_received: it holds a reply as this server gave and recorded it, behind what it says now, so it has
            tokens of its own.
        content: of its messages, as they were sent last.
        treats_thoughts: what its client does with them; an edited one keeps its seal.
        thoughts: those of its replies.
        behind_carriers: those of its replies to requests with a carrier.
        clocks: what it has said that its clock is.
        read: clocks that stood in its prompts.
    """

    number: int
    form: Form
    is_proxied: bool
    temperature: float
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    is_name_shared: bool = False
    messages: list[Message] = field(default_factory=list[Message])
    known: set[str] = field(default_factory=set[str])
    day: int = 0
    stated: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[int, str] = field(default_factory=dict[int, str])
    people: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    count: int = 0
    second: int = 0
    is_bare: bool = False
    is_named: bool = False
    has_received: bool = False
    content: list[str] = field(default_factory=list[str])
    treats_thoughts: Literal["drops", "keeps", "edits"] = "drops"
    thoughts: set[str] = field(default_factory=set[str])
    behind_carriers: set[str] = field(default_factory=set[str])
    clocks: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])

    def secret(self) -> str:
        self.count += 1
        word = f"s{self.number}n{self.count}q"
        self.known.add(word)
        return word

    @property
    def clock(self) -> str:
        return f"{_DAY + timedelta(self.day)} 10:00:{self.second:02}"

    @property
    def system(self) -> str:
        if self.is_bare:
            return ""
        return "".join(
            (
                f"Current date: {self.clock}\n",
                RULES,
                "\n## Inbound Context (trusted metadata)\nOf this chat.\n```json\n"
                f'{{"chat": "{self.stated["chat"]}"}}\n```\n'
                if "chat" in self.stated
                else "\n",
                f"gitStatus: {self.stated['status']}\n\nRecent commits:\n1a2b3c {self.stated['status']}\n\n"
                if "status" in self.stated
                else "",
            )
        )

    @property
    def reminder(self) -> str:
        if "rules" not in self.stated:
            return ""
        return (
            f"<system-reminder>\nUse this.\n# claudeMd\nThe key is {self.stated['rules']}.\n\n"
            "      IMPORTANT: this context may or may not be relevant.\n</system-reminder>\n\n"
        )


def _envelope(message_id: str, people: tuple[str, str] = ('"sender": "ann"', '"receiver": "bob"')) -> str:
    first, second = people
    info = f'{{\n  "message_id": "{message_id}",\n  {first},\n  {second}\n}}'
    return f"Conversation info (untrusted metadata):\n```json\n{info}\n```\n\n"


class Sessions:
    """Some sessions on one server, one request at a time.

    Args:
        ports: of the server, and of the proxy if there is one.
        prompt: what the model read last.
        at_once: sessions that are open.
        first: number of the last session that the server has seen before.
        are_bare: they have no system text and no tools.
    """

    def __init__(
        self,
        ports: Ports,
        prompt: Prompt,
        random: Random,
        at_once: int,
        first: int = 0,
        *,
        are_bare: bool = False,
    ) -> None:
        self.ports, self._prompt = ports, prompt
        self._random, self._at_once = random, at_once
        self._count, self._are_bare = first, are_bare
        self._open: list[Session] = []
        self._all: list[Session] = []
        self.counts: Counter[str] = Counter()

    def play(self, requests: int) -> None:
        """So many requests, each prompt checked.

        Raises:
            AssertionError: a prompt has what is foreign, or lacks what was said.
        """
        for _ in range(requests):
            while len(self._open) < self._at_once:
                self._open.append(self._new())
            session = self._random.choice(self._open)
            self._turn(session)
            if len(session.messages) > _LONGEST or self._maybe(0.05):
                self._open.remove(session)

    def restarted(self, ports: Ports, prompt: Prompt) -> None:
        """Another server, which remembers nothing. Who shares a name begins anew: see ADR 13."""
        self.ports, self._prompt = ports, prompt
        self._open = [session for session in self._open if not session.is_name_shared]
        for session in self._open:
            session.has_received = False

    def _maybe(self, chance: float) -> bool:
        return self._random.random() < chance

    # ------------------------------------------------------------------------------------------- who they are

    def _new(self) -> Session:
        """With the same words as others, and at times with what another one was replied."""
        self._count += 1
        session = Session(
            number=self._count,
            form=self._random.choice([*FORMS.values()]),
            is_proxied=self.ports[1] is not None and self._maybe(0.3),
            temperature=self._random.choice((0.0, 0.0, 1.0)),
            day=self._random.randrange(6),
            second=self._random.randrange(60),
            is_bare=self._are_bare,
            treats_thoughts=self._random.choice(("drops", "drops", "keeps", "edits")),
        )
        others = [candidate for candidate in self._open if candidate.messages]
        match self._random.randrange(4) if others else 0:
            case 1:
                self._fork(session, self._random.choice(others))
            case 2:
                self._adopt(session, self._random.choice(others))
            case _:
                self._name(session, may_share=True)
                session.messages = [self._question()]
        self._change(session, 0.5)
        if not session.ids and self._maybe(0.5):
            session.ids[0] = session.secret()
        self._all.append(session)
        return session

    def _name(self, session: Session, *, may_share: bool) -> None:
        match self._random.randrange(8 if may_share else 6):
            case 0:
                session.named, session.is_named = {"session_id": f"named {self._count}"}, True
            case 1:
                session.headers, session.is_named = {"session-id": f"called {self._count}"}, True
            case 2:
                session.named = {"prompt_cache_key": "everybody"}
            case 3:
                pass
            case 4:
                session.named, session.is_named = {"session_id": f"{_LONG}{self._count}"}, True
            case 5:
                session.named = {"session_id": self._random.choice(_PLACEHOLDERS)}
            case _:
                session.named, session.is_name_shared = {"session_id": "of everybody"}, True

    def _fork(self, session: Session, other: Session) -> None:
        """Take over everything that the other one has said, reasoned and received up to a question."""
        self.counts["forks"] += 1
        ends = [end for end, message in enumerate(other.messages, 1) if message.role == "user"]
        session.form, session.temperature, session.stated = other.form, other.temperature, dict(other.stated)
        session.messages = other.messages[: self._random.choice(ends)]
        session.known, session.ids, session.people = set(other.known), dict(other.ids), dict(other.people)
        session.clocks, session.read = set(other.clocks), set(other.read)
        session.thoughts, session.treats_thoughts = set(other.thoughts), other.treats_thoughts
        self._name(session, may_share=False)

    def _adopt(self, session: Session, other: Session) -> None:
        """The same words and replies as another one, which it knows nothing of: it began somewhere else.

        Replies with chance in them cannot be had by accident: then nothing is adopted but questions.
        """
        self.counts["adopted"] += 1
        end = len(other.messages) if other.temperature == 0 else 1
        names = {call.id: f"call_{self._count}{n}" for n, call in enumerate(_calls(other.messages))}
        session.form = other.form
        session.messages = [_renamed(message, names) for message in other.messages[:end]]
        session.known |= {word for reply in session.messages for word in SECRET.findall(str(reply.thought))}
        self._name(session, may_share=False)

    # ------------------------------------------------------------------------------------------- what is said

    def _question(self) -> Message:
        indent = self._random.choice(("", "", "    ", "\n  "))
        return Message("user", f"{indent}w{self._random.randrange(3)}w, please?")

    def _change(self, session: Session, chance: float) -> None:
        """Change a value that the client says of now."""
        if self._maybe(chance):
            session.day += 1
        if self._maybe(2 * chance):
            session.second = self._random.randrange(60)
        for name in ("chat", "status", "rules"):
            if self._maybe(chance):
                session.stated[name] = session.secret()
                if self._maybe(0.1):
                    del session.stated[name]

    def _sent(self, session: Session) -> list[Message]:
        """With what a client puts around the words, and with other white space at their ends."""
        sent: list[Message] = []
        first = next(index for index, entry in enumerate(session.messages) if entry.role == "user")
        for index, message in enumerate(session.messages):
            text = message.text
            if message.role == "user" and index in session.ids:
                if index < len(session.messages) - 1 and self._maybe(0.3):
                    session.ids[index] = self._random.choice((session.secret(), ""))
                text = self._metadata(session, index, is_newest=index == len(session.messages) - 1) + text
            if index == first:
                text = session.reminder + text
            if message.role == "user" and self._maybe(0.1):
                text += self._random.choice(("\n", "  "))
            sent.append(replace(message, text=text))
        return sent

    def _metadata(self, session: Session, index: int, *, is_newest: bool) -> str:
        people = session.people.setdefault(
            index, (f'"sender": "a{session.number}x{index}"', f'"receiver": "b{session.number}x{index}"')
        )
        if not is_newest and self._maybe(0.1):
            self.counts["exchanged lines"] += 1
            session.people[index] = people = (people[1], people[0])
        envelope = _envelope(session.ids[index], people)
        return envelope if session.ids[index] else envelope.replace('  "message_id": "",\n', "")

    def _treated(self, session: Session, reply: Message) -> Message:
        """The reply as this client sends it again."""
        match session.treats_thoughts:
            case "drops":
                return replace(reply, thought={})
            case "keeps":
                return reply
            case "edits":
                self.counts["edited thoughts"] += 1
                return replace(
                    reply, thought=session.form.edited(reply.thought, f"I say {session.secret()}.")
                )

    # -------------------------------------------------------------------------------------------- one request

    def _turn(self, session: Session) -> None:
        self._change(session, 0.15)
        calls = self._maybe(0.3) and not session.is_bare
        thinks = calls and self._maybe(0.6)
        messages = self._sent(session)
        carrier = self._carrier(session) if self._maybe(0.2) else ()
        session.clocks.add(session.clock)
        content = [_content(message.text) for message in messages]
        session.has_received &= session.content == content[: len(session.content)]
        session.content = content
        request = Request(
            system=session.system,
            messages=[*messages, *carrier],
            length=128 if thinks else 64 if calls else self._random.choice((6, 12)),
            temperature=session.temperature,
            calls=calls,
            named=session.named,
            headers=session.headers,
            has_tools=not session.is_bare,
            options=_THINKS if thinks else {"enable_thinking": session.is_bare and self._maybe(0.5)},
        )
        reply = self._ask(session, request)
        if reply.thought:
            thought = session.form.thought(reply.thought).strip()
            session.thoughts.add(thought)
            session.behind_carriers |= {thought} if carrier else set()
        self._check(session, request, self._prompt())
        self._go_on(session, reply)

    def _carrier(self, session: Session) -> tuple[Message, ...]:
        self.counts["carriers"] += 1
        return (Message("user", CARRIER.format(session.secret())),)

    def _ask(self, session: Session, request: Request) -> Message:
        server, proxy = self.ports
        port = proxy if session.is_proxied and proxy else server
        body = {"model": "openai/local", **session.form.body(request)}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **request.headers}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        try:
            connection.request("POST", session.form.path, json.dumps(body), headers)
            reply = connection.getresponse()
            raw = reply.read()
        finally:
            connection.close()
        assert reply.status == 200, (session.form.path, raw[:500], body)
        self.counts[f"{session.form.path} at {'the proxy' if port == proxy else 'the server'}"] += 1
        return session.form.reply(json.loads(raw))

    def _check(self, session: Session, request: Request, prompt: str) -> None:
        texts = (request.system, *(message.text for message in request.messages))
        secrets = set(SECRET.findall(prompt))
        assert secrets <= session.known, f"{secrets - session.known} is foreign in {prompt}"
        missing = {word for text in texts for word in SECRET.findall(text)} - secrets
        assert not missing, f"{missing} is missing in {prompt}"
        self._check_thoughts(session, request, prompt)
        if session.is_bare:
            is_on = request.options["enable_thinking"]
            assert (WRITES_THOUGHTS in prompt) == is_on, (
                f"{is_on} at {session.form.path} ({session.is_proxied}): {prompt}"
            )
        else:
            self._check_clocks(session, prompt)
        words = [word for text in texts for word in WORD.findall(text)]
        assert WORD.findall(prompt) == words, f"not the words {words} in {prompt}"
        for message in request.messages:
            body = message.text.rstrip() if message.role == "user" else message.text
            if message.role != "assistant" and not any(mark in body for mark in _LEFT_OUT):
                assert body in prompt, f"{body!r} is not in {prompt}"
        for index, message in enumerate(session.messages):
            if message.role == "user" and index in session.ids:
                first, second = session.people[index]
                assert prompt.rindex(first) < prompt.rindex(second), (
                    f"{first}, {second}: exchanged in {prompt}"
                )

    def _check_thoughts(self, session: Session, request: Request, prompt: str) -> None:
        for other in self._all:
            for thought in other.behind_carriers - session.thoughts:
                assert len(thought) < _SHORTEST_THOUGHT or thought not in prompt, (
                    f"{thought!r} is foreign in {prompt}"
                )
        *_, replied, last = (None, *request.messages)
        if replied and replied.thought and last and last.role == "tool":
            thought = session.form.thought(replied.thought).strip()
            assert thought in prompt, f"the thought {thought!r} is missing in {prompt}"

    def _check_clocks(self, session: Session, prompt: str) -> None:
        """The clock that the prompt tells last is its own, to the second unless the tokens are its own."""
        clocks = _CLOCK.findall(prompt)
        last, minute = clocks[-1], session.clock[:_TO_THE_MINUTE]
        is_own = last in session.clocks and last[:_TO_THE_MINUTE] == minute
        assert last == session.clock or is_own, f"{last} in place of {session.clock} in {prompt}"
        others = set(clocks) - session.clocks - session.read
        session.read.update(clocks)
        if others:
            self.counts["clocks of others"] += 1
            has_own = session.is_named and session.has_received
            who = (session.number, session.form.path, session.named, session.headers, session.is_proxied)
            assert not has_own, f"{others} of another session beside own tokens of {who} in {prompt}"

    def _go_on(self, session: Session, reply: Message) -> None:
        """A call is carried out. A reply that says nothing, or was cut in a call, is asked for again."""
        whole = all(_is_object(call.arguments) for call in reply.calls)
        if not whole or not (reply.text.strip() or reply.calls):
            return
        if not reply.calls and self._maybe(0.3) and not session.is_name_shared:
            self.counts["written by clients"] += 1
            reply = Message("assistant", self._random.choice(_COMMON))
        else:
            session.has_received |= _is_surely_recorded(reply) and session.treats_thoughts != "edits"
        if reply.thought:
            self.counts["thoughts"] += 1
            reply = self._treated(session, reply)
        session.messages.append(reply)
        word = f"w{self._random.randrange(3)}w"
        for call in reply.calls:
            text = self._random.choice(_RESULTS).format("", word)
            session.messages.append(Message("tool", text, of=call.id))
        if not reply.calls or self._maybe(0.5):
            if reply.calls:
                session.messages.append(Message("assistant", self._random.choice(_COMMON)))
            session.messages.append(self._question())
            if self._maybe(0.5):
                session.ids[len(session.messages) - 1] = session.secret()


_INSTRUCTIONS = re.compile(r"# claudeMd\n.*\n")
_METADATA = re.compile(r"\AConversation info.*?```\n\n", re.DOTALL)


def _content(text: str) -> str:
    """What may not change in a message, or it is another one: metadata behind a reminder belong to it."""
    return _METADATA.sub("", _INSTRUCTIONS.sub("", text)).rstrip()


_LEFT_OUT = ("Conversation info", "<system-reminder>")
"""Lines that may be gone in what the client sends, and still stand in the prompt."""


def _calls(messages: list[Message]) -> Iterator[Call]:
    for message in messages:
        yield from message.calls


def _renamed(message: Message, names: Mapping[str, str]) -> Message:
    """Return a message without what only its receiver has: other ids of calls, and no thought with a seal."""
    calls = tuple(replace(call, id=names[call.id]) for call in message.calls)
    thought = {name: text for name, text in message.thought.items() if name == "reasoning_content"}
    return replace(message, calls=calls, of=names.get(message.of, ""), thought=thought)


def _is_surely_recorded(reply: Message) -> bool:
    """Return whether nothing in a reply looks like markup: it might have been cut in it."""
    return not set(reply.text) & set("<>{}[]")


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


class Trace:
    """The prompts of a server that keeps them in its trace."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: Counter[Path] = Counter()

    def newest(self) -> str:
        """The prompt of the one request of a session that has ended since the last call."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for prompt in self._new():
                if RULES in prompt or ", please?" in prompt:  # what the proxy asks when it starts is none
                    return prompt
            time.sleep(0.001)
        raise AssertionError("the trace has no new line")

    def _new(self) -> Iterator[str]:
        for path in self._root.glob("*/cache-session-*.log"):
            if path.stat().st_size == self._read[path]:
                continue
            with path.open("rb") as file:
                file.seek(self._read[path])
                lines = list(takewhile(lambda line: line.endswith(b"\n"), file))  # the rest is being written
            self._read[path] += sum(map(len, lines))
            yield from (str(json.loads(line)["prompt"]) for line in lines)
