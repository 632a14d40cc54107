"""Turn the GGUF file of a Gemma 3 text model into a model folder in the layout of Hugging Face and mlx_lm.

The weights are dequantised to float32. The file has no tokenizer of that layout, but SentencePiece's pieces
with their scores, of which the same tokenizer can be made. It has no chat template either: `CHAT_TEMPLATE`
follows the rules of Gemma 3.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import generate_merges

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- set system = '' -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
    {%- set system = system + '\\n\\n' -%}
    {%- set turns = messages[1:] -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if turn.role != ('user' if loop.index is odd else 'assistant') -%}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
    {%- endif -%}
    {{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else 'user') + '\\n' -}}
    {{- system if loop.first -}}
    {%- if turn.content is string -%}
        {{- turn.content | trim -}}
    {%- else -%}
        {%- for part in turn.content -%}
            {{- part.text | trim if part.type == 'text' -}}
        {%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""llama.cpp's names of tensors, to those of mlx_lm."""
LAYERS_A_GLOBAL_ONE = 6
"""One layer of so many reads the whole prompt, the others a sliding window. The file does not say it."""
END_OF_TURN = "<end_of_turn>"
UNKNOWN = "<unk>"

type Fields = dict[str, Any]


class Piece(IntEnum):
    """The types of SentencePiece's pieces that this file has."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    BYTE = 6


def write_model(gguf_file: Path, folder: Path) -> None:
    """Write the model into an existing folder, in float32.

    Raises:
        ModuleNotFoundError: the package `gguf`, which the project does not require, cannot be imported.
    """
    file = importlib.import_module("gguf").GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in file.fields.items()}
    pieces = _pieces(fields)
    ids = {piece: token for token, piece in enumerate(pieces)}
    ends = [fields["tokenizer.ggml.eos_token_id"], ids[END_OF_TURN]]
    mx.save_safetensors(str(folder / "model.safetensors"), dict(_weights(file)), {"format": "mlx"})
    _write_json(folder / "config.json", _config(fields, ends))
    _write_json(
        folder / "generation_config.json", {"do_sample": True, "top_k": 64, "top_p": 0.95} | _ends(ends)
    )
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    _tokenizer(fields, pieces, ids).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def _ends(ends: list[int]) -> Fields:
    return {"bos_token_id": 2, "eos_token_id": ends, "pad_token_id": 0}


def _write_json(path: Path, content: Fields) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(fields: Fields, ends: list[int]) -> Fields:
    about = {name.removeprefix("gemma3."): value for name, value in fields.items()}
    layers = about["block_count"]
    kinds = [
        "sliding_attention" if number % LAYERS_A_GLOBAL_ONE else "full_attention"
        for number in range(1, layers + 1)
    ]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "torch_dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": about["context_length"],
        "hidden_size": about["embedding_length"],
        "intermediate_size": about["feed_forward_length"],
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": about["attention.head_count"],
        "num_key_value_heads": about["attention.head_count_kv"],
        "head_dim": about["attention.key_length"],
        "query_pre_attn_scalar": about["attention.key_length"],
        "attention_bias": False,
        "sliding_window": about["attention.sliding_window"],
        "sliding_window_pattern": LAYERS_A_GLOBAL_ONE,
        "rope_theta": about["rope.freq_base"],
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    } | _ends(ends)


# ------------------------------------------------------------------------------------------------ the weights


def _weights(file: Any) -> Iterator[tuple[str, mx.array]]:
    dequantize = importlib.import_module("gguf.quants").dequantize
    for tensor in file.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32")
        if tensor.name.endswith("norm.weight"):
            values -= 1  # llama.cpp has added the 1 that Gemma's layers add themselves
        yield tensor_name(tensor.name), mx.array(values)


def tensor_name(name: str) -> str:
    """Return mlx_lm's name of a tensor."""
    *place, kind, _ = name.split(".")
    return f"model.layers.{place[1]}.{LAYER_TENSORS[kind]}.weight" if place else f"{TENSORS[kind]}.weight"


# ---------------------------------------------------------------------------------------------- the tokenizer


def _pieces(fields: Fields) -> list[str]:
    """The vocabulary as SentencePiece spells it. llama.cpp writes blanks into what users defined."""
    typed = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], strict=True)
    return [piece.replace(" ", "▁") if kind == Piece.USER_DEFINED else piece for piece, kind in typed]


def _tokenizer(fields: Fields, pieces: list[str], ids: dict[str, int]) -> Tokenizer:
    """A BPE. Its merges are all ways to make a piece of two others, the piece of the best score first."""
    kinds = dict(zip(pieces, fields["tokenizer.ggml.token_type"], strict=True))
    scores = dict(zip(pieces, fields["tokenizer.ggml.scores"], strict=True))
    scores |= {piece: 0.0 for piece, kind in kinds.items() if kind == Piece.USER_DEFINED}  # they come first
    unmergeable = [piece for piece, kind in kinds.items() if kind in (Piece.CONTROL, Piece.BYTE)]
    merges = generate_merges(ids, scores, unmergeable)
    bpe = models.BPE(vocab=ids, merges=merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", ids["<bos>"])]
    )
    tokenizer.add_tokens(
        [
            AddedToken(piece, normalized=False, special=kind == Piece.CONTROL)
            for piece, kind in kinds.items()
            if kind in (Piece.CONTROL, Piece.USER_DEFINED)
        ]
    )
    return tokenizer


def _tokenizer_config(fields: Fields) -> Fields:
    return {
        "tokenizer_class": "GemmaTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": UNKNOWN,
        "pad_token": "<pad>",
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["gemma3.context_length"],
    }
