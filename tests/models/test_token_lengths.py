"""A text never has fewer tokens than its length proves."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_wrapper
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from scripts import tiny_models
from start_llm.models.token_lengths import _SHRINKING, _SPACES
from start_llm.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import byte_fallback, saved, word_level
from tests.slices import examples

BYTES = {character: index for index, character in enumerate(tiny_models.byte_alphabet())}
WORDS = {"\u0120\u0120": 256, "\u0120\u0120\u0120\u0120": 257}
HARD = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from([*"aeK \u2581\u212a\u0301\u0345", *_SPACES])
    )
)


def byte_level(*added: AddedToken, **steps: Any) -> tokenizers.Tokenizer:
    backend = tiny_models.byte_level_tokenizer(
        BYTES | WORDS, [("\u0120", "\u0120"), ("\u0120\u0120", "\u0120\u0120")]
    )
    for name, step in steps.items():
        setattr(backend, name, step)
    backend.add_tokens([AddedToken("<tool>", normalized=False), *added])
    return backend


def sentence_piece(normalizer: Any = None, pre_tokenizer: Any = None) -> tokenizers.Tokenizer:
    backend = byte_fallback(trims=False)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    return backend


def normal(form: str) -> tokenizers.Tokenizer:
    return byte_level(normalizer=getattr(normalizers, form)())


KNOWN = {
    "byte level": byte_level,
    "NFC": lambda: normal("NFC"),
    "NFKC": lambda: normal("NFKC"),
    "NFD": lambda: normal("NFD"),
    "NFKD": lambda: normal("NFKD"),
    "absorbs": lambda: byte_level(AddedToken("<end>", rstrip=True, lstrip=True)),
    "llama": lambda: byte_fallback(trims=True),
    "gemma": lambda: byte_fallback(trims=False),
    "metaspace": lambda: sentence_piece(pre_tokenizer=pre_tokenizers.Metaspace()),
}
UNKNOWN = {
    "words": word_level,
    "lower case": lambda: normal("Lowercase"),
    "strips": lambda: normal("Strip"),
    "removes": lambda: byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split("-", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "no spaces": lambda: sentence_piece(normalizers.Replace(" ", "")),
    "unknown characters": lambda: tokenizers.Tokenizer(
        models.BPE({"a": 0, "[UNK]": 1}, [], unk_token="[UNK]", fuse_unk=True)
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    tries = (KNOWN | UNKNOWN).items()
    return {name: saved(make(), tmp_path_factory.mktemp("tokenizer")) for name, make in tries}


@examples(300, few=40)
@given(text=HARD, times=st.integers(1, 40), name=st.sampled_from([*KNOWN]))
def test_no_text_has_fewer_tokens_than_its_length_proves(made, text, times, name):
    for sample in (text * times, "<end>" + text * times + "<end>", " " * times + text):
        assert made[name].fewest_tokens(sample) <= len(made[name].encode(sample, as_document=False)), name


@pytest.mark.parametrize("name", KNOWN)
def test_a_long_text_is_known_to_be_long(made, name):
    letters = "abcd\u00e9" * 10_000
    assert made[name].fewest_tokens(letters) >= len(letters) / 12 / 24
    assert made[name].fewest_tokens("x" * 60_000) >= 60_000 / 10
    assert made[name].fewest_tokens("") == 0


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_bound_is_given_where_something_may_be_dropped(made, name):
    assert made[name].fewest_tokens("x" * 10**6) == 0


def test_space_beside_a_token_that_absorbs_it_counts_nothing(made):
    text = "<end>" + "".join(_SPACES) * 1000
    assert len(made["absorbs"].encode(text, as_document=False)) == 1
    assert made["absorbs"].fewest_tokens(text) == 1


@pytest.mark.parametrize("folder", ["demo"])
def test_real_models_are_known(folder: str):
    tokenizer = Tokenizer(load_wrapper(Path(__file__).resolve().parents[2] / "models" / folder))
    assert tokenizer.fewest_tokens("word " * 10**6) > 10**5


@pytest.mark.thorough
@pytest.mark.parametrize("form", _SHRINKING)
def test_a_normal_form_shortens_no_text_by_more(form):
    """A text is `undone` times as long as its decomposition at most, and that `most` times its form."""
    decomposed = "NFKD" if "K" in form else "NFD"
    undone = most = 0.0
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        before = len(chr(code).encode())
        after = len(unicodedata.normalize(decomposed, chr(code)).encode())
        undone = max(undone, before / after)
        if unicodedata.is_normalized(form, chr(code)):
            most = max(most, after / before)
    assert undone * most <= _SHRINKING[form]
