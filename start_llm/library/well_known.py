"""Well-known models, as facts: the numbers of their configs that memory and speed depend on.

They are what `python -m start_llm fit --table` judges, and what the first start on a Mac suggests. `billions`
are all weights, as mlx_lm's class for the config counts them (`tests/models/test_well_known.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from start_llm.library.fit import ModelShape, shape_of
from start_llm.models.weight_files import bits_per_weight, weights_of_size


@dataclass(frozen=True, slots=True)
class WellKnown:
    """One model.

    Attributes:
        repository: on the hub, in MLX's format.
        billions: number of its weights, in 10^9.
        config: the keys of config.json that matter.
    """

    repository: str
    billions: float
    config: Mapping[str, Any]

    @property
    def shape(self) -> ModelShape:
        total = int(self.billions * 1e9 * bits_per_weight(self.config) / 8)
        return shape_of(self.repository, self.config, weights_of_size(total, self.config))


_FOUR_BITS: dict[str, Any] = {"quantization": {"group_size": 64, "bits": 4}, "torch_dtype": "bfloat16"}
_MXFP4: dict[str, Any] = {
    "quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "torch_dtype": "bfloat16",
}


def _family(model_type: str, vocab: int, window: int, **more: Any) -> dict[str, Any]:
    """Return the keys that the plain transformers of a family share."""
    return {
        "model_type": model_type,
        "vocab_size": vocab,
        "max_position_embeddings": window,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **_FOUR_BITS,
        **more,
    }


def _experts(each: int, active: int, wide: int) -> dict[str, Any]:
    """Return the keys of routed experts: how many, how many a token reads, and their width."""
    return {
        "num_experts": each,
        "num_experts_per_tok": active,
        "moe_intermediate_size": wide,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": False}
_ROUTED_GLM: dict[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}

_LLAMA = _family("llama", 128_256, 131_072)
_MISTRAL = _family("mistral", 131_072, 131_072)
_QWEN3 = _family("qwen3", 151_936, 40_960)
_QWEN3_MOE = _family("qwen3_moe", 151_936, 40_960, **_experts(128, 8, 768))
_QWEN3_NEXT = _family(
    "qwen3_next",
    151_936,
    262_144,
    **_experts(512, 10, 512),
    shared_expert_intermediate_size=512,
    linear_num_value_heads=32,
    linear_num_key_heads=16,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    full_attention_interval=4,
    partial_rotary_factor=0.25,
)
_GEMMA = _family(
    "gemma3_text",
    262_208,
    131_072,
    **_TIED,
    sliding_window=1024,
    sliding_window_pattern=6,
    query_pre_attn_scalar=256,
)
_OSS = _family(
    "gpt_oss", 201_088, 131_072, num_experts_per_tok=4, sliding_window=128, attention_bias=True, **_MXFP4
)
_GLM_FLASH = _family(
    "glm4_moe_lite",
    154_880,
    202_752,
    n_routed_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    first_k_dense_replace=1,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    **_LATENT,
    **_ROUTED_GLM,
)
_GLM_AIR = _family(
    "glm4_moe",
    151_552,
    131_072,
    n_routed_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
    attention_bias=True,
    use_qk_norm=False,
    norm_topk_prob=True,
    rope_scaling=None,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    partial_rotary_factor=0.5,
    **_ROUTED_GLM,
)
_DEEPSEEK = _family(
    "deepseek_v3",
    129_280,
    163_840,
    n_routed_experts=256,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    v_head_dim=128,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    moe_layer_freq=1,
    routed_scaling_factor=2.5,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    num_nextn_predict_layers=0,
    **_LATENT,
)
_KIMI: dict[str, Any] = _DEEPSEEK | {
    "model_type": "kimi_k2",
    "vocab_size": 163_840,
    "max_position_embeddings": 131_072,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _model(
    repository: str,
    billions: float,
    family: Mapping[str, Any],
    sizes: tuple[int, int, int],
    heads: tuple[int, int, int],
    **more: Any,
) -> WellKnown:
    """Return a model of a family.

    Args:
        sizes: layers; numbers of a token's state; width of the feed-forward part.
        heads: of queries; of keys and values; numbers in each.
        more: keys in which it differs from its family.
    """
    layers, hidden, wide = sizes
    queries, keys_and_values, head = heads
    own = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": wide, "head_dim": head}
    own |= {"num_attention_heads": queries, "num_key_value_heads": keys_and_values}
    return WellKnown(repository, billions, {**family, **own, **more})


def _oss(repository: str, billions: float, layers: int, experts: int) -> WellKnown:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    sizes, heads = (layers, 2880, 2880), (64, 8, 64)
    return _model(repository, billions, _OSS, sizes, heads, num_local_experts=experts, layer_types=kinds)


WELL_KNOWN: tuple[WellKnown, ...] = (
    _model(
        "mlx-community/Llama-3.2-3B-Instruct-4bit", 3.213, _LLAMA, (28, 3072, 8192), (24, 8, 128), **_TIED
    ),
    _model("mlx-community/Qwen3-4B-4bit", 4.022, _QWEN3, (36, 2560, 9728), (32, 8, 128), **_TIED),
    _model("mlx-community/Meta-Llama-3.1-8B-Instruct-4bit", 8.030, _LLAMA, (32, 4096, 14_336), (32, 8, 128)),
    _model("mlx-community/Qwen3-8B-4bit", 8.191, _QWEN3, (36, 4096, 12_288), (32, 8, 128)),
    _model("mlx-community/gemma-3-12b-it-4bit", 11.766, _GEMMA, (48, 3840, 15_360), (16, 8, 256)),
    _model("mlx-community/Qwen3-14B-4bit", 14.768, _QWEN3, (40, 5120, 17_408), (40, 8, 128)),
    _oss("mlx-community/gpt-oss-20b-MXFP4-Q4", 20.915, layers=24, experts=32),
    _model("mlx-community/Devstral-Small-2507-4bit", 23.572, _MISTRAL, (40, 5120, 32_768), (32, 8, 128)),
    _model("mlx-community/gemma-3-27b-it-4bit", 27.009, _GEMMA, (62, 5376, 21_504), (32, 16, 128)),
    _model("mlx-community/Qwen3-30B-A3B-4bit", 30.532, _QWEN3_MOE, (48, 2048, 6144), (32, 4, 128)),
    _model(
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        30.532,
        _QWEN3_MOE | {"max_position_embeddings": 262_144},
        (48, 2048, 6144),
        (32, 4, 128),
    ),
    _model(
        "lmstudio-community/GLM-4.7-Flash-MLX-4bit", 29.943, _GLM_FLASH, (47, 2048, 10_240), (20, 20, 256)
    ),
    _model("mlx-community/Qwen3-32B-4bit", 32.762, _QWEN3, (64, 5120, 25_600), (64, 8, 128)),
    _model("mlx-community/Llama-3.3-70B-Instruct-4bit", 70.554, _LLAMA, (80, 8192, 28_672), (64, 8, 128)),
    _model(
        "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 79.674, _QWEN3_NEXT, (48, 2048, 5120), (16, 2, 256)
    ),
    _model("mlx-community/GLM-4.5-Air-4bit", 106.852, _GLM_AIR, (46, 4096, 10_944), (96, 8, 128)),
    _oss("mlx-community/gpt-oss-120b-MXFP4-Q4", 116.829, layers=36, experts=128),
    _model(
        "mlx-community/Qwen3-235B-A22B-4bit",
        235.094,
        _QWEN3_MOE,
        (94, 4096, 12_288),
        (64, 4, 128),
        moe_intermediate_size=1536,
    ),
    _model("mlx-community/DeepSeek-V3-0324-4bit", 671.026, _DEEPSEEK, (61, 7168, 18_432), (128, 128, 128)),
    _model("mlx-community/Kimi-K2-Instruct-4bit", 1026.408, _KIMI, (61, 7168, 18_432), (64, 64, 128)),
)
DEFAULT_APPLE_MODEL = "lmstudio-community/GLM-4.7-Flash-MLX-4bit"


def well_known(repository: str) -> WellKnown:
    """Return a model of the table.

    Raises:
        KeyError: it has none of this name.
    """
    return {model.repository: model for model in WELL_KNOWN}[repository]
