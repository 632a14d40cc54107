"""Replies that a guide allows, chosen at random: what a model could write at worst."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from start_llm.core.chat import ChatRequest, Message, OutputConstraint
from start_llm.core.engine_request import Guide
from start_llm.core.events import CallArguments, CallStarted, Content, Output, Reasoning
from start_llm.core.family import Family
from start_llm.core.prompt import ModelTokens, Prompt
from start_llm.models.tokenizer import Tokenizer
from start_llm.output.structured_output import StructuredOutput
from tests.prompt.fakes import family_of
from tests.templates.traits import TRAITS, trait_tokenizer

UNKNOWN_IDS = 3
"""Ids of the network that the tokenizer does not know."""
_SPELT = ("</parameter>", "]]></param>", "</param>", "</｜DSML｜parameter>", "</｜DSML｜ parameter>",
          "<|close|>argument<|sep|>")  # fmt: skip
"""Ends that are no token."""
_ENDS = (b'"', b"</", b"]", b"}", b">", b'<|"|>', b"<|END")


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply as a client receives it. `calls` are names with the JSON of their arguments."""

    text: str
    ended: bool
    content: str
    reasoning: str
    calls: Sequence[tuple[str, str]] = field(default_factory=tuple)


def reply(
    trait: str,
    form: OutputConstraint,
    tools: Iterable[Any] = (),
    *,
    seed: int,
    reasoning_is_open: bool = False,
    thinking: bool = False,
    max_tokens: int = 400,
    family: Family | None = None,
) -> Reply:
    """One that a model of this trait could give to a request of this form.

    Args:
        family: another one than the trait's.
    """
    tokenizer = trait_tokenizer(trait)
    family = family or family_of(trait)
    keeper = StructuredOutput(tokenizer, family, TRAITS[trait].vocabulary + UNKNOWN_IDS)
    request = ChatRequest(messages=(Message(role="user", content="?"),), tools=tuple(tools), form=form)
    prompt = Prompt(tokens=ModelTokens((0,)), reasoning_is_open=reasoning_is_open, thinking=thinking)
    guide = keeper.guide(request, prompt)
    assert guide is not None
    tokens, ended = _wander(guide, tokenizer, random.Random(seed), max_tokens)
    text = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
    splitter = keeper.splitter(request, prompt)
    return _reply_of(text, ended, [*splitter.feed(text), *splitter.close(ended)])


def _wander(guide: Guide, tokenizer: Tokenizer, chance: random.Random, most: int) -> tuple[list[int], bool]:
    """Any way through the grammar; where it is wide open, mostly towards what may end that."""
    closing = np.array([_closes(tokenizer, token) for token in range(len(guide.allowed()))])
    tokens: list[int] = []
    spelling: list[int] = []
    while len(tokens) < most:
        allowed = np.frombuffer(guide.allowed(), dtype=np.uint8) > 0
        assert allowed.any(), "nothing may follow"
        is_open = allowed.sum() > len(allowed) // 3
        narrow = allowed & closing
        if is_open and not spelling and chance.random() < 0.1:
            spelling = tokenizer.encode(chance.choice(_SPELT), as_document=False)
        (choices,) = np.nonzero(narrow if is_open and narrow.any() and chance.random() < 0.7 else allowed)
        token = spelling.pop(0) if spelling else int(chance.choice(choices))
        if not allowed[token]:
            spelling = []
            continue
        guide.advance([token])
        if token in tokenizer.eos_token_ids:
            return tokens, True
        tokens.append(token)
    return tokens, False


def _closes(tokenizer: Tokenizer, token: int) -> bool:
    written = tokenizer.token_bytes(token)
    return token in tokenizer.control_tokens.values() or written.startswith(_ENDS)


def _reply_of(text: str, ended: bool, outputs: Sequence[Output]) -> Reply:
    names = [output.name for output in outputs if isinstance(output, CallStarted)]
    arguments = [""] * len(names)
    for output in outputs:
        if isinstance(output, CallArguments):
            arguments[output.index] += output.text
    return Reply(
        text,
        ended,
        content="".join(output.text for output in outputs if isinstance(output, Content)),
        reasoning="".join(output.text for output in outputs if isinstance(output, Reasoning)),
        calls=list(zip(names, arguments, strict=True)),
    )
