"""Tokenizers and model folders around our own chat templates, one for each trait of real model families.

A template is `<trait>.jinja` beside this file; its first line says which families have the trait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts.tiny_models import (
    AddedTokens,
    Phrase,
    build,
    build_chain,
    end_ids,
    tiny_tokenizer,
    write_tokenizer,
)
from start_llm.models import mlx_lm_utils
from start_llm.models.tokenizer import Tokenizer

LEARNED_TOKENS = 2036
"""Entries besides the added tokens: the same for every trait, so that they are learned once."""


@dataclass(frozen=True, slots=True)
class Trait:
    """A way in which the templates of some families differ from those of others."""

    name: str
    added: AddedTokens

    @property
    def added_tokens(self) -> tuple[str, ...]:
        return self.added.texts

    @property
    def eos(self) -> tuple[str, ...]:
        """The tokens that end a reply; the first one ends an answer."""
        return self.added.ends

    @property
    def vocabulary(self) -> int:
        return LEARNED_TOKENS + len(self.added.texts)

    @property
    def template(self) -> str:
        return Path(__file__).with_name(f"{self.name}.jinja").read_text(encoding="utf-8")


def _trait(name: str, *, special: str, ends: str, markup: str = "", bos: str | None = None) -> Trait:
    """A row of the table, its tokens between spaces."""
    added = AddedTokens(
        special=tuple(special.split()), markup=tuple(markup.split()), ends=tuple(ends.split()), bos=bos
    )
    return Trait(name, added)


_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_CHATML_ENDS = "<|im_end|> <|endoftext|>"
_THOUGHT = "<think> </think>"
_CALL = "<tool_call> </tool_call> <tool_response> </tool_response>"

_TABLE = (
    _trait("strips_old_thoughts", special=_CHATML, markup=f"{_THOUGHT} {_CALL}", ends=_CHATML_ENDS),
    _trait("opens_thought", special=_CHATML, markup=f"{_THOUGHT} {_CALL}", ends=_CHATML_ENDS),
    _trait(
        "stop_opens_next",
        special="<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        markup=f"{_THOUGHT} {_CALL} <arg_key> </arg_key> <arg_value> </arg_value>",
        ends="<|user|> <|observation|> <|endoftext|>",
    ),
    _trait(
        "tools_before_last_user",
        special="<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
        " [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        ends="</s>",
        bos="<s>",
    ),
    _trait(
        "dates",
        special="<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|>"
        " <|eom_id|> <|eot_id|> <|python_tag|>",
        ends="<|eot_id|> <|eom_id|> <|end_of_text|>",
        bos="<|begin_of_text|>",
    ),
    _trait(
        "no_system",
        special="<bos> <eos> <start_of_turn> <end_of_turn>",
        ends="<end_of_turn> <eos>",
        bos="<bos>",
    ),
    _trait(
        "channels",
        special="<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|>"
        " <|call|> <|return|>",
        ends="<|return|> <|call|> <|endoftext|>",
    ),
    _trait(
        "kimi",
        special="[EOS] <|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> <|im_end|>",
        markup="<|tool_calls_section_begin|> <|tool_calls_section_end|>"
        " <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>",
        ends="<|im_end|> [EOS]",
    ),
    _trait(
        "arguments_as_text",
        special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        markup=f"<｜User｜> <｜Assistant｜> {_THOUGHT} <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"
        " <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
        " <｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        ends="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    _trait(
        "gemma4_channel",
        special="<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|>"
        ' <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>',
        ends="<turn|> <|tool_response> <eos>",
        bos="<bos>",
    ),
    _trait("hoists_systems", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait("plain", special="<s> </s>", ends="</s>", bos="<s>"),
    _trait("minicpm", special="<s> </s> <|im_start|> <|im_end|>", ends="<|im_end|> </s>", bos="<s>"),
)
TRAITS: Mapping[str, Trait] = {trait.name: trait for trait in _TABLE}


@cache
def trait_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a trait, read from files as a server reads it; built once."""
    trait = TRAITS[name]
    backend = tiny_tokenizer(trait.vocabulary, added=trait.added)
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), backend, trait.template, trait.added)
        return Tokenizer(
            mlx_lm_utils.load_tokenizer(Path(folder), eos_token_ids=end_ids(backend, trait.added))
        )


def trait_folder(
    name: str, tmp: Path, chains: Mapping[str, Sequence[Phrase]] | None = None, **options: Any
) -> Path:
    """Writes a tiny model with the tokenizer of a trait into a new folder in `tmp` and returns that.

    Without `chains` it writes random text, with them what they say. `options` are those of
    `tiny_models.build` and `tiny_models.build_chain`.
    """
    trait = TRAITS[name]
    settings: dict[str, Any] = {"hidden": 128, "layers": 2, "vocab": trait.vocabulary}
    settings |= {"chat_template": trait.template, "added": trait.added} | options
    if chains is None:
        return build("qwen3", tmp / name, **settings)
    return build_chain(tmp / name, chains, **settings)
