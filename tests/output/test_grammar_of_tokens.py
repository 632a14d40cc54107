"""A grammar reads the bytes that tokens stand for, so it takes JSON however it is indented."""

from __future__ import annotations

import json
import random

import pytest

from start_llm.core.errors import ConstraintViolated
from start_llm.formats.writing.lark import Grammar
from start_llm.output.grammar.enforcer import Enforcer, TokenGuide
from tests.models.test_token_table import tokenizer_of

VALUE = {"path": "src/a.py", "lines": [1, 2, {"é": "日本語 🐟"}], "deep": {"deeper": {"text": "a  b\tc"}}}
OBJECT = Grammar('start: %json {"type": "object"}', ())
NAMES = ("gemma", "byte level", "tekken", "tiktoken", "sentencepiece gemma", "unigram never", "litellm")


def guide_of(name: str, grammar: Grammar = OBJECT) -> TokenGuide:
    tokenizer = tokenizer_of(name)
    vocabulary = tokenizer._wrapper.get_vocab()  # pyright: ignore[reportPrivateUsage]
    return Enforcer(tokenizer, max(vocabulary.values()) + 1).guide(grammar)


@pytest.mark.sample(20)
@pytest.mark.parametrize("indent", [None, 1, 2, 3, 4, 8, "\t"])
@pytest.mark.parametrize("name", NAMES)
def test_indented_json_is_allowed_token_by_token(name: str, indent: int | str | None):
    guide = guide_of(name)
    text = json.dumps(VALUE, indent=indent, ensure_ascii=False)
    for token in tokenizer_of(name).encode(text, as_document=False):
        assert guide.allowed()[token], token
        guide.advance([token])


def test_what_is_no_json_is_refused():
    tokenizer, guide = tokenizer_of("gemma"), guide_of("gemma")
    with pytest.raises(ConstraintViolated):
        guide.advance(tokenizer.encode('{\n    "a" 1', as_document=False))


class Letters:
    """A vocabulary of bytes, with a word that is longer, an end and three control tokens."""

    WORD, END, MARKS = 256, 257, (258, 259, 260)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset({self.END})

    @property
    def control_tokens(self) -> dict[str, int]:
        return {"<end>": self.END, **{f"<{mark}>": mark for mark in self.MARKS}}

    def token_bytes(self, token: int) -> bytes:
        names = {control: name.encode() for name, control in self.control_tokens.items()}
        return bytes([token]) if token < self.WORD else {self.WORD: b".a", **names}[token]

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        del as_document
        return list(text.encode())


def call_guide() -> TokenGuide:
    """A call with control tokens in its midst, as Harmony writes it."""
    first, second, third = Letters.MARKS
    grammar = Grammar(
        '%llguidance {"no_forcing": true}\nstart: head arguments\n'
        f'head: <[{first}]> "commentary to=functions.at " <[{second}]> "json" <[{third}]> '
        f'| " to=functions.at" <[{first}]> "commentary json" <[{third}]>\n'
        'arguments: %json {"type": "object", "properties": {"path": {"type": "string"}}}',
        (),
    )
    return Enforcer(Letters(), 261).guide(grammar)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(24))
def test_asking_for_the_forced_text_changes_nothing(seed: int):
    """Nor does a draft, however much of it is accepted: masks are as if nothing else had been asked."""
    chance, history = random.Random(seed), list[int]()
    plain, asked = call_guide(), call_guide()
    for _ in range(60):
        mask = plain.allowed()
        assert asked.allowed() == mask, history
        allowed = [token for token, may in enumerate(mask) if may]
        drafted = list(asked.forced()) or chance.choices(allowed, k=3)
        if Letters.WORD in allowed and chance.random() < 0.5:
            drafted = [Letters.WORD]
        count = asked.count_allowed(drafted)
        for token in drafted[:count]:
            assert asked.allowed()[token]
            asked.advance([token])
        accepted = drafted[: chance.randint(0, count)]
        asked.go_back(len(accepted))
        if not accepted:
            accepted = [chance.choice(allowed)]
            asked.advance(accepted)
        plain.advance(accepted)
        history += accepted


def test_what_is_forced_ends_before_a_control_token():
    guide = call_guide()
    guide.advance([ord(" ")])
    assert bytes(guide.forced()) == b"to=functions.at"
