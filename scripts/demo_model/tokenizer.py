"""The tokenizer of the demo model: a word is the same tokens wherever it stands.

The usual ones glue a space or a quote to the word behind it, so that ` ls`, `"ls` and `/ls` are three tokens,
and a model that copies one as another has to know all three. Here letters are cut from everything else,
digits stand alone, and what opens and closes a call is one token each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from scripts.demo_model.conversations import (
    CALL_END,
    CALL_HEAD,
    CALL_KEY,
    IM_END,
    IM_START,
    LONG,
    Author,
    Mix,
)
from scripts.demo_model.corpus import is_held_out, read_corpus

END_OF_TEXT = "<|endoftext|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END, LONG)
MARKUP = ("<think>", "</think>")
WHOLE = (CALL_HEAD, CALL_KEY, CALL_END)
_OF_EACH_TEXT = 3000
_CONVERSATIONS = 4000
_ANY_WHOLE = "|".join(map(re.escape, WHOLE))
_PATTERN = _ANY_WHOLE + r"|\p{L}+|\p{N}|\n| +|[^\p{L}\p{N}\s]|[^\S\n ]+"


def make_tokenizer(size: int) -> Tokenizer:
    """A tokenizer of `size` tokens, the added ones and the bytes among them."""
    author = Author(0, Mix())
    corpus = [text[:_OF_EACH_TEXT] for text in read_corpus(held_out=False).texts]
    return _trained(corpus + [author.write(600).text for _ in range(_CONVERSATIONS)], size)


def _trained(texts: Iterable[str], size: int) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL) - len(MARKUP) - len(WHOLE),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        limit_alphabet=256,
        show_progress=False,
    )
    trained.train_from_iterator(map(_without_held_out, texts), trainer)
    model: dict[str, Any] = json.loads(trained.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    for text in WHOLE:
        vocabulary.setdefault(_as_bytes(text), len(vocabulary))
    merges = [(first, second) for first, second in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def _without_held_out(text: str) -> str:
    """And without what is one token anyway. A token that is a word which the training never has to copy would
    be one that the model cannot copy."""
    text = re.sub(_ANY_WHOLE, "\n", text)
    return re.sub(r"[^\W\d_]+", lambda word: " " if is_held_out(word[0]) else word[0], text)


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _as_bytes(text: str) -> str:
    """The text in the letters that stand for bytes."""
    [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return written


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in SPECIAL + MARKUP
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": 131072,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
