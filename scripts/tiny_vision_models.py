"""Build tiny models with eyes on disk: a text network and a vision tower, with random weights.

The folders have the files of real ones (tokenizer, chat template, image processor), so that mlx_lm, mlx_vlm
and the server load them. Their texts are random, and depend on the images in the prompt.

    python scripts/tiny_vision_models.py qwen3_vl FOLDER
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from scripts import tiny_models  # noqa: E402 - found through the line above
from scripts.tiny_models import AddedTokens, Config, Phrase, Weights  # noqa: E402

HIDDEN, LAYERS, VOCABULARY, TOWER = 128, 4, 2048, 64
PIXELS = 100_352
"""Of the largest image that a Qwen tower sees here: 98 tokens of 32 by 32 pixels, or 128 of 28 by 28."""
_SMALL_LOGITS = {False: 0.25, True: 0.1}
"""Factors on a head, and on embeddings that are the head too."""
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_GEMMA3_TOKENS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_GEMMA4_TOKENS = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
_PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


@dataclass(frozen=True)
class VisionFamily:
    """One row of the table of families.

    Attributes:
        image: how the chat template writes an image.
        tokens: added tokens; `ids` are keys of config.json that have the ids of some of them.
        config: keys of config.json beside `text_config` and `vision_config`.
        nested: the text's settings are in `text_config`; they stand beside it where this is false.
        preprocessor, processor: content of preprocessor_config.json and of processor_config.json.
        named: keys of tokenizer_config.json.
    """

    image: str
    tokens: tuple[str, ...]
    ids: Mapping[str, str]
    text: Config
    vision: Config
    preprocessor: Config
    config: Config = field(default_factory=dict)
    processor: Config = field(default_factory=dict)
    named: Config = field(default_factory=dict)
    nested: bool = True
    model_type: str = ""


def _text(model_type: str, **settings: Any) -> Config:
    common = {"model_type": model_type, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
    common |= {"intermediate_size": 2 * HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": VOCABULARY, "rope_theta": 10_000.0}
    return common | {"max_position_embeddings": 32_768, "tie_word_embeddings": False} | settings


def _qwen(model_type: str, text: Config, vision: Config, patch: int, *, nested: bool = True) -> VisionFamily:
    tower = {"model_type": model_type, "depth": 2, "hidden_size": TOWER, "num_heads": 4, "patch_size": patch}
    tower |= {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    image_processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2}
    image_processor |= {"temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image_processor |= {"size": {"shortest_edge": 3136, "longest_edge": PIXELS}}
    return VisionFamily(
        image=_QWEN_IMAGE,
        tokens=_QWEN_TOKENS,
        ids={
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        text=text,
        vision=tower | vision,
        preprocessor=image_processor,
        config={"vocab_size": VOCABULARY, "tie_word_embeddings": False},
        nested=nested,
        model_type=model_type,
    )


def _gemma4(**text: Any) -> VisionFamily:
    ropes = {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"}
    }
    ropes["sliding_attention"] = {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"}
    settings = {"sliding_window": 64, "sliding_window_pattern": 2, "global_head_dim": 32}
    settings |= {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
    settings |= {"rope_parameters": ropes, "attention_k_eq_v": False, "use_double_wide_mlp": False}
    settings |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
    settings |= {"num_kv_shared_layers": 0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True}
    tower = {"model_type": "gemma4_vision", "hidden_size": TOWER, "intermediate_size": 2 * TOWER}
    tower |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    tower |= {"rms_norm_eps": 1e-6, "patch_size": 16, "pooling_kernel_size": 2, "default_output_length": 64}
    tower |= {"position_embedding_size": 64, "use_clipped_linears": False}
    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    names |= {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
    image_processor = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16}
    image_processor |= {"max_soft_tokens": 64, "pooling_kernel_size": 2}
    return VisionFamily(
        image="<|image|>",
        tokens=_GEMMA4_TOKENS,
        ids={"image_token_id": "<|image|>", "audio_token_id": "<|audio|>"},
        text=_text("gemma4_text", **settings | text),
        vision=tower,
        preprocessor=image_processor,
        config={"vocab_size": VOCABULARY, "vision_soft_tokens_per_image": 64, "audio_config": None},
        processor={"image_processor": image_processor},
        named=names,
        model_type="gemma4",
    )


def _pixtral(model_type: str, merge: int, **config: Any) -> VisionFamily:
    tower = {"model_type": "pixtral", "hidden_size": TOWER, "num_hidden_layers": 2, "head_dim": 16}
    tower |= {"intermediate_size": 2 * TOWER, "num_attention_heads": 4, "image_size": 224, "patch_size": 14}
    tower |= {"projection_dim": HIDDEN, "num_channels": 3, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
    image_processor = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 14 * 8 * merge},
    }
    image_processor |= {"patch_size": {"height": 14, "width": 14}}
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    return VisionFamily(
        image="[IMG]",
        tokens=_PIXTRAL_TOKENS,
        ids={"image_token_index": "[IMG]"},
        text=_text(
            "mistral", rope_traditional=False, use_qk_norm=False, layer_types=["full_attention"] * LAYERS
        ),
        vision=tower,
        preprocessor=image_processor,
        config={"vision_feature_layer": -1, "vocab_size": VOCABULARY} | config,
        processor={"patch_size": 14, "spatial_merge_size": merge} | names,
        model_type=model_type,
    )


def _gemma3() -> VisionFamily:
    settings = {"rope_global_base_freq": 1e6, "rope_local_base_freq": 1e4, "rope_theta": 1e6}
    settings |= {"sliding_window": 64, "sliding_window_pattern": 2, "query_pre_attn_scalar": 32}
    tower = {"model_type": "siglip_vision_model", "image_size": 112, "patch_size": 14, "num_channels": 3}
    tower |= {"num_hidden_layers": 2, "hidden_size": TOWER, "intermediate_size": 2 * TOWER}
    tower |= {"num_attention_heads": 4, "layer_norm_eps": 1e-6}
    names = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    return VisionFamily(
        image="<start_of_image>",
        tokens=_GEMMA3_TOKENS,
        ids={"image_token_index": "<image_soft_token>"},
        text=_text("gemma3_text", mm_tokens_per_image=16, tie_word_embeddings=True, **settings),
        vision=tower,
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 112, "width": 112},
            "do_pan_and_scan": None,
        },
        config={
            "mm_tokens_per_image": 16,
            "pad_token_id": 0,
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
        },
        processor={"image_seq_length": 16},
        named=names,
        model_type="gemma3",
    )


def _table() -> dict[str, VisionFamily]:
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    }
    experts |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
    linear |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "full_attention_interval": LAYERS}
    rope = {"type": "default", "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    linear |= {"rope_parameters": rope | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}
    linear |= {"attention_bias": False}
    plain = {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}, "head_dim": None}
    interleaved = {
        "rope_scaling": {"rope_type": "mrope", "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    }
    interleaved |= {"norm_topk_prob": True}
    projected = {"out_hidden_size": HIDDEN, "intermediate_size": 2 * TOWER}
    windows = {
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "spatial_patch_size": 14,
    }
    stacked = projected | {"depth": 4, "num_position_embeddings": 144, "deepstack_visual_indexes": [0, 1, 2]}
    unstacked = projected | {"num_position_embeddings": 144, "deepstack_visual_indexes": []}
    shared = {"shared_expert_intermediate_size": 64}
    qwen2_tower = {"hidden_size": HIDDEN, "embed_dim": TOWER, "mlp_ratio": 2}
    return {
        "qwen2_vl": _qwen("qwen2_vl", _text("qwen2_vl", **plain), qwen2_tower, 14, nested=False),
        "qwen2_5_vl": _qwen(
            "qwen2_5_vl", _text("qwen2_5_vl", **plain), projected | windows, 14, nested=False
        ),
        "qwen3_vl": _qwen("qwen3_vl", _text("qwen3_vl_text", **interleaved), stacked, 16),
        "qwen3_vl_moe": _qwen(
            "qwen3_vl_moe", _text("qwen3_vl_moe_text", **experts | interleaved), stacked, 16
        ),
        "qwen3_5": _qwen("qwen3_5", _text("qwen3_5_text", **linear), unstacked, 16),
        "qwen3_5_moe": _qwen(
            "qwen3_5_moe", _text("qwen3_5_moe_text", **experts | shared | linear), unstacked, 16
        ),
        "gemma3": _gemma3(),
        "gemma4": _gemma4(),
        "gemma4_blocks": _gemma4(use_bidirectional_attention="vision"),
        "mistral3": _pixtral("mistral3", 2, spatial_merge_size=2, multimodal_projector_bias=False),
        "pixtral": _pixtral("pixtral", 1, vision_feature_select_strategy="full", ignore_index=-100),
    }


VISION_FAMILIES = tuple(_table())
"""By model type; `gemma4_blocks` is the Gemma 4 whose images are read in both directions."""


def _added(family: VisionFamily, text: AddedTokens = tiny_models.CHATML) -> AddedTokens:
    """Return a text's added tokens and those of the family's images."""
    return replace(text, special=tuple(dict.fromkeys([*text.special, *family.tokens])))


def _config(family: VisionFamily, vocabulary: Mapping[str, int]) -> Config:
    text = {key: value for key, value in family.text.items() if value is not None}
    nested = {"text_config": text} if family.nested else {k: v for k, v in text.items() if k != "model_type"}
    ids = {key: vocabulary[token] for key, token in family.ids.items()}
    ends = {"eos_token_id": vocabulary[tiny_models.END_OF_TURN]}
    top = {"model_type": family.model_type, "vision_config": family.vision, "torch_dtype": "float32"}
    return top | nested | family.config | ids | ends


def _shapes(config: Config) -> Mapping[str, mx.array]:
    """Return the parameters of mlx_vlm's model for this config, with the values that it begins with."""
    # mlx_vlm is imported here, as late as the server does.
    from mlx_vlm.utils import update_module_configs  # noqa: PLC0415

    architecture = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    content = {"text_config": {}, "audio_config": {}} | copy.deepcopy(config)
    made = architecture.ModelConfig.from_dict(content)
    made = update_module_configs(made, architecture, content, ["text", "vision"])
    parameters: Any = tree_flatten(architecture.Model(made).parameters())
    return dict(parameters)


def _weights(config: Config, seed: int) -> Weights:
    tied = config.get("text_config", config)["tie_word_embeddings"]
    return {
        name: _weight(name, value, seed, tied=tied)
        for name, value in _shapes(config).items()
        if not (tied and "lm_head" in name)
    }


def _weight(name: str, value: mx.array, seed: int, *, tied: bool) -> np.ndarray:
    """Return one parameter. Logits are kept small, so that rounding matters little beside them."""
    if value.ndim < 2 and not name.endswith(("A_log", "dt_bias")):
        return np.array(value)
    weight = tiny_models.random_weight(name, tuple(value.shape), 1.0, seed)
    is_head = "lm_head" in name or (tied and "embed_tokens" in name)
    return weight * np.float32(_SMALL_LOGITS[tied] if is_head else 1)


def build(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a random model and return its folder.

    Args:
        family: one of VISION_FAMILIES.

    Raises:
        KeyError: the family is unknown.
    """
    row = _table()[family]
    added = _added(row)
    tokenizer = tiny_models.tiny_tokenizer(VOCABULARY, added=added)
    config = _config(row, tokenizer.get_vocab())
    weights = _weights(config, seed)
    tiny_models.silence(weights, tokenizer, added)
    template = tiny_models.CHAT_TEMPLATE.replace(_QWEN_IMAGE, row.image)
    tiny_models.write_model(folder, config, weights)
    tiny_models.write_tokenizer(folder, tokenizer, template, added)
    _write_processor(folder, row)
    return folder


def _write_processor(folder: Path, row: VisionFamily) -> None:
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text()) | row.named | {"extra_special_tokens": dict(row.named)}
    path.write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(row.preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(row.processor))


def build_chain(  # noqa: PLR0913 (keywords of `tiny_models.build_chain`)
    folder: Path,
    chains: Mapping[str, Sequence[Phrase]],
    *,
    hidden: int = 128,
    layers: int = 1,
    vocab: int = VOCABULARY,
    seed: int = 0,
    words: Iterable[str] = (),
    chat_template: str = tiny_models.CHAT_TEMPLATE,
    added: AddedTokens = tiny_models.CHATML,
) -> Path:
    """Write a Qwen3-VL that answers with a script, whatever it sees, and return its folder.

    See `tiny_models.build_chain`. Its tower is as random as that of `build`.

    Raises:
        ValueError: as there.
    """
    row = _table()["qwen3_vl"]
    added = _added(row, added)
    script = tiny_models.script_of(chains, vocab=vocab, words=words, added=added)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    limits = {"vocab_size": script.rows, "max_position_embeddings": tiny_models.MAX_POSITIONS}
    row = replace(
        row,
        text=row.text | sizes | limits,
        vision=row.vision | {"out_hidden_size": hidden},
        config=row.config | {"vocab_size": script.rows},
    )
    config = _config(row, script.tokenizer.get_vocab())
    shapes = {name: value.shape for name, value in _shapes(config).items()}
    text = {name: shape for name, shape in shapes.items() if name.startswith("language_model.")}
    weights = _weights(config, seed) | tiny_models.chain_weights(
        text, script.links, config["eos_token_id"], seed=seed
    )
    tiny_models.write_model(folder, config, weights)
    tiny_models.write_tokenizer(folder, script.tokenizer, chat_template, added)
    _write_processor(folder, row)
    return folder


def quantise(folder: Path, target: Path, bits: int = 4) -> Path:
    """Write a quantised copy of a model that `build` wrote, as mlx_vlm's converter does, and return it."""
    # mlx_vlm is imported here, as late as the server does.
    from mlx_vlm.quant_utils import quantize_model  # noqa: PLC0415
    from mlx_vlm.utils import load_config, load_model, save_config, save_weights  # noqa: PLC0415

    shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    model, config = quantize_model(load_model(folder), load_config(folder), 32, bits)
    save_weights(target, model)
    save_config(config, target / "config.json")
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random model that sees.")
    parser.add_argument("family", choices=VISION_FAMILIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    print(build(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
