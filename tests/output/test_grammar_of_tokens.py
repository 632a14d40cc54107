"""A grammar reads the bytes that tokens stand for, so it takes JSON however it is indented."""

from __future__ import annotations

import json

import pytest

from start_llm.core.errors import ConstraintViolated
from start_llm.formats.writing.lark import Grammar
from start_llm.output.grammar.enforcer import Enforcer, TokenGuide
from tests.models.test_token_table import tokenizer_of

VALUE = {"path": "src/a.py", "lines": [1, 2, {"é": "日本語 🐟"}], "deep": {"deeper": {"text": "a  b\tc"}}}
OBJECT = Grammar('start: %json {"type": "object"}', ())
NAMES = ("gemma", "byte level", "tekken", "tiktoken", "sentencepiece gemma", "unigram never", "litellm")


def guide_of(name: str) -> TokenGuide:
    tokenizer = tokenizer_of(name)
    vocabulary = tokenizer._wrapper.get_vocab()  # pyright: ignore[reportPrivateUsage]
    return Enforcer(tokenizer, max(vocabulary.values()) + 1).guide(OBJECT)


@pytest.mark.sample(6)
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
