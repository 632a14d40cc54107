"""Preparers around the trait templates, and a tokenizer of one token a character for templates of a test."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from unittest.mock import patch

import regex
from jinja2 import Environment, TemplateError

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.core.family import Family
from start_llm.core.prompt import Prompt
from start_llm.formats import registry
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template import PromptTokenizer, TemplateMessage
from start_llm.prompt.template_audit.samples import rendered_samples
from tests.images.fakes import vision_of
from tests.templates.traits import trait_tokenizer

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


def function(name: str, **properties: Json) -> dict[str, Json]:
    """The schema of a tool."""
    required: list[Json] = list[Json](properties)[:1]
    parameters: Json = {"type": "object", "properties": properties, "required": required}
    about: Json = {"name": name, "description": f"What {name} does.", "parameters": parameters}
    return {"type": "function", "function": about}


def system(content: str) -> Message:
    return Message(role="system", content=content)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def reply(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def call(call_id: str = "c1", name: str = "write", **arguments: Json) -> ToolCall:
    return ToolCall(call_id, name, arguments)


def result(content: str, call_id: str | None = "c1", **more: Any) -> Message:
    return Message(role="tool", content=content, tool_call_id=call_id, **more)


@cache
def family_of(trait: str) -> Family:
    tokenizer = trait_tokenizer(trait)
    samples = rendered_samples(tokenizer)
    return registry.detect({}, tokenizer.chat_template, tokenizer.added_tokens, samples)


@cache
def preparer_of(trait: str) -> Preparer:
    """The preparer of a trait, whose clock stands still."""
    return Preparer(trait_tokenizer(trait), family_of(trait), vision=vision_of(trait), now=lambda: NOON)


def fresh_preparer(trait: str, **options: Any) -> Preparer:
    """A preparer that remembers nothing. What the template does is found out once, which takes longest."""
    facts = preparer_of(trait).facts
    options = {"vision": vision_of(trait)} | options
    with patch("start_llm.prompt.prepare.audit", lambda *_: facts):
        return Preparer(trait_tokenizer(trait), family_of(trait), now=lambda: NOON, **options)


def prepared(trait: str, *messages: Message, **request: Any) -> Prompt:
    return preparer_of(trait).prepare(ChatRequest(messages=messages, **request))


def text_of(trait: str, ids: Sequence[int]) -> str:
    return b"".join(map(trait_tokenizer(trait).token_bytes, ids)).decode()


def shown(trait: str, *messages: Message, **request: Any) -> str:
    """The prompt for a conversation, as text."""
    return text_of(trait, prepared(trait, *messages, **request).tokens.ids)


class FakeTokenizer:
    """A template of a test, rendered as transformers does it; each character is a token, and each added text.

    Args:
        marks_the_start: the first character of a text is another token than it is elsewhere, as if a space
            had been put before it: such a text cannot be cut.
    """

    has_chat_template = True

    def __init__(
        self,
        template: str,
        added: Sequence[str] = (),
        ends: Sequence[str] = (),
        *,
        marks_the_start: bool = False,
    ) -> None:
        environment = Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(template, globals={"raise_exception": _refuse})
        self.chat_template = template
        self.control_tokens: Mapping[str, int] = {}
        self.added_tokens = tuple(added)
        self.end_texts = frozenset(ends)
        self._splitter = regex.compile(r"(\L<added>)|(?s:.)", added=list(added))
        self._marks_the_start = marks_the_start

    def render(
        self,
        messages: list[TemplateMessage],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            strftime_now=strftime_now,
            **options,
        )

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        ids = [
            0x200000 + self.added_tokens.index(match[1]) if match[1] else ord(match[0])
            for match in self._splitter.finditer(text)
        ]
        return [ids[0] + 0x400000, *ids[1:]] if self._marks_the_start and ids else ids

    def encode_continuation(self, text: str) -> list[int]:
        return [code & 0x3FFFFF for code in self.encode(text, as_document=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(code) if code < 0x200000 else self.added_tokens[code - 0x200000] for code in ids)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class WatchedTokenizer:
    """Keeps what goes through the tokenizer that it wraps."""

    def __init__(self, inner: PromptTokenizer) -> None:
        self._inner = inner
        self.chat_template, self.control_tokens = inner.chat_template, inner.control_tokens
        self.has_chat_template = inner.has_chat_template
        self.added_tokens = inner.added_tokens
        self.end_texts = inner.end_texts
        self.rendered: list[str] = []
        self.encoded: list[str] = []

    def render(self, *args: Any, **options: Any) -> str:
        self.rendered.append(self._inner.render(*args, **options))
        return self.rendered[-1]

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        self.encoded.append(text)
        return self._inner.encode(text, as_document=as_document)

    def encode_continuation(self, text: str) -> list[int]:
        self.encoded.append(text)
        return self._inner.encode_continuation(text)
