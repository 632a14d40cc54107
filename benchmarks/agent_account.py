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

_WORDS = """
    the file returns a list of names and each value is set when the module imports path class method object
    string index error raise test data line read write open close call default option argument type key
    result state check update remove add start end first last next from with without before after if not
""".split()


def _tool(name: str, description: str, *parameters: str) -> dict[str, Any]:
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


class Rendering:
    """The fresh rendering of a conversation, by the template and the tokenizer of a model folder.

    Thoughts are left out: a template shows or hides the same thought depending on what follows, and the
    difference of two renderings would then count more than the new messages.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """The whole prompt, with the generation tail."""
        return self._encode(self._text(messages, tail=True))

    def length_before_next(self, messages: Sequence[Message]) -> int:
        """Tokens up to the end of the last message, where another one follows it.

        Templates may refuse a lone system message, and show the last assistant message in a form of its own:
        there an empty user message follows, and is taken off again.
        """
        if messages[-1]["role"] in ("user", "tool"):
            return len(self._encode(self._text(messages)))
        return len(self._encode(self._text([*messages, user("")]))) - self._markup[0]

    @property
    def closer_length(self) -> int:
        """Tokens of what ends an assistant message."""
        return self._markup[1]

    @cached_property
    def _markup(self) -> tuple[int, int]:
        """Tokens of an empty user message, and of what closes an assistant message."""
        word = "marker"
        chat = [user(word), {"role": "assistant", "content": word}, user(word)]
        closer = self._text(chat[:2], with_tools=False).rpartition(word)[2]
        between, after = self._text(chat, with_tools=False).split(word)[-2:]
        return len(self._encode(between.removeprefix(closer) + after)), len(self._encode(closer))

    def prose(self, name: str, length: int) -> str:
        """About `length` tokens of text that ends with its name: the same for the same name, no other's."""
        source, text = random.Random(name), ""
        ending = f"({name})"
        left = length - len(self._encode(ending))
        while left > 0:
            more = " ".join(source.choices(_WORDS, k=8)) + " "
            left -= len(self._encode(more))
            text += more
        return text + ending

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _text(self, messages: Sequence[Message], *, tail: bool = False, with_tools: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=TOOLS if with_tools else None,
            add_generation_prompt=tail,
            tokenize=False,
        )


def _for_template(message: Message) -> Message:
    """Arguments as an object, as templates want them; no thoughts."""
    shown = {key: value for key, value in message.items() if key != "reasoning_content"}
    if calls := shown.get("tool_calls"):
        shown["tool_calls"] = [{**call, "function": _parsed(call["function"])} for call in calls]
    return shown


def _parsed(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return {**function, "arguments": json.loads(function["arguments"])}
    except json.JSONDecodeError:  # a model's own call, cut off by max_tokens
        return function


class Ledger:
    """Which beginnings of conversations one server has been asked for, and what is new after them."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        self._known: set[bytes] = set()
        self._heard: set[bytes] = set()

    def charge(self, messages: Sequence[Message]) -> int:
        """Unavoidable tokens of this request: what follows the longest known prefix, and one token."""
        keys = list(_chain(messages))
        shared = max((count for count, key in enumerate(keys, 1) if key in self._known), default=0)
        total = len(self._rendering.tokens(messages))
        done = self._rendering.length_before_next(messages[:shared]) if shared else 0
        if shared and keys[shared - 1] in self._heard:
            done -= self._rendering.closer_length
        self._known.update(keys)
        return min(total, total - done + 1)

    def heard(self, messages: Sequence[Message]) -> None:
        """The last of these messages is the server's own reply: computed too, but for what closes it."""
        *_, key = _chain(messages)
        if key not in self._known:
            self._known.add(key)
            self._heard.add(key)


def _chain(messages: Sequence[Message]) -> Iterator[bytes]:
    """A key for each prefix of messages."""
    digest = hashlib.sha256()
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode() + b"\0")
        yield digest.digest()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request. `first_s` is None where the client left before."""

    prompt: int
    unavoidable: int
    computed: int
    first_s: float | None
    is_estimate: bool = False


@dataclass(kw_only=True)
class Account:
    """What a shape has cost so far."""

    prefilled: int | None = None
    wall_s: float = 0
    samples: list[Sample] = field(default_factory=list[Sample])

    def row(self) -> list[str]:
        prompt, unavoidable, computed = (
            sum(getattr(sample, name) for sample in self.samples)
            for name in ("prompt", "unavoidable", "computed")
        )
        about = "≈ " if any(sample.is_estimate for sample in self.samples) else ""
        again = max(computed - unavoidable, 0)
        counts = [
            f"{len(self.samples)}",
            f"{prompt:,}",
            f"{unavoidable:,}",
            f"{about}{computed:,}",
            f"{again:,}",
        ]
        engine = "–" if self.prefilled is None else f"{self.prefilled:,}"
        first = [sample.first_s for sample in self.samples if sample.first_s is not None]
        times = [f"{seconds:.2f} s" for seconds in (statistics.mean(first), max(first), self.wall_s)]
        return [*counts, engine, f"{about}{unavoidable / computed:.2f}", *times]
