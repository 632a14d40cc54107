"""The table of token bytes says of a real vocabulary of 262,144 tokens what `decode` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_wrapper

from start_llm.engine.detokenize import Detokenizer
from start_llm.models.tokenizer import Tokenizer

pytestmark = pytest.mark.real

TEXTS = (
    "def f(x):\n" + "".join(f"{' ' * width}x = {width}\n" for width in range(1, 41)),
    "\tif x:\n\t\treturn  [1,  2]\n\n\n\nend",
    "👩\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 cafe\u0301 \u1112\u1161\u11ab 日本語 \U00010348 \U0001d573",
)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(load_wrapper(folder))


def test_every_token_spells_what_decode_writes_behind_others(tokenizer: Tokenizer):
    backend = tokenizer._wrapper.backend_tokenizer  # pyright: ignore[reportPrivateUsage]
    before = tokenizer.encode("The fish", as_document=False)
    start = backend.decode(before)
    ids = range(backend.get_vocab_size())
    texts = backend.decode_batch([[*before, token] for token in ids], skip_special_tokens=False)
    spelled = [start + tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
    assert [pair for pair in zip(texts, spelled, strict=True) if pair[0] != pair[1]] == []
    assert tokenizer.decoding_warning == ""


@pytest.mark.parametrize("text", TEXTS, ids=["blanks", "tabs", "joined"])
def test_a_text_is_streamed_as_it_was_written(text: str, tokenizer: Tokenizer):
    detokenizer = Detokenizer(tokenizer.token_bytes, trims_leading_space=tokenizer.trims_leading_space)
    pieces = [detokenizer.feed(token) for token in tokenizer.encode(text, as_document=False)]
    assert "".join(pieces) + detokenizer.close() == text
