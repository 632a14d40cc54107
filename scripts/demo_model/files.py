"""The folder of a trained network, as Hugging Face and mlx_lm lay it out."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer

from scripts.demo_model.conversations import IM_END
from scripts.demo_model.network import Qwen3
from scripts.demo_model.tokenizer import END_OF_TEXT, write_tokenizer

_LONGEST_POSITION = 131_072
_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_README = Path(__file__).with_name("model_card.md")


def write_model(network: Qwen3, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes every file of the model, in float32: the CPU computes nothing faster."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {f"model.{name}": value.detach().contiguous() for name, value in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(tokenizer, folder)
    shutil.copyfile(_TEMPLATE, folder / "chat_template.jinja")
    shutil.copyfile(_README, folder / "README.md")
    end, padding = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    shape = network.shape
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": padding,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.feed_forward,
        "vocab_size": shape.vocabulary,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.epsilon,
        "max_position_embeddings": _LONGEST_POSITION,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": [end, padding]})


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
