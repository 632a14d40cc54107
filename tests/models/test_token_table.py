"""The table of token bytes, and what is streamed by it, are what the tokenizer's own `decode` writes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_wrapper
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.mistral.tokenizer import MistralConverter

from scripts import tiny_models
from start_llm.engine.detokenize import Detokenizer
from start_llm.models.tokenizer import Tokenizer
from tests.conftest import lasting_folder
from tests.models.panicking import with_panicking_tokenizer
from tests.models.test_tokenizer import DEMO, SPACE, byte_fallback, saved, word_level
from tests.slices import examples

BLANKS = [SPACE * width for width in range(2, 32)]
"""Gemma lists runs of blanks as tokens that are added and not special."""
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RANKS = [*(bytes([byte]) for byte in range(256)), b"  ", b"    ", b"th", b" th", "é".encode(), b"\xf0\x9f"]
CORPUS = ["the fish swims in the sea", "  def fish(sea):", "    return the  sea", "über 日本語 der Fisch"]


def gemma() -> tokenizers.Tokenizer:
    backend = byte_fallback(trims=False)
    backend.add_tokens([AddedToken(run, normalized=False) for run in BLANKS])
    return backend


def beside_white_space() -> tokenizers.Tokenizer:
    """Added tokens that take the white space beside them, or that are looked for in the normalised text."""
    backend = byte_fallback(trims=False)
    backend.add_tokens(
        [
            AddedToken("<left>", lstrip=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<n>", normalized=True),
            AddedToken(SPACE + "x" + SPACE, normalized=True),
            AddedToken("[word]", single_word=True, normalized=False),
        ]
    )
    return backend


def byte_level(*added: str, **steps: Any) -> tokenizers.Tokenizer:
    entries = {char: number for number, char in enumerate(tiny_models.byte_alphabet())}
    backend = tiny_models.byte_level_tokenizer(
        entries | {"ĠĠ": 256, "ĠĠĠĠ": 257, "ðŁ": 258, "Ċĉ": 259},
        [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("ð", "Ł"), ("Ċ", "ĉ")],
    )
    for name, step in steps.items():
        setattr(backend, name, step)
    tiny_models.add_tokens(backend, ["<tool>", "  ", *added])
    return backend


def word_piece(*, cleanup: bool) -> tokenizers.Tokenizer:
    words = [
        "[UNK]",
        "fish",
        "##es",
        "sea",
        "##s",
        ".",
        ",",
        "'",
        "n",
        "##t",
        "def",
        "(",
        ")",
        "the",
        "a",
        "##b",
    ]
    model = models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=cleanup)
    backend.add_special_tokens(["[UNK]"])
    return backend


def unigram(scheme: str) -> tokenizers.Tokenizer:
    letters = [*map(chr, range(0x21, 0x7F)), SPACE, "é", "日"]
    words = [SPACE + "the", SPACE * 2, SPACE + "fish", "es"]
    pieces = [("<unk>", 0.0), *((byte, -20.0) for byte in tiny_bytes()), *((sign, -9.0) for sign in letters)]
    backend = tokenizers.Tokenizer(
        models.Unigram([*pieces, *((word, -3.0) for word in words)], unk_id=0, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    return backend


def tiny_bytes() -> Iterable[str]:
    return (f"<0x{byte:02X}>" for byte in range(256))


def tiktoken() -> tokenizers.Tokenizer:
    path = lasting_folder() / "ranks.tiktoken"
    path.write_text("".join(f"{base64.b64encode(raw).decode()} {rank}\n" for rank, raw in enumerate(RANKS)))
    return TikTokenConverter(str(path), pattern=PATTERN, extra_special_tokens=["<|end|>"]).converted()


def tekken() -> tokenizers.Tokenizer:
    path = lasting_folder() / "tekken.json"
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(RANKS)
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(("<unk>", "<s>"))
    ]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(RANKS), "default_vocab_size": len(RANKS) + 2}
    config |= {"default_num_special_tokens": 2, "version": "v3"}
    path.write_text(json.dumps({"config": config, "vocab": vocabulary, "special_tokens": special}))
    return MistralConverter(str(path)).converted()


BACKENDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gemma": gemma,
    "llama": lambda: byte_fallback(trims=True),
    "beside white space": beside_white_space,
    "byte level": byte_level,
    "byte level NFC": lambda: byte_level(normalizer=normalizers.NFC()),
    "byte level NFD": lambda: byte_level(normalizer=normalizers.NFD()),
    "deepseek's marks": lambda: byte_level("<｜tool▁call｜>", "<think>"),
    "word piece": lambda: word_piece(cleanup=True),
    "word piece without clean-up": lambda: word_piece(cleanup=False),
    "words": word_level,
    "unigram always": lambda: unigram("always"),
    "unigram never": lambda: unigram("never"),
    "tiktoken": tiktoken,
    "tekken": tekken,
}


def sentence_piece(kind: str, *, prefix: bool) -> Tokenizer:
    """As SentencePiece itself trains it and transformers converts it."""
    folder = lasting_folder()
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(CORPUS * 20),
            model_writer=file,
            vocab_size=340,
            model_type="bpe",
            byte_fallback=True,
            add_dummy_prefix=prefix,
            remove_extra_whitespaces=False,
            normalization_rule_name="identity",
            user_defined_symbols=BLANKS[:6],
            minloglevel=2,
        )
    config = {"tokenizer_class": kind, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(load_wrapper(folder, eos_token_ids=[2]))


def of_litellm() -> Tokenizer:
    """A real vocabulary of 65,000 tokens, which the package ships."""
    package = find_spec("litellm")  # importing it takes seconds
    assert package and package.origin
    shipped = Path(package.origin).parent / "litellm_core_utils" / "tokenizers" / "anthropic_tokenizer.json"
    return saved(tokenizers.Tokenizer.from_str(shipped.read_text(encoding="utf-8")), lasting_folder())


WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "sentencepiece llama": lambda: sentence_piece("LlamaTokenizer", prefix=True),
    "sentencepiece gemma": lambda: sentence_piece("GemmaTokenizer", prefix=False),
    "litellm": of_litellm,
    "demo": lambda: Tokenizer(load_wrapper(DEMO)),
}
NAMES = (*BACKENDS, *WHOLE)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return WHOLE[name]() if name in WHOLE else saved(BACKENDS[name](), lasting_folder())


def backend_of(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    return tokenizer._wrapper.backend_tokenizer  # pyright: ignore[reportPrivateUsage]


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return backend_of(tokenizer).decode(ids, skip_special_tokens=False)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer.token_bytes, trims_leading_space=tokenizer.trims_leading_space)
    return "".join(map(detokenizer.feed, ids)) + detokenizer.close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_every_token_spells_what_decode_writes_for_it_behind_two_others(name: str):
    tokenizer = tokenizer_of(name)
    backend, control = backend_of(tokenizer), set(tokenizer.control_tokens.values())
    ids = sorted({*backend.get_vocab(with_added_tokens=True).values()} - control)
    before = tokenizer.encode("fish sea", as_document=False)
    start = decoded(tokenizer, before)
    texts = backend.decode_batch([[*before, token] for token in ids], skip_special_tokens=False)
    differing = {
        token: (text, tokenizer.token_bytes(token))
        for token, text in zip(ids, texts, strict=True)
        if text != start + tokenizer.token_bytes(token).decode(errors="replace")
    }
    assert not differing
    assert tokenizer.decoding_warning == ""


CHARACTERS = st.characters(exclude_categories=["Cs"])
JOINED = st.sampled_from(
    ["e\u0301", "👩\u200d👧", "\ufe0f", "\u1112\u1161", "fish", "\t\t", "\r\n", ".,'(){}"]
)
HARD = st.lists(st.one_of(CHARACTERS, JOINED, st.integers(1, 40).map(" ".__mul__))).map("".join)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
@settings(examples(200, few=40), deadline=None)
@given(text=HARD)
def test_a_text_that_is_streamed_token_by_token_is_what_decode_writes(name: str, text: str):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text, as_document=False)
    assert streamed(tokenizer, ids) == decoded(tokenizer, ids)


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_no_text_has_in_this_order_are_streamed_as_decode_writes_them(name: str):
    tokenizer = tokenizer_of(name)
    control = set(tokenizer.control_tokens.values())
    vocabulary = backend_of(tokenizer).get_vocab(with_added_tokens=True).values()
    whole = [
        token
        for token in sorted({*vocabulary} - control)
        if "\ufffd" not in tokenizer.token_bytes(token).decode(errors="replace")
    ]
    first = tokenizer.encode("a fish", as_document=False)
    for number in range(200):
        ids = [*first, *Random(number).choices(whole, k=12)]
        assert streamed(tokenizer, ids) == decoded(tokenizer, ids)


@pytest.mark.parametrize("name", ["gemma", "llama", "byte level", "tekken", "sentencepiece gemma", "litellm"])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 15, 16, 31, 40])
def test_indented_code_is_streamed_as_it_was_written(name: str, width: int):
    tokenizer = tokenizer_of(name)
    code = f"def f(x):\n{' ' * width}if x:\n{' ' * width}{' ' * width}return x\n\t\treturn\n"
    assert streamed(tokenizer, tokenizer.encode(code, as_document=False)) == code


def test_a_run_of_blanks_that_gemma_added_spells_blanks():
    tokenizer = tokenizer_of("gemma")
    vocabulary = backend_of(tokenizer).get_vocab(with_added_tokens=True)
    for run in BLANKS:
        assert tokenizer.token_bytes(vocabulary[run]) == b" " * len(run)


def test_a_part_of_a_character_has_its_bytes():
    for name in ("byte level", "tekken", "tiktoken"):
        tokenizer = tokenizer_of(name)
        ids = tokenizer.encode("🐟", as_document=False)
        assert len(ids) > 1
        assert b"".join(map(tokenizer.token_bytes, ids)) == "🐟".encode()


def test_a_mark_that_the_decoder_would_change_spells_its_own_text():
    backend = byte_fallback(trims=False)
    backend.add_special_tokens([AddedToken(f"<tool{SPACE}call>", special=True, normalized=False)])
    tokenizer = saved(backend, lasting_folder())
    token = tokenizer.control_tokens[f"<tool{SPACE}call>"]
    assert tokenizer.token_bytes(token) == f"<tool{SPACE}call>".encode()


def test_a_space_in_front_of_a_text_is_trimmed_where_decode_trims_it():
    trimming = {name for name in NAMES if tokenizer_of(name).trims_leading_space}
    assert trimming == {
        "llama",
        "word piece",
        "word piece without clean-up",
        "words",
        "unigram always",
        "sentencepiece llama",
    }


# ------------------------------------------------------------------------------------------ what differs


def ends_of_words() -> tokenizers.Tokenizer:
    """Each word is followed by a space, but the last one: no table of tokens can say that."""
    words = {"fish</w>": 0, "sea</w>": 1, "s": 2, "a": 3}
    backend = tokenizers.Tokenizer(models.BPE(words, [], unk_token="a", end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    return backend


def test_a_decoder_that_changes_tokens_beside_others_is_warned_of():
    tokenizer = saved(ends_of_words(), lasting_folder())
    assert "it changes tokens beside others" in tokenizer.decoding_warning


def test_a_piece_that_does_not_say_its_bytes_is_warned_of_and_shown_as_decode_shows_it():
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.Replace("ð", "\ufffd-"), decoders.Fuse()])
    tokenizer = saved(backend, lasting_folder())
    token = backend.get_vocab()["ð"]
    assert "The spelling of 2 tokens, such as 'ð'" in tokenizer.decoding_warning
    assert tokenizer.token_bytes(token) == "\ufffd-".encode()


def test_a_text_on_which_the_library_panics_keeps_no_tokenizer_from_being_read(tiny_model, tmp_path):
    folder = with_panicking_tokenizer(tiny_model("qwen3", hidden=64, layers=1), tmp_path / "fragile")
    tokenizer = Tokenizer(load_wrapper(folder))
    assert tokenizer.decoding_warning == ""
    ids = tokenizer.encode("a fish", as_document=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"a fish"
