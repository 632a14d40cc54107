"""The account of a benchmark with conversations: what their requests had to cost, and what they did.

What is unavoidable is counted here, from the texts that the benchmark adds and the model folder's own
template and tokenizer. Nothing that a server says enters into it. A template that cannot show an agent's
conversation (Gemma 3's has no tools, and its roles must alternate) gets it as `prompt/adapt` changes it, so
the counts are those of the prompt that start_llm makes. Other servers may refuse such a conversation.
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from start_llm.core import chat
from start_llm.core.chat import ChatRequest, ToolCall
from start_llm.formats.registry import detect
from start_llm.models.loader import read
from start_llm.prompt import template
from start_llm.prompt.adapt import adapt
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.samples import rendered_samples
from start_llm.prompt.template_audit.tool_forms import ToolForms

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
        news: what the client changed and the model has to read anew.
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
        data = read(folder)
        self._tokenizer = data.tokenizer
        samples = rendered_samples(data.tokenizer)
        self._family = detect(data.config, data.tokenizer.chat_template, data.tokenizer.added_tokens, samples)
        self._facts = audit(data.tokenizer, self._family)
        self._tools = ToolForms(data.tokenizer, self._facts)

    def tokens(self, request: Request) -> list[int]:
        """The whole prompt, with the generation tail."""
        return self.encode(self._text(request.messages, request.tools, tail=True))

    def length_before_next(self, request: Request, count: int) -> int:
        """Tokens up to the end of the first messages, where another one follows them.

        Templates may refuse a lone system message, and show the last assistant message in a form of its own:
        there an empty user message follows, and is taken off again. Where neighbours of one role are merged,
        the prompt of the whole request goes on before the turn is closed.
        """
        messages = request.messages[:count]
        if messages[-1]["role"] not in ("user", "tool"):
            return len(self.encode(self._text([*messages, user("")], request.tools))) - self._markup[0]
        alone = self.encode(self._text(messages, request.tools))
        if count == len(request.messages) or self._facts.takes_neighbours:
            return len(alone)
        return _common_length(alone, self.tokens(request))

    @property
    def closer_length(self) -> int:
        """Tokens of what ends an assistant message."""
        return self._markup[1]

    @cached_property
    def _markup(self) -> tuple[int, int]:
        """Tokens of an empty user message, and of what closes an assistant message."""
        word = "marker"
        conversation = [user(word), {"role": "assistant", "content": word}, user(word)]
        closer = self._text(conversation[:2]).rpartition(word)[2]
        between, after = self._text(conversation).split(word)[-2:]
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

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        return self._tokenizer.encode(text, as_document=False)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, tail: bool = False) -> str:
        native = in_native_form([_read(message) for message in messages], self._family.call_ids)
        adapted = adapt(ChatRequest(messages=native, tools=self._tools.shown(tools)), self._facts)
        rendering = template.Rendering(
            self._tokenizer,
            adapted.tools,
            {},
            datetime.now().astimezone().strftime,
            self._facts.stand_ins,
            lists_no_tools=self._facts.lists_no_tools,
        )
        return rendering.text(adapted.messages, add_generation_prompt=tail)


def _common_length(ids: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(ids, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other)))


def _read(message: Message) -> chat.Message:
    """A message as a server reads it, without reasoning."""
    calls = message.get("tool_calls") or ()
    return chat.Message(
        role=message["role"],
        content=_plain(message.get("content")),
        tool_calls=tuple(
            ToolCall(call["id"], call["function"]["name"], _arguments(call["function"])) for call in calls
        ),
        tool_call_id=message.get("tool_call_id"),
    )


def _plain(content: str | list[dict[str, Any]] | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(function["arguments"])
    except json.JSONDecodeError:  # a model's own call, cut off by max_tokens
        return {"raw": function["arguments"]}


@dataclass(frozen=True, order=True, kw_only=True)
class Charge:
    """Tokens that a request has to cost.

    Attributes:
        unavoidable: what the model has not read, has to read as a change, or has read behind tokens that do
            not count.
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
        news = len(self._rendering.encode(request.news))
        prompt = len(self._rendering.tokens(request))
        unread = self._read.left_of(request, request.read)
        return Charge(unavoidable=min(prompt, unread + news), new=self._meant.left_of(request, request.meant))

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
