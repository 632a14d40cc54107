"""Computes the tokens that a grammar allows next, using llguidance.

Without the library we would need a grammar parser over bytes and a walk over the whole vocabulary per token.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cached_property
from typing import Protocol

import regex
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from start_llm.core.chat import TextGrammar
from start_llm.core.client_presence import check_client, held_in_turn
from start_llm.core.errors import ConstraintViolated, InvalidRequest, Overloaded
from start_llm.formats.writing.client_grammar import levels, refused, standalone
from start_llm.formats.writing.lark import Grammar
from start_llm.output.grammar.schema_check import schema_error

_MAX_DEFINITION = 2**16
"""Characters of a client's grammar for a text. Codex' has a thousand."""
MAX_LEVELS = 250
"""Of a client's grammar for a text. With a 2 MiB stack 600 passed, and threads usually have 8 MiB."""
_LARGE = 2**15
"""Characters of a grammar that may take seconds. These are compiled one at a time; others do not wait."""
_LARGE_GRAMMAR = threading.Lock()
_STACK = 2**29
"""Bytes of stack to compile on; only what is used of them takes memory.

llguidance follows references by recursion, some 4 KB for each part of a schema, and gives up at 50,000 parts:
with 192 MiB none of many schemas got to the end of the stack. Two thousand parts pass 8 MiB (lesson 43).
"""
_STACK_SIZE = threading.Lock()
_LIMITS = LLParserLimits(verbose_errors=False)
_SILENT = 0
_CONTROL_TOKEN = b"\xff"
"""What llguidance puts before a token that has no text; text in UTF-8 has no such byte."""
_IN_OUR_WORDS = {
    "coerce_one_of": "oneOf is not supported where more than one of its schemas may fit; use anyOf.",
    "NoExtensionBias": "its references lead in a circle, or it allows no value.",
}
"""Errors of llguidance that name something of its own, by a word in them."""


class Vocabulary(Protocol):
    """The tokenizer data that the enforcer needs."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def encode(self, text: str, *, as_document: bool) -> list[int]: ...


class TokenGuide:
    """Tracks one reply through its grammar: a `core.engine_request.Guide`."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._before = matcher
        self._since: list[int] = []  # tokens that came after `_before`

    def advance(self, tokens: Sequence[int]) -> None:
        """Consume the next tokens. Tokens after the end of the reply are ignored."""
        self._since += tokens
        is_over = self._matcher.is_stopped() and not self._matcher.is_error()
        if not (is_over or self._matcher.consume_tokens(list(tokens))):
            raise ConstraintViolated(_reason(self._matcher))

    def allowed(self) -> bytes:
        mask = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise ConstraintViolated(_reason(self._matcher))
        return mask

    def forced(self) -> Sequence[int]:
        """Return tokens of a text that is certain; the model may divide it into others.

        It ends before a control token. A copy is asked: the question moves a matcher, whose masks may then
        fail (lesson 342).
        """
        text, _, _ = bytes(self._matcher.deep_copy().compute_ff_bytes()).partition(_CONTROL_TOKEN)
        return self._tokenizer.tokenize_bytes(text)

    def count_allowed(self, tokens: Sequence[int]) -> int:
        self._before, self._since = self._matcher.deep_copy(), []
        return self._before.validate_tokens(list(tokens))

    def go_back(self, kept: int) -> None:
        """Go on with another matcher: one that met an error can do nothing any more."""
        self._matcher, accepted = self._before.deep_copy(), self._since[:kept]
        self._since = []
        self.advance(accepted)


class Enforcer:
    """Creates guides. Thread-safe.

    Args:
        vocabulary: read when the first guide is created, which takes about a second for a large vocabulary.
        size: number of token ids, including ids that the tokenizer does not know.
    """

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        self._vocabulary = vocabulary
        self._size = size
        self._lock = threading.Lock()

    def guide(self, grammar: Grammar) -> TokenGuide:
        """Return a guide at the start of a reply.

        Computes the first mask here, because that reveals grammars that are too complex.

        Raises:
            InvalidRequest: a schema cannot be enforced; names its field.
            Overloaded: the system has no room for the stack on which it is compiled.
            ClientGone: the client has left.
        """
        with held_in_turn(_LARGE_GRAMMAR) if len(grammar.text) > _LARGE else nullcontext():
            return TokenGuide(self._compiled(grammar), self._tokenizer)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        for origin, schema in grammar.schemas:
            check_client()
            if error := schema_error(json.loads(schema)):
                problem = f"'{origin.field}': {origin.about} cannot be enforced: {error}"
                raise InvalidRequest(problem, param=origin.field)
        check_client()
        matcher = self._matcher(LLMatcher.grammar_from_lark(grammar.text))
        if matcher.is_error():
            raise self._refusal(grammar, matcher)
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise self._refusal(grammar, matcher)
        return matcher

    def _matcher(self, grammar: str) -> LLMatcher:
        with self._lock:
            tokenizer = self._tokenizer
        return _on_a_large_stack(lambda: LLMatcher(tokenizer, grammar, log_level=_SILENT, limits=_LIMITS))

    def _refusal(self, grammar: Grammar, matcher: LLMatcher) -> InvalidRequest:
        """Return the error of the first schema that fails by itself, else of the whole grammar."""
        for origin, schema in grammar.schemas:
            alone = self._matcher(LLMatcher.grammar_from_json_schema(schema))
            if alone.is_error():
                problem = f"'{origin.field}': {origin.about} cannot be enforced: {_reason(alone)}"
                return InvalidRequest(problem, param=origin.field)
        if grammar.texts:
            return refused(grammar.texts[0], _reason(matcher))
        field = grammar.schemas[0][0].field if grammar.schemas else None
        return InvalidRequest(
            f"What is asked of the reply cannot be enforced: {_reason(matcher)}", param=field
        )

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        wrapper = TokenizerWrapper(_Bytes(self._vocabulary, self._size))
        return LLTokenizer(wrapper, eos_token=sorted(self._vocabulary.eos_token_ids))


class _Bytes:
    """The vocabulary in the shape that llguidance expects."""

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        ends = vocabulary.eos_token_ids
        self._encode: Callable[..., list[int]] = vocabulary.encode
        self.eos_token_id = min(ends)
        self.bos_token_id = None
        self.tokens = [vocabulary.token_bytes(token) for token in range(size)]
        self.special_token_ids = sorted({*ends, *vocabulary.control_tokens.values()})

    def __call__(self, text: str) -> list[int]:
        return self._encode(text, as_document=False)


def check_text_grammar(grammar: TextGrammar) -> None:
    """Check a client's grammar by itself: what is wrong in it must not be read as a part of ours.

    Raises:
        InvalidRequest: it is not one; names the tool.
    """
    if len(grammar.definition) > _MAX_DEFINITION:
        raise refused(grammar, f"it has more than {_MAX_DEFINITION} characters.")
    alone = LLMatcher.grammar_from_lark(standalone(grammar))
    if levels(grammar) > MAX_LEVELS:
        raise refused(grammar, f"its rules refer to each other over more than {MAX_LEVELS} levels.")
    problem = LLMatcher.validate_grammar(alone)
    if problem:
        raise refused(grammar, _without_source(problem))


def _on_a_large_stack[T](work: Callable[[], T]) -> T:
    """Call a function on a thread of its own, with `_STACK` bytes of stack.

    Raises:
        Overloaded: the system has no room for the stack.
    """
    with ThreadPoolExecutor(1) as pool:
        # The size holds for all threads that start meanwhile, wherever: that harms none of them.
        with _STACK_SIZE:
            usual = threading.stack_size(_STACK)
            try:
                result = pool.submit(work)
            except RuntimeError as error:
                room = f"{_STACK // 2**20} MiB of address space"
                raise Overloaded(f"The system has no {room} for a thread that compiles schemas.") from error
            finally:
                threading.stack_size(usual)
        return result.result()


def _reason(matcher: LLMatcher) -> str:
    """Return the library's error message without our grammar and the position in it."""
    message = _without_source(matcher.get_error() or str(matcher.stop_reason()))
    message = message.rpartition("failed to compile JSON schema: ")[2] or message
    return next((ours for own, ours in _IN_OUR_WORDS.items() if own in message), message)


def _without_source(message: str) -> str:
    """Return the library's error message without the lines of the grammar below it."""
    return regex.split(r"\n +\d+ \| |\n<backtrace>", message)[0].strip()
