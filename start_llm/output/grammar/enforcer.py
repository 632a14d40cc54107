"""Which tokens may come next, by a grammar: llguidance's work.

Ours would be a parser of grammars over bytes, and for each token a walk over the whole vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from start_llm.core.chat import Json
from start_llm.core.errors import GuideLost, InvalidRequest
from start_llm.formats.writing.lark import Grammar, Origin
from start_llm.output.grammar.depth import MOST_LEVELS, is_too_deep
from start_llm.output.grammar.validity import fault

_MOST_CHARACTERS = 2**20
_LIMITS = LLParserLimits(verbose_errors=False)
_SILENT = 0


class Vocabulary(Protocol):
    """What tokens stand for."""

    @property
    def end_tokens(self) -> frozenset[int]: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def encode(self, text: str, *, as_document: bool) -> list[int]: ...


class TokenGuide:
    """Follows one reply through its grammar. Owned by one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the next tokens. What follows the end of the reply counts for nothing."""
        is_over = self._matcher.is_stopped() and not self._matcher.is_error()
        if not (is_over or self._matcher.consume_tokens(list(tokens))):
            raise GuideLost(_reason(self._matcher))

    def allowed(self) -> bytes:
        """For each token id a byte: 0 if it cannot come next."""
        mask = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise GuideLost(_reason(self._matcher))
        return mask


class Enforcer:
    """Makes guides. Safe to use from any thread.

    Args:
        vocabulary: read when the first guide is made, which takes about a second for a large one.
        size: number of token ids, those that the tokenizer does not know included.
    """

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary = vocabulary
        self._size = size
        self._lock = threading.Lock()

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Texts that are one token each, and that nothing but this token says."""
        return self._vocabulary.control_tokens

    def guide(self, grammar: Grammar) -> TokenGuide:
        """A guide at the start of a reply. Its first mask is computed here, which finds what is too complex.

        Raises:
            InvalidRequest: a schema cannot be enforced; names its field.
        """
        if len(grammar.text) > _MOST_CHARACTERS:
            raise InvalidRequest(
                f"The schemas make a grammar of more than {_MOST_CHARACTERS} characters.",
                param=grammar.schemas[-1][0].field if grammar.schemas else "tools",
            )
        for origin, schema in grammar.schemas:
            _check(origin, json.loads(schema))
        matcher = self._matcher(LLMatcher.grammar_from_lark(grammar.text))
        if matcher.is_error():
            raise self._refusal(grammar, matcher)
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise self._refusal(grammar, matcher)
        return TokenGuide(matcher)

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            tokenizer = self._tokenizer
        return LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)

    def _refusal(self, grammar: Grammar, matcher: LLMatcher) -> InvalidRequest:
        """The schema at fault is the first that fails by itself; else they are too much together."""
        for origin, schema in grammar.schemas:
            alone = self._matcher(LLMatcher.grammar_from_json_schema(schema))
            if alone.is_error():
                problem = f"'{origin.field}': {origin.about} cannot be enforced: {_reason(alone)}"
                return InvalidRequest(problem, param=origin.field)
        field = grammar.schemas[0][0].field if grammar.schemas else None
        return InvalidRequest(
            f"What is asked of the reply cannot be enforced: {_reason(matcher)}", param=field
        )

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Bytes(self._vocabulary, self._size))
        return LLTokenizer(wrapper, eos_token=sorted(self._vocabulary.end_tokens))


class _Bytes:
    """A vocabulary as llguidance reads it."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        ends = vocabulary.end_tokens
        self._encode: Callable[..., list[int]] = vocabulary.encode
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.tokens = [vocabulary.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted({*ends, *vocabulary.control_tokens.values()})

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, as_document=False)


def _check(origin: Origin, schema: Json) -> None:
    """Refuse what the library would fall over."""
    problem = None
    if is_too_deep(schema):
        problem = f"is nested deeper than {MOST_LEVELS} levels, its references followed."
    elif found := fault(schema):
        problem = f"cannot be enforced: {found}"
    if problem:
        raise InvalidRequest(f"'{origin.field}': {origin.about} {problem}", param=origin.field)


def _reason(matcher: LLMatcher) -> str:
    """What the library says, without our grammar and its place in it."""
    said = matcher.get_error() or str(matcher.stop_reason())
    said = said.partition("\n   1 | ")[0].partition("\n<backtrace>")[0].strip()
    return said.rpartition("failed to compile JSON schema: ")[2] or said
