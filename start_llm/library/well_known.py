"""Well-known models, as facts: the numbers of their configs that memory and speed depend on.

They are what `python -m start_llm fit --table` judges, and what the first start on a Mac suggests. `billions`
are all weights, as mlx_lm's class for the config counts them (`tests/models/test_well_known.py`).
"""

from __future__ import annotations

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


def _dense(  # noqa: PLR0913 (a row of a table)
    model_type: str,
    *,
    layers: int,
    hidden: int,
    wide: int,
    heads: tuple[int, int, int],
    vocab: int,
    window: int,
    tied: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return the config of a plain transformer.

    Args:
        wide: of the feed-forward part.
        heads: of queries; of keys and values; numbers in each.
    """
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab,
        "max_position_embeddings": window,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        **_FOUR_BITS,
        **more,
    }


def _experts(each: int, active: int, wide: int, **more: Any) -> dict[str, Any]:
    """Return the keys of routed experts: how many, how many a token reads, and their width."""
    return {
        "num_experts": each,
        "num_experts_per_tok": active,
        "moe_intermediate_size": wide,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        **more,
    }


_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "attention_bias": False}
_DEEPSEEK: dict[str, Any] = _LATENT | {
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
_GLM: dict[str, Any] = {"n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
_OSS: dict[str, Any] = {"num_experts_per_tok": 4, "sliding_window": 128, "attention_bias": True, **_MXFP4}
_GEMMA: dict[str, Any] = {"sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256}

WELL_KNOWN: tuple[WellKnown, ...] = (
    WellKnown(
        "mlx-community/Llama-3.2-3B-Instruct-4bit",
        3.213,
        _dense(
            "llama",
            layers=28,
            hidden=3072,
            wide=8192,
            heads=(24, 8, 128),
            vocab=128_256,
            window=131_072,
            tied=True,
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-4B-4bit",
        4.022,
        _dense(
            "qwen3",
            layers=36,
            hidden=2560,
            wide=9728,
            heads=(32, 8, 128),
            vocab=151_936,
            window=40_960,
            tied=True,
        ),
    ),
    WellKnown(
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        8.030,
        _dense(
            "llama", layers=32, hidden=4096, wide=14_336, heads=(32, 8, 128), vocab=128_256, window=131_072
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-8B-4bit",
        8.191,
        _dense(
            "qwen3", layers=36, hidden=4096, wide=12_288, heads=(32, 8, 128), vocab=151_936, window=40_960
        ),
    ),
    WellKnown(
        "mlx-community/gemma-3-12b-it-4bit",
        11.766,
        _dense(
            "gemma3_text",
            layers=48,
            hidden=3840,
            wide=15_360,
            heads=(16, 8, 256),
            vocab=262_208,
            window=131_072,
            tied=True,
            **_GEMMA,
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-14B-4bit",
        14.768,
        _dense(
            "qwen3", layers=40, hidden=5120, wide=17_408, heads=(40, 8, 128), vocab=151_936, window=40_960
        ),
    ),
    WellKnown(
        "mlx-community/gpt-oss-20b-MXFP4-Q4",
        20.915,
        _dense(
            "gpt_oss",
            layers=24,
            hidden=2880,
            wide=2880,
            heads=(64, 8, 64),
            vocab=201_088,
            window=131_072,
            num_local_experts=32,
            layer_types=["sliding_attention", "full_attention"] * 12,
            **_OSS,
        ),
    ),
    WellKnown(
        "mlx-community/Devstral-Small-2507-4bit",
        23.572,
        _dense(
            "mistral", layers=40, hidden=5120, wide=32_768, heads=(32, 8, 128), vocab=131_072, window=131_072
        ),
    ),
    WellKnown(
        "mlx-community/gemma-3-27b-it-4bit",
        27.009,
        _dense(
            "gemma3_text",
            layers=62,
            hidden=5376,
            wide=21_504,
            heads=(32, 16, 128),
            vocab=262_208,
            window=131_072,
            tied=True,
            **_GEMMA,
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-30B-A3B-4bit",
        30.532,
        _dense(
            "qwen3_moe",
            layers=48,
            hidden=2048,
            wide=6144,
            heads=(32, 4, 128),
            vocab=151_936,
            window=40_960,
            **_experts(128, 8, 768),
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit",
        30.532,
        _dense(
            "qwen3_moe",
            layers=48,
            hidden=2048,
            wide=6144,
            heads=(32, 4, 128),
            vocab=151_936,
            window=262_144,
            **_experts(128, 8, 768),
        ),
    ),
    WellKnown(
        "lmstudio-community/GLM-4.7-Flash-MLX-4bit",
        29.943,
        _dense(
            "glm4_moe_lite",
            layers=47,
            hidden=2048,
            wide=10_240,
            heads=(20, 20, 256),
            vocab=154_880,
            window=202_752,
            n_routed_experts=64,
            num_experts_per_tok=4,
            moe_intermediate_size=1536,
            first_k_dense_replace=1,
            q_lora_rank=768,
            qk_nope_head_dim=192,
            v_head_dim=256,
            **_LATENT,
            **_GLM,
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-32B-4bit",
        32.762,
        _dense(
            "qwen3", layers=64, hidden=5120, wide=25_600, heads=(64, 8, 128), vocab=151_936, window=40_960
        ),
    ),
    WellKnown(
        "mlx-community/Llama-3.3-70B-Instruct-4bit",
        70.554,
        _dense(
            "llama", layers=80, hidden=8192, wide=28_672, heads=(64, 8, 128), vocab=128_256, window=131_072
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit",
        79.674,
        _dense(
            "qwen3_next",
            layers=48,
            hidden=2048,
            wide=5120,
            heads=(16, 2, 256),
            vocab=151_936,
            window=262_144,
            **_experts(512, 10, 512, shared_expert_intermediate_size=512),
            **_DELTA,
        ),
    ),
    WellKnown(
        "mlx-community/GLM-4.5-Air-4bit",
        106.852,
        _dense(
            "glm4_moe",
            layers=46,
            hidden=4096,
            wide=10_944,
            heads=(96, 8, 128),
            vocab=151_552,
            window=131_072,
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
            **_GLM,
        ),
    ),
    WellKnown(
        "mlx-community/gpt-oss-120b-MXFP4-Q4",
        116.829,
        _dense(
            "gpt_oss",
            layers=36,
            hidden=2880,
            wide=2880,
            heads=(64, 8, 64),
            vocab=201_088,
            window=131_072,
            num_local_experts=128,
            layer_types=["sliding_attention", "full_attention"] * 18,
            **_OSS,
        ),
    ),
    WellKnown(
        "mlx-community/Qwen3-235B-A22B-4bit",
        235.094,
        _dense(
            "qwen3_moe",
            layers=94,
            hidden=4096,
            wide=12_288,
            heads=(64, 4, 128),
            vocab=151_936,
            window=40_960,
            **_experts(128, 8, 1536),
        ),
    ),
    WellKnown(
        "mlx-community/DeepSeek-V3-0324-4bit",
        671.026,
        _dense(
            "deepseek_v3",
            layers=61,
            hidden=7168,
            wide=18_432,
            heads=(128, 128, 128),
            vocab=129_280,
            window=163_840,
            n_routed_experts=256,
            n_group=8,
            topk_group=4,
            first_k_dense_replace=3,
            **_DEEPSEEK,
        ),
    ),
    WellKnown(
        "mlx-community/Kimi-K2-Instruct-4bit",
        1026.408,
        _dense(
            "kimi_k2",
            layers=61,
            hidden=7168,
            wide=18_432,
            heads=(64, 64, 128),
            vocab=163_840,
            window=131_072,
            n_routed_experts=384,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **_DEEPSEEK,
        ),
    ),
)
DEFAULT_APPLE_MODEL = "lmstudio-community/GLM-4.7-Flash-MLX-4bit"


def well_known(repository: str) -> WellKnown:
    """Return a model of the table.

    Raises:
        KeyError: it has none of this name.
    """
    return {one.repository: one for one in WELL_KNOWN}[repository]
