"""Tiny random networks of every model type that mlx_lm can build, whose answers depend on their caches.

A configuration is derived from the fields of the type's own `ModelArgs`: each field that `SIZES` knows by
name gets the value there, all others keep the class's default. `ROWS` has what a type needs beside that. A
type whose required fields are in neither table is an error that names them, so a new type asks for a row.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import pkgutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx_lm.models
from mlx.utils import tree_flatten, tree_map_with_path

VOCABULARY = 1536
HIDDEN = 64
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 48
"""Tokens of a sliding window or an attention chunk: less than any conversation of the benchmark has."""
POSITIONS = 4096

ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
ROPE = {"type": "default", "rope_type": "default", "rope_theta": 10000.0}
HYBRID_ROPE = ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": POSITIONS // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LONG_ROPE = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LLAMA4_SCALED = ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
LINEAR_ATTENTION = {
    "kda_layers": [1, 2, 3],
    "full_attn_layers": [4],
    "num_heads": HEADS,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
LONGCAT = {"zero_expert_num": 2, "mla_scale_q_lora": True, "mla_scale_kv_lora": True}
FALCON_FACTORS = ("attention_out_multiplier", "key_multiplier", "lm_head_multiplier", "ssm_out_multiplier")

SIZES: Mapping[str, Any] = {
    # How wide and how deep.
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_transformer_layers",), LAYERS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size", "ff_intermediate_size"), 2 * HIDDEN),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "mlp_hidden_size"), 2 * HIDDEN),
    **dict.fromkeys(("vocab_size", "num_vocab", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), POSITIONS),
    "model_max_length": POSITIONS,
    # Attention.
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_attention_groups"), KV_HEADS),
    **dict.fromkeys(("swa_num_attention_heads",), HEADS),
    **dict.fromkeys(("swa_num_key_value_heads",), KV_HEADS),
    **dict.fromkeys(("head_dim", "kv_channels", "hidden_size_per_head", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("v_head_dim", "swa_v_head_dim", "qk_nope_head_dim"), HEAD_DIM),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), HEAD_DIM // 2),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), WINDOW
    ),
    "attention_chunk_size": WINDOW,
    "sliding_window_pattern": 2,
    "layer_types": ALTERNATING,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "index_topk": 32,
    "query_pre_attn_scalar": HEAD_DIM,
    **dict.fromkeys(("rope_theta", "swa_rope_theta", "rope_local_base_freq", "rotary_emb_base"), 10000.0),
    "rope_parameters": ROPE,
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.5),
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    "num_shared_expert": 1,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), HIDDEN // 2),
    **dict.fromkeys(("expert_ffn_hidden_size", "share_expert_dim"), HIDDEN // 2),
    "mlp_only_layers": [],
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "n_group", "topk_group"), 1),
    **dict.fromkeys(("num_expert_group", "expert_layer_period"), 1),
    "expert_layer_offset": 0,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # Recurrent layers.
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_kernel", "conv_L_cache", "conv1d_width"), 4),
    **dict.fromkeys(("mamba_d_conv", "conv_window", "short_conv_kernel_size"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "group_norm_size"), 1),
    **dict.fromkeys(("full_attention_interval", "layer_group_size", "mamba_expand", "attn_layer_period"), 2),
    "attn_layer_offset": 1,
    "time_step_rank": 8,
    "time_step_limit": (0.001, 100.0),
    # Norms, factors and switches.
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "tie_word_embeddings"), False),
    **dict.fromkeys(("mamba_proj_bias", "norm_head"), False),
    **dict.fromkeys(("mamba_conv_bias", "use_conv_bias", "conv_bias", "use_qk_norm", "qk_norm"), True),
    **dict.fromkeys(("embedding_multiplier", "attention_multiplier", "residual_multiplier"), 1.0),
    **dict.fromkeys(("logits_scaling", "logit_scale", "scale_emb", "output_multiplier"), 1.0),
    "scale_depth": 2.0,
    "dim_model_base": HIDDEN,
    "rope_scaling": None,
}
"""Field of a ModelArgs to its value in a tiny model."""

ROWS: Mapping[str, Mapping[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "apertus": {"post_norm": False},
    "baichuan_m1": {"sliding_window_layers": [1, 3], "conv_window": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": HIDDEN, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"rope_scaling": YARN, "topk_method": "greedy"},
    "deepseek_v41": {
        "compress_ratios": [0, 4, 4, 4],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 1,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 2,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "scoring_func": "sqrtsoftplus",
        "index_topk": 8,
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True, True, True]},
    "falcon_h1": {"mamba_d_ssm": HIDDEN, "mamba_chunk_size": 16} | dict.fromkeys(FALCON_FACTORS, 1.0),
    "gemma3n": {
        "layer_types": ALTERNATING,
        "num_kv_shared_layers": 2,
        "final_logit_softcapping": 30.0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "global_head_dim": 2 * HEAD_DIM,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "num_experts": None,
        "rope_parameters": {name: ROPE | {"partial_rotary_factor": 0.5} for name in ALTERNATING},
    },
    "gpt_bigcode": {"num_key_value_heads": None},
    "gpt2": {"num_key_value_heads": HEADS},
    "gpt_neox": {"num_key_value_heads": HEADS},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 2.0},
    },
    "jamba": {"num_experts": 2, "num_experts_per_tok": 1},
    "kimi_k3": {
        "linear_attn_config": LINEAR_ATTENTION,
        "activation_situ_beta": 4.0,
        "attn_res_block_size": 2,
    },
    "kimi_linear": {"linear_attn_config": LINEAR_ATTENTION},
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_dim": HIDDEN,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "use_expert_bias": True},
    "llama": {"layer_types": None, "sliding_window": None},
    "llama4": {"num_experts_per_tok": 1},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"} | LONGCAT,
    "longcat_flash_ngram": LONGCAT | {"ngram_vocab_size_ratio": 2},
    "mellum": {"rope_parameters": dict.fromkeys(ALTERNATING, ROPE)},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    },
    "minicpm3": {"rope_scaling": LONG_ROPE},
    "minimax_m3_vl": {
        "layer_types": ["full_attention", "sparse", "sparse", "sparse"],
        "moe_layer_freq": None,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "ministral3": {"rope_parameters": LLAMA4_SCALED},
    "mistral4": {"rope_parameters": LLAMA4_SCALED},
    "muse_glimmer": {"layer_rope_theta": [10000.0, 0.0] * 2},
    "nanbeige": {"num_loops": 2},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "*", "E", "-"]},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": True,
    },
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [HEADS] * LAYERS,
        "num_kv_heads": [KV_HEADS] * LAYERS,
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0, "blocksparse_block_size": 32},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"full_attention_idx": [3]},
    "prism_hadamard_qwen35": {"hidden_size": 128},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "logits_soft_cap": 30.0},
    "rwkv7": {
        **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim"), 16)
    },
    "spark2_5": {"rope_parameters": dict.fromkeys(ALTERNATING, ROPE)},
    "qwen3_5": {"rope_parameters": HYBRID_ROPE, "num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
}
"""Model type, or module of its text model, to what it needs beside `SIZES`; None leaves a field out."""

TEXT: Mapping[str, str] = {
    "gemma3": "gemma3_text.ModelArgs",
    "gemma3n": "gemma3n.TextConfig",
    "gemma4": "gemma4_text.ModelArgs",
    "kimi_k25": "deepseek_v3.ModelArgs",
    "kimi_k3": "kimi_k3.TextArgs",
    "kimi_vl": "kimi_vl.TextArgs",
    "lfm2-vl": "lfm2.ModelArgs",
    "llama4": "llama4.TextArgs",
    "minimax_m3_vl": "minimax_m3_vl.TextArgs",
    "mistral3": "ministral3.ModelArgs",
    "pixtral": "llama.ModelArgs",
    "prism_hadamard_qwen35": "qwen3_5.TextModelArgs",
    "qwen2_vl": "qwen2.ModelArgs",
    "qwen3_5": "qwen3_5.TextModelArgs",
    "qwen3_5_moe": "qwen3_5.TextModelArgs",
    "qwen3_vl": "qwen3.ModelArgs",
    "qwen3_vl_moe": "qwen3_moe.ModelArgs",
}
"""Model types that keep their text model in `text_config`, and the class of that: module.Class."""

BESIDE_TEXT: Mapping[str, Mapping[str, Any]] = {
    "prism_hadamard_qwen35": {
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": "model.layers.0.mlp.gate_proj", "embedding": False, "dtype": "float16", "block": 0}
        ],
    },
}
"""Fields that these have outside of `text_config`."""

SET_ASIDE: Mapping[str, str] = {
    "bitnet": "its layers are a Metal kernel, and there is none for other devices",
    "muse_spark": "its attention is a Metal kernel, and there is none for other devices",
    "phi3small": "mlx_lm's own forward pass ends its process on a CPU, whatever the prompt",
    "olmo": "importing it ends the process where the package ai2-olmo is missing",
}
"""Modules with a `Model` that are not run, and why."""


def model_types() -> Iterator[str]:
    """Every module of mlx_lm that has a `Model` and can be imported here."""
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        if module.name not in SET_ASIDE and hasattr(_module(module.name), "Model"):
            yield module.name


def config_of(model_type: str) -> dict[str, Any]:
    """The content of a tiny config.json.

    Raises:
        KeyError: the type has required fields that no table knows.
    """
    row = ROWS.get(model_type, {})
    if model_type not in TEXT:
        return {"model_type": model_type} | _filled(_module(model_type).ModelArgs, row)
    module, _, name = TEXT[model_type].partition(".")
    text = {"model_type": module} | _filled(getattr(_module(module), name), {**ROWS.get(module, {}), **row})
    beside = BESIDE_TEXT.get(model_type, {})
    return {"model_type": model_type, "vocab_size": VOCABULARY, "text_config": text, **beside}


def _filled(arguments: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a configuration class that the tables know.

    Raises:
        KeyError: it requires others.
    """
    fields = inspect.signature(arguments).parameters
    chosen = {name: SIZES[name] for name in fields if name in SIZES} | dict(row)
    known = {name: value for name, value in chosen.items() if value is not None or name == "rope_scaling"}
    missing = [
        name
        for name, field in fields.items()
        if field.default is field.empty and name not in known and name != "model_type"
    ]
    if missing:
        raise KeyError(f"{arguments.__module__}: no value for {', '.join(missing)}")
    return known


def _module(name: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{name}")


LAYER_GAIN = 2.0
"""Layers then outweigh the embedding of the last token: else a random network hears nothing of its prompt."""
HEAD_GAIN = 4.0
SLOW = ("A_log", "w_lora.lora.2.bias")
"""Logarithms of how fast a recurrent layer forgets: as they are made, nothing is left after forty tokens."""


def build(model_type: str, seed: int = 0) -> Any:
    """A network of mlx_lm's own class, in float32, from its tiny configuration."""
    module = _module(model_type)
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(copy.deepcopy(config_of(model_type))))
    parameters: Any = network.parameters()
    has_head = any("head" in name for name, _ in tree_flatten(parameters))

    def drawn(name: str, value: mx.array) -> mx.array:
        return _drawn(name, value, seed, embeds_too=not has_head)

    network.update(tree_map_with_path(drawn, parameters))
    network.eval()
    mx.eval(network.parameters())
    return network


def _drawn(name: str, value: mx.array, seed: int, *, embeds_too: bool) -> mx.array:
    """A matrix keeps the size of what it reads; vectors, norms and packed weights stay as they are made.

    But the norm after RWKV's state is made of zeros, and would let nothing through.
    """
    if name.endswith(SLOW):
        return mx.full(value.shape, -4.0)
    if name.endswith("g_norm.weight"):
        return mx.ones_like(value)
    if value.ndim < 2 or "norm" in name or not mx.issubdtype(value.dtype, mx.floating):
        return value
    key = mx.random.key(zlib.crc32(f"{seed} {name}".encode()))
    noise = mx.random.normal(value.shape, key=key).astype(value.dtype)
    if "emb" in name and not embeds_too:
        return noise
    fan_in = math.prod(value.shape[1:]) if "conv" in name else value.shape[-1]
    gain = HEAD_GAIN if "head" in name else LAYER_GAIN
    return noise * (gain / math.sqrt(fan_in))
