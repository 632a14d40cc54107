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
_REASONING = "<think> </think>"
_CALL = "<tool_call> </tool_call> <tool_response> </tool_response>"

_TABLE = (
    _trait("strips_old_reasoning", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait("opens_reasoning", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait(
        "stop_opens_next",
        special="<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        markup=f"{_REASONING} {_CALL} <arg_key> </arg_key> <arg_value> </arg_value>",
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
        markup=f"<｜User｜> <｜Assistant｜> {_REASONING} <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"
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
    _trait("words_in_system", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait("effort_words", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait("minicpm", special="<s> </s> <|im_start|> <|im_end|>", ends="<|im_end|> </s>", bos="<s>"),
    _trait(
        "minimax",
        special="]~!b[ ]~b] [e~[",
        markup=f"{_REASONING} <minimax:tool_call> </minimax:tool_call>",
        ends="[e~[",
    ),
    _trait(
        "nested_arguments",
        special="]~!b[ ]~b] [e~[ ]<]minimax[>[",
        markup="<mm:think> </mm:think>",
        ends="[e~[",
    ),
    _trait(
        "dsml",
        special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        markup=f"<｜User｜> <｜Assistant｜> {_REASONING} ｜DSML｜",
        ends="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    _trait(
        "seed",
        special="<seed:bos> <seed:eos>",
        markup="<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        ends="<seed:eos>",
    ),
    _trait(
        "python_calls",
        special=f"<|pad|> <|startoftext|> {_CHATML} <|tool_call_start|> <|tool_call_end|>",
        ends=_CHATML_ENDS,
        bos="<|startoftext|>",
    ),
    _trait(
        "bare_python_calls",
        special="<|begin_of_text|> <|end_of_text|> <|header_start|> <|header_end|> <|eot|>"
        " <|python_start|> <|python_end|>",
        ends="<|eot|> <|end_of_text|>",
        bos="<|begin_of_text|>",
    ),
    _trait("python_lines", special=_CHATML, ends=_CHATML_ENDS),
    _trait(
        "call_list",
        special="<s> </s> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12>",
        ends="<SPECIAL_12> </s>",
    ),
    _trait(
        "call_list_without_end",
        special="<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>",
        ends="<|end_of_text|>",
    ),
    _trait(
        "option_without_tools",
        special="<|end_of_text|> <|start_of_role|> <|end_of_role|> <|tool_call|>",
        ends="<|end_of_text|>",
    ),
    _trait(
        "call_lines",
        special="<begin_of_document> <beginning_of_sentence> <end_of_sentence>",
        ends="<end_of_sentence>",
    ),
    _trait("bare_call_list", special=_CHATML, ends=_CHATML_ENDS),
    _trait(
        "role_of_a_call",
        special="<s> </s> <|role_sep|> <|message_sep|>",
        ends="<|message_sep|> </s>",
        bos="<s>",
    ),
    _trait(
        "escaped_texts",
        special="<bos> <eos> <start_of_turn> <end_of_turn>",
        markup="<start_function_declaration> <end_function_declaration> <start_function_call>"
        " <end_function_call> <start_function_response> <end_function_response> <escape>",
        ends="<end_of_turn> <eos>",
        bos="<bos>",
    ),
    _trait(
        "numbered_actions",
        special="<BOS_TOKEN> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|SYSTEM_TOKEN|> <|USER_TOKEN|>"
        " <|CHATBOT_TOKEN|>",
        markup="<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_TOOL_RESULT|>"
        " <|END_TOOL_RESULT|> <|START_RESPONSE|> <|END_RESPONSE|>",
        ends="<|END_OF_TURN_TOKEN|>",
        bos="<BOS_TOKEN>",
    ),
    _trait(
        "open_and_close",
        special="[BOS] [EOS] <|open|> <|close|> <|sep|> <|end_of_msg|>",
        ends="<|end_of_msg|> [EOS]",
    ),
    _trait(
        "strict_channels",
        special="<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|>"
        " <|call|> <|return|>",
        ends="<|return|> <|call|> <|endoftext|>",
    ),
    _trait(
        "text_after_calls",
        special="<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|tool> <tool|>"
        ' <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|>',
        ends="<turn|> <|tool_response> <eos>",
        bos="<bos>",
    ),
    _trait("tool_use_form", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait(
        "system_with_last_word",
        special="<s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS]"
        " [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        ends="</s>",
        bos="<s>",
    ),
    _trait("flat_schemas", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait("reasoning_or_answer", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait("cuts_at_closing_mark", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait(
        "refuses_empty_replies",
        special="<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS]"
        " [/AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        ends="</s>",
        bos="<s>",
    ),
    _trait("text_or_calls", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait("reasoning_without_text", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
    _trait("named_results", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait("strict_schemas", special=_CHATML, markup=_CALL, ends=_CHATML_ENDS),
    _trait("raw_texts", special=f"{_CHATML} <|tool_call_start|> <|tool_call_end|>", ends=_CHATML_ENDS),
    _trait(
        "separated_names",
        special=_CHATML,
        markup="<tool_calls> </tool_calls> <tool_call> </tool_call> <tool_sep>"
        " <arg_key> </arg_key> <arg_value> </arg_value>",
        ends=_CHATML_ENDS,
    ),
    _trait("answer_as_reasoning", special=_CHATML, markup=f"{_REASONING} {_CALL}", ends=_CHATML_ENDS),
)
TRAITS: dict[str, Trait] = {trait.name: trait for trait in _TABLE}

_SEEING = (
    _trait(
        "sees_everywhere",
        special=f"{_CHATML} <|vision_start|> <|vision_end|> <|image_pad|>",
        markup=_CALL,
        ends=_CHATML_ENDS,
    ),
    _trait(
        "sees_in_questions",
        special="<bos> <eos> <start_of_turn> <end_of_turn> <start_of_image> <end_of_image>"
        " <image_soft_token>",
        ends="<end_of_turn> <eos>",
        bos="<bos>",
    ),
    _trait(
        "sees_behind_results",
        special="<bos> <eos> <|turn> <turn|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response>"
        " <tool_response|> <|image> <|image|> <image|>",
        ends="<turn|> <|tool_response> <eos>",
        bos="<bos>",
    ),
    _trait(
        "sees_marks",
        special="<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS]"
        " [/AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS] [TOOL_RESULTS] [/TOOL_RESULTS] [IMG] [IMG_BREAK] [IMG_END]",
        ends="</s>",
        bos="<s>",
    ),
)
SEEING: dict[str, Trait] = {trait.name: trait for trait in _SEEING}
"""Traits of models that see images; what they do with text, others do too."""


def trait_of(name: str) -> Trait:
    """The trait of this name, seeing or blind."""
    return (TRAITS | SEEING)[name]


@cache
def trait_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a trait, read from files as a server reads it; built once."""
    trait = trait_of(name)
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
    trait = trait_of(name)
    settings: dict[str, Any] = {"hidden": 128, "layers": 2, "vocab": trait.vocabulary}
    settings |= {"family": "qwen3", "chat_template": trait.template, "added": trait.added} | options
    if chains is None:
        return build(folder=tmp / name, **settings)
    return build_chain(tmp / name, chains, **settings)
