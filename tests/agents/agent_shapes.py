"""The shapes of coding agents: what they send to a server, one request after the other."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from scripts import tiny_models
from tests.agents.agent_account import (
    REPLY_TOKENS,
    Account,
    Charge,
    Ledger,
    Message,
    Rendering,
    Request,
    Sample,
    user,
)
from tests.agents.agent_clients import CLIENTS, PLAIN, REASONING, Change, Client, new_lines

type Model = Literal["random", "thinks", "calls"]

SYSTEM_TOKENS = 950
"""With the tools and the markup it makes 1,200."""
CALL_TOKENS, RESULT_TOKENS, USER_TOKENS = 120, 700, 150
"""With the markup, about 950 tokens a turn."""
AGENTS, MANY_AGENTS = 4, 25
LEAVE_AT = 0.5
"""Share of the expected prefill after which a client leaves."""
RETRY_PAUSE_S = 0.5
TITLE_TOKENS = 100
OWN_REPLY_TOKENS = 512
"""More than a scripted model says."""


class ServerFailed(Exception):
    """A server that is measured refused a request, broke it off, or does not do what a shape is about."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A server's reply.

    Attributes:
        message: as a client keeps it.
        first_s: seconds until the first text.
        prompt_tokens: None if the server does not report them.
    """

    message: Message
    first_s: float
    prompt_tokens: int | None
    cached_tokens: int


class Server(Protocol):
    """One that is measured."""

    def ask(self, request: Request) -> Reply: ...

    def leave(self, request: Request, after_s: float) -> None:
        """Send, and disconnect after so many seconds."""
        ...

    def prefilled_tokens(self) -> int | None:
        """The engine's own count since its start, abandoned prompts included; None if there is none."""
        ...


class Player:
    """Plays shapes against one server. The wall clock runs only while a request does."""

    def __init__(self, server: Server, rendering: Rendering, *, own: bool) -> None:
        self.own = own
        self.rendering = rendering
        self._server = server
        self._computed_prefixes = Ledger(rendering)
        server.ask(Request.of([user("Hello")]))
        self._open_account()

    def play(self, shape: Shape, size: Size) -> Account:
        self._open_account()
        shape.play(self, size)
        self._account.prefilled = self._prefilled_since(self._before)
        return self._account

    def _open_account(self) -> None:
        self._account = Account()
        self._before = self._server.prefilled_tokens()

    def _prefilled_since(self, before: int | None) -> int | None:
        now = self._server.prefilled_tokens()
        return None if before is None or now is None else now - before

    def ask(self, *requests: Request) -> list[Reply]:
        """Send all of them at once. Which of them computes what they share is the server's choice."""
        charges = [self._computed_prefixes.charge(request) for request in requests]
        with self._timed(), ThreadPoolExecutor(len(requests)) as pool:
            replies = list(pool.map(self._server.ask, requests))
        by_work = sorted(zip(requests, replies, strict=True), key=lambda pair: self._computed(*pair))
        for (request, reply), charge in zip(by_work, sorted(charges), strict=True):
            self._record(request, charge, reply)
        return replies

    @contextmanager
    def _timed(self) -> Generator[None]:
        began = time.perf_counter()
        yield
        self._account.wall_s += time.perf_counter() - began

    def _prompt(self, request: Request, reply: Reply) -> int:
        return reply.prompt_tokens or len(self.rendering.tokens(request))

    def _computed(self, request: Request, reply: Reply) -> int:
        return self._prompt(request, reply) - reply.cached_tokens

    def _record(self, request: Request, charge: Charge, reply: Reply) -> None:
        sample = Sample(
            prompt=self._prompt(request, reply),
            new=charge.new,
            unavoidable=charge.unavoidable,
            computed=self._computed(request, reply),
            first_s=reply.first_s,
        )
        self._account.samples.append(sample)
        self._computed_prefixes.heard(request, reply.message)

    def rehearse(self, request: Request) -> float:
        """Seconds until the first text of a request that is not counted."""
        seconds = self._server.ask(request).first_s
        self._open_account()
        return seconds

    def ask_leave_and_ask_again(self, request: Request, after_s: float, share: float) -> None:
        """The two requests together have to compute every token once.

        What the first one computed is in no usage. The engine's count tells it; without one it is `share` of
        the prompt, or what the second one found, if that is more.
        """
        charge, before = self._computed_prefixes.charge(request), self._server.prefilled_tokens()
        with self._timed():
            self._server.leave(request, after_s)
        time.sleep(RETRY_PAUSE_S)
        with self._timed():
            reply = self._server.ask(request)
        prompt = len(self.rendering.tokens(request))
        counted = self._prefilled_since(before)
        computed = (
            max(round(share * prompt), reply.cached_tokens)
            if counted is None
            else max(0, counted - self._computed(request, reply))
        )
        first = min(charge.unavoidable, computed)
        rest = charge.unavoidable - first
        self._record(request, Charge(unavoidable=rest, new=rest), reply)
        self._account.samples.append(
            Sample(
                prompt=prompt,
                new=first,
                unavoidable=first,
                computed=computed,
                first_s=None,
                is_estimate=counted is None,
            )
        )


@dataclass
class Chat:
    """One conversation, as a client keeps it. `asked` has its length and the reply for each request."""

    player: Player
    name: str
    messages: list[Message]
    asked: list[tuple[int, Message]] = field(default_factory=list[tuple[int, Message]])
    client: Client = PLAIN

    @classmethod
    def begin(
        cls, player: Player, system: str, name: str, user_tokens: int = USER_TOKENS, client: Client = PLAIN
    ) -> Chat:
        """Chats of one `system` name share the system prompt."""
        prose = player.rendering.prose
        instructions = {"role": "system", "content": prose(system, SYSTEM_TOKENS)}
        return cls(player, name, [instructions, user(prose(name, user_tokens))], client=client)

    @property
    def request(self) -> Request:
        """As the client spells it this time."""
        number, client = len(self.asked), self.client
        messages = client.spell(self.messages, number)
        return Request(
            messages=messages,
            meant=messages if client.changes is Change.CONTENT else list(self.messages),
            read=messages if client.changes in (Change.CONTENT, Change.PREFIX) else list(self.messages),
            news=self._news(messages, number),
            tools=self.client.tools(number),
            max_tokens=OWN_REPLY_TOKENS if self.client.is_scripted else REPLY_TOKENS,
            name=self.name if self.client.is_named else None,
        )

    def _news(self, messages: Sequence[Message], number: int) -> str:
        """The lines that say something else than in the request before."""
        if self.client.changes is not Change.NEWS or number == 0:
            return ""
        return "\n".join(new_lines(messages, before=self.client.spell(self.messages, number - 1)))

    def turn(self) -> None:
        """Go on from the last reply, if there was one, and ask. Raises ServerFailed if nothing is heard."""
        if self.asked:
            self.messages += self._next()
        (reply,) = self.player.ask(self.request)
        missing = [part for part in self.client.hears if not reply.message.get(part)]
        if missing:
            raise ServerFailed(f"its reply has no {' and no '.join(missing)}")
        self.asked.append((len(self.messages), reply.message))

    def back_to(self, turn: int, name: str) -> Chat:
        """A branch that goes on differently after the reply of that turn."""
        asked = self.asked[: turn + 1]
        return Chat(self.player, name, self.messages[: asked[-1][0]], asked, self.client)

    def _next(self) -> list[Message]:
        """Return the assistant's words, the results of its calls, and the user's next question."""
        name, prose = f"{self.name}, turn {len(self.asked)}", self.player.rendering.prose
        reply = self.asked[-1][1] if self._is_own else self._fixed_reply(name)
        calls = reply.get("tool_calls") or []
        results = [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": prose(f"Result {number} of {name}", RESULT_TOKENS // len(calls)),
            }
            for number, call in enumerate(calls)
        ]
        user_tokens = USER_TOKENS if calls else USER_TOKENS + RESULT_TOKENS
        return [reply, *results, user(prose(f"User of {name}", user_tokens))]

    @property
    def _is_own(self) -> bool:
        """The assistant's turns are what the server said, if the client is not about certain calls."""
        return bool(self.client.hears) or (self.player.own and not self.client.is_about_calls)

    def _fixed_reply(self, name: str) -> Message:
        text = self.player.rendering.prose(f"Assistant of {name}", CALL_TOKENS // 2)
        commands = [f"Command of {name}", *(f"Command {n} of {name}" for n in range(1, self.client.calls))]
        calls = [self._call(command) for command in commands]
        return {"role": "assistant", "content": text if self.client.has_text else "", "tool_calls": calls}

    def _call(self, command: str) -> Message:
        arguments = {"command": self.player.rendering.prose(command, CALL_TOKENS // 2 // self.client.calls)}
        call = {"id": f"call{hashlib.sha256(command.encode()).hexdigest()[:20]}", "type": "function"}
        return call | {"function": {"name": "run_command", "arguments": json.dumps(arguments)}}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How long the shapes are.

    Attributes:
        turns: of the append-only chat.
        drifting: turns of a chat whose client changes what it sends again.
        trunk, branch: turns before a chat goes back by half, and of each branch after that.
        resumed, others: turns of the chat that is resumed, and conversations in between.
        long_tokens: of the message whose prefill is cancelled.
    """

    turns: int
    drifting: int
    trunk: int
    branch: int
    resumed: int
    others: int
    long_tokens: int


FULL = Size(turns=20, drifting=6, trunk=6, branch=3, resumed=5, others=20, long_tokens=8000)
QUICK = Size(turns=4, drifting=4, trunk=3, branch=1, resumed=2, others=4, long_tokens=4000)


@dataclass(frozen=True)
class Shape:
    """One way in which an agent uses a server, and the model that it takes."""

    title: str
    play: Callable[[Player, Size], None]
    model: Model = "random"


def _tool_turns(player: Player, size: Size) -> None:
    chat = Chat.begin(player, "Tool turns", "The task")
    for _ in range(size.turns):
        chat.turn()


def _sub_agents(count: int, player: Player, size: Size) -> None:
    system = f"{count} sub-agents"
    chats = [Chat.begin(player, system, f"Task {number} of {count}") for number in range(count)]
    player.ask(*(chat.request for chat in chats))


def _branches(player: Player, size: Size) -> None:
    first = Chat.begin(player, "Branches", "The first branch")
    for _ in range(size.trunk):
        first.turn()
    second = first.back_to(size.trunk // 2, "The second branch")
    for branch in (second, first):
        for _ in range(size.branch):
            branch.turn()


def _retry(player: Player, size: Size) -> None:
    rehearsal = Chat.begin(player, "Rehearsal", "A long one", size.long_tokens)
    seconds = player.rehearse(rehearsal.request)
    chat = Chat.begin(player, "Retry", "Another long one", size.long_tokens)
    player.ask_leave_and_ask_again(chat.request, LEAVE_AT * seconds, LEAVE_AT)


def _resumed(player: Player, size: Size) -> None:
    chat = Chat.begin(player, "Many chats", "The first chat")
    for _ in range(size.resumed):
        chat.turn()
    for number in range(size.others):
        Chat.begin(player, "Many chats", f"Chat {number}", RESULT_TOKENS).turn()
    chat.turn()


def _drifting(client: Client, player: Player, size: Size) -> None:
    title = client.title
    chat = Chat.begin(player, title, f"The task, {title}", client=client)
    for number in range(size.drifting):
        if client.asks_titles:
            player.ask(_title_request(chat, number))
        chat.turn()


def _title_request(chat: Chat, number: int) -> Request:
    """Without tools, and with another system prompt: nothing of it is in the chat."""
    prose = chat.player.rendering.prose
    system = {"role": "system", "content": prose("Titles", TITLE_TOKENS)}
    return Request.of([system, user(prose(f"What title {number} is for", TITLE_TOKENS))], tools=())


# ------------------------------------------------------------------------------------------------ compaction

SUMMARY_TOKENS, ASK_TOKENS, KEPT_TURNS = 300, 200, 2
AFTER_COMPACTION = 3
"""Turns of the new conversation."""


@dataclass(frozen=True)
class Compaction:
    """How a client starts over with a summary (`docs/clients.md`).

    Attributes:
        asks: the requests for the summary, the last of which brings it.
        keeps: the messages behind system text and summary in the new conversation.
        summary_first: the summary stands in front of them.
    """

    title: str
    asks: Callable[[Chat], list[Request]]
    keeps: Callable[[Chat], list[Message]]
    summary_first: bool = True


def _compacted(way: Compaction, player: Player, size: Size) -> None:
    chat = Chat.begin(player, way.title, f"The task, {way.title}")
    for _ in range(size.trunk):
        chat.turn()
    chat.messages += chat._next()[:-1]  # pyright: ignore[reportPrivateUsage] - up to the last results
    for request in way.asks(chat):
        player.ask(request)
    summary = user(player.rendering.prose(f"Summary of {chat.name}", SUMMARY_TOKENS))
    kept = way.keeps(chat)
    messages = [chat.messages[0], *([summary, *kept] if way.summary_first else [*kept, summary])]
    if messages[-1]["role"] == "assistant":
        messages.append(user(player.rendering.prose(f"Go on, {way.title}", USER_TOKENS)))
    new = Chat(player, f"{chat.name}, compacted", messages)
    for _ in range(AFTER_COMPACTION):
        new.turn()


def _ask_in_place(chat: Chat) -> list[Request]:
    """The unchanged conversation, with the instruction as its next question."""
    return [Request.of([*chat.messages, user(chat.player.rendering.prose("Summarise", ASK_TOKENS))])]


def _ask_without_tools(chat: Chat) -> list[Request]:
    (request,) = _ask_in_place(chat)
    return [replace(request, tools=())]


def _ask_as_text(chat: Chat) -> list[Request]:
    """A small system text of its own, and the conversation written out in one message."""
    prose = chat.player.rendering.prose
    system = {"role": "system", "content": prose("Summarise what follows", ASK_TOKENS)}
    written = "\n".join(json.dumps(message) for message in chat.messages[1:])
    return [Request.of([system, user(written)], tools=())]


def _ask_for_notes_first(chat: Chat) -> list[Request]:
    """A turn for notes with another tool, then the conversation as text."""
    (notes,) = _ask_in_place(chat)
    return [replace(notes, tools=notes.tools[:1]), *_ask_as_text(chat)]


def _last_exchange(chat: Chat) -> list[Message]:
    return chat.messages[-2:]


def _questions(chat: Chat) -> list[Message]:
    return [message for message in chat.messages if message["role"] == "user"]


def _last_turns(chat: Chat) -> list[Message]:
    begins = [at for at, message in enumerate(chat.messages) if message["role"] == "user"]
    return chat.messages[begins[-KEPT_TURNS] :]


COMPACTIONS = {
    "compact_claude": Compaction("compaction as Claude Code does it", _ask_in_place, _last_exchange),
    "compact_codex": Compaction(
        "compaction as Codex does it", _ask_without_tools, _questions, summary_first=False
    ),
    "compact_opencode": Compaction("compaction as opencode does it", _ask_as_text, lambda _: []),
    "compact_pi": Compaction("compaction as pi does it", _ask_as_text, _last_turns),
    "compact_openclaw": Compaction("compaction as OpenClaw does it", _ask_for_notes_first, _last_turns),
}


def _shape_of(client: Client) -> Shape:
    model: Model = "random"
    if client.is_scripted:
        model = "thinks" if REASONING in client.hears else "calls"
    return Shape(client.title, partial(_drifting, client), model)


SHAPES = {
    "turns": Shape("append-only tool turns", _tool_turns),
    "agents": Shape(f"{AGENTS} sub-agents at once", partial(_sub_agents, AGENTS)),
    "agents25": Shape(f"{MANY_AGENTS} sub-agents at once", partial(_sub_agents, MANY_AGENTS)),
    "branch": Shape("branch and return", _branches),
    "retry": Shape("retry after a cancelled prefill", _retry),
    "resume": Shape("resumed after other chats", _resumed),
    **{name: _shape_of(client) for name, client in CLIENTS.items()},
    **{name: Shape(way.title, partial(_compacted, way)) for name, way in COMPACTIONS.items()},
}


# ------------------------------------------------------------------------------------------------ the models


_WORDS = [f" w{number}" for number in range(100)]
_CALL = ["<tool_call>", '\n{"name": "run_command", "arguments": ']
_BEHIND = ["}\n", "</tool_call>"]

_SCRIPTS: dict[Model, list[str]] = {
    # Reasoning and a call, as the template itself would write them.
    "thinks": [
        "<think>",
        "\nI have to look at",
        *_WORDS,
        " first.\n",
        "</think>",
        "\n\n",
        *_CALL,
        '{"command": "cat notes"}',
        *_BEHIND,
    ],
    # A call as no JSON library would write it.
    "calls": [*_CALL, '{"timeout":  1000.0,   "command":  "caf\\u00e9 \\/', *_WORDS, '" }', *_BEHIND],
}


def build_model(model: Model, family: str, folder: Path) -> Path:
    """Write a model of `family`, of the same size whatever it says."""
    if model == "random":
        return tiny_models.build(family, folder)
    return tiny_models.build_chain(folder, {"\n": _SCRIPTS[model]}, family=family, hidden=256, layers=4)
