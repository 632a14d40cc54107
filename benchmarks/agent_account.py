"""The account of a benchmark with conversations: what their requests had to cost, and what they did.

What is unavoidable is counted here, from the texts that the benchmark adds and the model folder's own
template and tokenizer. Nothing that a server says enters into it.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

type Message = dict[str, Any]
type Tool = dict[str, Any]

SLACK_TOKENS = 64
"""Tokens that a turn may compute beyond its new text."""
REPLY_TOKENS = 8
_WORDS = """
    the file returns a list of names and each value is set when the module imports path class method object
    string index error raise test data line read write open close call default option argument type key
    result state check update remove add start end first last next from with without before after if not
""".split()


def _tool(name: str, description: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    _tool("read_file", "Read a file of the project", "path"),
    _tool("edit_file", "Replace a text in a file", "path", "old", "new"),
    _tool("run_command", "Run a command in the shell", "command"),
]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A client's request.

    Attributes:
        messages: as it spells them this time.
        meant: the same messages without what it changes each time: they tell what is new.
        read: the messages in the spelling that counts for reuse: what a model has read of them in another one
            has to be read again.
        news: what the client changed and the model has to be told.
        max_tokens: of the reply.
        name: of the conversation, if its client gives it one.
    """

    messages: Sequence[Message]
    meant: Sequence[Message]
    read: Sequence[Message]
    news: str = ""
    tools: Sequence[Tool] = tuple(TOOLS)
    max_tokens: int = REPLY_TOKENS
    name: str | None = None

    @classmethod
    def of(cls, messages: Sequence[Message], tools: Sequence[Tool] = tuple(TOOLS)) -> Request:
        """Messages that are sent as they are meant."""
        return cls(messages=messages, meant=messages, read=messages, tools=tools)


class Rendering:
    """The fresh rendering of a conversation, by the template and the tokenizer of a model folder.

    Reasoning is left out: a template shows or hides the same reasoning depending on what follows, and the
    difference of two renderings would then count more than the new messages.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def tokens(self, request: Request) -> list[int]:
        """The whole prompt, with the generation tail."""
        return self.encode(self._text(request.messages, request.tools, tail=True))

    def length_before_next(self, request: Request, count: int) -> int:
        """Tokens up to the end of the first messages, where another one follows them.

        Templates may refuse a lone system message, and show the last assistant message in a form of its own:
        there an empty user message follows, and is taken off again.
        """
        messages = request.messages[:count]
        if messages[-1]["role"] in ("user", "tool"):
            return len(self.encode(self._text(messages, request.tools)))
        return len(self.encode(self._text([*messages, user("")], request.tools))) - self._markup[0]

    def ends(self, token: int) -> bool:
        """It ends a reply."""
        return token == self._tokenizer.eos_token_id

    @property
    def closer_length(self) -> int:
        """Tokens of what ends an assistant message."""
        return self._markup[1]

    @cached_property
    def _markup(self) -> tuple[int, int]:
        """Tokens of an empty user message, and of what closes an assistant message."""
        word = "marker"
        chat = [user(word), {"role": "assistant", "content": word}, user(word)]
        closer = self._text(chat[:2]).rpartition(word)[2]
        between, after = self._text(chat).split(word)[-2:]
        return len(self.encode(between.removeprefix(closer) + after)), len(self.encode(closer))

    def prose(self, name: str, length: int) -> str:
        """About `length` tokens of text that ends with its name: the same for the same name, no other's."""
        source, text = random.Random(name), ""
        ending = f"({name})"
        left = length - len(self.encode(ending))
        while left > 0:
            more = " ".join(source.choices(_WORDS, k=8)) + " "
            left -= len(self.encode(more))
            text += more
        return text + ending

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, tail: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=tail,
            tokenize=False,
        )


def _for_template(message: Message) -> Message:
    """Arguments as an object and content as a text, as templates want them; no reasoning."""
    shown = {key: value for key, value in message.items() if key not in ("reasoning_content", "reasoning")}
    shown["content"] = _plain(message.get("content"))
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in calls]
    return shown


def _plain(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except json.JSONDecodeError:  # a model's own call, cut off by max_tokens
        return function


@dataclass(frozen=True, order=True, kw_only=True)
class Charge:
    """Tokens that a request has to cost.

    Attributes:
        unavoidable: what the model has not read, has to be told, or has read behind tokens that do not count.
        new: what the client has added to the conversation.
    """

    unavoidable: int
    new: int


class Ledger:
    """What one server has been asked for, and what each request has to cost it."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._meant = _Beginnings(rendering)
        self._read = _Beginnings(rendering)

    def charge(self, request: Request) -> Charge:
        """Note the request, and return what it has to cost."""
        told = len(self._rendering.encode(request.news))
        prompt = len(self._rendering.tokens(request))
        unread = self._read.left_of(request, request.read)
        return Charge(unavoidable=min(prompt, unread + told), new=self._meant.left_of(request, request.meant))

    def heard(self, request: Request, reply: Message) -> None:
        """The server's own reply is computed too, but for what closes it."""
        self._meant.heard([*request.meant, reply], request.tools)
        self._read.heard([*request.read, reply], request.tools)


class _Beginnings:
    """Beginnings of conversations that a server has computed, in one spelling of their messages."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._known: set[bytes] = set()
        self._heard: set[bytes] = set()

    def left_of(self, request: Request, messages: Sequence[Message]) -> int:
        """Tokens of the request after the longest known beginning, and one. It is known from now on."""
        keys = list(_chain(messages, request.tools))
        shared = max((count for count, key in enumerate(keys, 1) if key in self._known), default=0)
        total = len(self._rendering.tokens(request))
        done = self._rendering.length_before_next(request, shared) if shared else 0
        if shared and keys[shared - 1] in self._heard:
            done -= self._rendering.closer_length
        self._known.update(keys)
        return min(total, total - done + 1)

    def heard(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """The last message is a reply that the server has computed."""
        *_, key = _chain(messages, tools)
        if key not in self._known:
            self._known.add(key)
            self._heard.add(key)


def _chain(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[bytes]:
    """A key for each prefix of messages. The order of tools says nothing."""
    digest = hashlib.sha256("".join(sorted(json.dumps(tool) for tool in tools)).encode())
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode() + b"\0")
        yield digest.digest()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request. `first_s` is None where the client left before."""

    prompt: int
    new: int
    unavoidable: int
    computed: int
    first_s: float | None
    is_estimate: bool = False

    @property
    def excess(self) -> int:
        """Tokens that were computed and not unavoidable."""
        return self.computed - self.unavoidable


@dataclass(kw_only=True)
class Account:
    """The cost of a shape so far."""

    prefilled: int | None = None
    wall_s: float = 0
    samples: list[Sample] = field(default_factory=list[Sample])

    def row(self) -> list[str]:
        prompt, new, unavoidable, computed = (
            sum(getattr(sample, name) for sample in self.samples)
            for name in ("prompt", "new", "unavoidable", "computed")
        )
        about = "≈ " if any(sample.is_estimate for sample in self.samples) else ""
        again = max(computed - unavoidable, 0)
        counts = [
            f"{len(self.samples)}",
            f"{prompt:,}",
            f"{new:,}",
            f"{unavoidable:,}",
            f"{about}{computed:,}",
            f"{again:,}",
            self._worst(about),
        ]
        engine = "–" if self.prefilled is None else f"{self.prefilled:,}"
        first = [sample.first_s for sample in self.samples if sample.first_s is not None]
        times = [f"{seconds:.2f} s" for seconds in (statistics.mean(first), max(first), self.wall_s)]
        shares = [f"{about}{share / computed:.2f}" for share in (unavoidable, new)]
        return [*counts, engine, *shares, *times]

    def _worst(self, about: str) -> str:
        """The largest excess of a turn, with a sign if it is more than a turn may have."""
        worst = max(0, *(sample.excess for sample in self.samples))
        return f"{about}{worst:,}{' (!)' if worst > SLACK_TOKENS else ''}"
