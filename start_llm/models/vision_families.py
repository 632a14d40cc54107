"""The model families whose images are served: where mlx_vlm has their image processor, and what that makes.

A family is a row of `VISION_FAMILIES`. Its text network is mlx_lm's, its vision tower is mlx_vlm's.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import dropwhile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow

from start_llm.core.chat import Json
from start_llm.models.image_processor import ImageMarks, ImageProcessor, Preprocess, Preprocessed

# mlx_vlm's modules are imported where they are used: only a model with a vision tower needs them.
# ruff: noqa: PLC0415

_BLANK = (224, 224)


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """One row of the table.

    Attributes:
        processor: imports and returns mlx_vlm's processor class.
        preprocess: returns the processing of one image, from such a processor.
        placeholder: the processor's attribute with the text that its template writes for an image.
        reads_both_ways: returns from the config whether the tokens of an image see each other in both
            directions. If so, the network has to read all of them at once.
    """

    processor: Callable[[], Any]
    preprocess: Callable[[Any], Preprocess]
    placeholder: str = "image_token"
    reads_both_ways: Callable[[Mapping[str, Json]], bool] = lambda _: False


# ------------------------------------------------------------------------------------------ processor classes


def _qwen2() -> Any:
    from mlx_vlm.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    return Qwen2VLProcessor


def _qwen2_5() -> Any:
    from mlx_vlm.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    return Qwen2_5_VLProcessor


def _qwen3() -> Any:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    return Qwen3VLProcessor


def _gemma3() -> Any:
    from mlx_vlm.models.gemma3.processing_gemma3 import Gemma3Processor

    return Gemma3Processor


def _gemma4() -> Any:
    from mlx_vlm.models.gemma4.processing_gemma4 import Gemma4Processor

    return Gemma4Processor


def _mistral3() -> Any:
    from mlx_vlm.models.mistral3.processing_mistral3 import Mistral3Processor

    return Mistral3Processor


def _pixtral() -> Any:
    from mlx_vlm.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor


# --------------------------------------------------------------------------------------------- one image each


def _patches(processor: Any) -> Preprocess:
    """Qwen: a grid of merged patches, whose positions have three axes."""
    image_processor, token = processor.image_processor, int(processor.image_token_id)

    def preprocess(image: Pillow.Image) -> Preprocessed:
        made = image_processor(images=[image])
        time, rows, columns = (int(number) for number in made["image_grid_thw"][0])
        merged = image_processor.merge_size
        grid = (time, rows // merged, columns // merged)
        return Preprocessed(dict(made), (token,) * prod(grid), grid)

    return preprocess


def _fixed(processor: Any) -> Preprocess:
    """Gemma 3: every image has the same number of tokens."""
    image_processor = processor.image_processor
    ids = (int(processor.image_token_id),) * processor.image_seq_length

    def preprocess(image: Pillow.Image) -> Preprocessed:
        made = image_processor([image], do_pan_and_scan=False)
        return Preprocessed({"pixel_values": np.stack(made["pixel_values"])}, ids, None)

    return preprocess


def _soft_tokens(processor: Any) -> Preprocess:
    """Gemma 4: as many tokens as fit the image's form."""
    image_processor, token = processor.image_processor, int(processor.image_token_id)

    def preprocess(image: Pillow.Image) -> Preprocessed:
        inputs, (count,) = image_processor([image])
        return Preprocessed(inputs, (token,) * int(count), None)

    return preprocess


def _rows(processor: Any) -> Preprocess:
    """Pixtral and Mistral 3: rows of tokens with a break after each but the last."""
    image_processor = processor.image_processor
    side = processor.patch_size * processor.spatial_merge_size
    token, gap = int(processor.image_token_id), int(processor.image_break_token_id)

    def preprocess(image: Pillow.Image) -> Preprocessed:
        made = image_processor([[image]], patch_size=side)
        height, width = made["image_sizes"][0]
        row = (*(token,) * (width // side), gap)
        inputs = {"pixel_values": made["pixel_values"], "image_sizes": np.array(made["image_sizes"])}
        return Preprocessed(inputs, (row * (height // side))[:-1], None)

    return preprocess


def _says_both_ways(config: Mapping[str, Json]) -> bool:
    text_config = config.get("text_config")
    return isinstance(text_config, dict) and text_config.get("use_bidirectional_attention") == "vision"


VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(_qwen2, _patches),
    "qwen2_5_vl": VisionFamily(_qwen2_5, _patches),
    "qwen3_vl": VisionFamily(_qwen3, _patches),
    "qwen3_vl_moe": VisionFamily(_qwen3, _patches),
    "qwen3_5": VisionFamily(_qwen3, _patches),
    "qwen3_5_moe": VisionFamily(_qwen3, _patches),
    "gemma3": VisionFamily(_gemma3, _fixed, "boi_token"),
    "gemma4": VisionFamily(_gemma4, _soft_tokens, reads_both_ways=_says_both_ways),
    "mistral3": VisionFamily(_mistral3, _rows),
    "pixtral": VisionFamily(_pixtral, _rows),
}
"""By `model_type`."""


# --------------------------------------------------------------------------------------- a model's processor


def load_image_processor(family: VisionFamily, folder: Path, max_tokens: int) -> ImageProcessor:
    """Load the image processor of a model folder. Runs on the engine thread: mlx_vlm makes arrays meanwhile.

    Raises:
        Exception: whatever the libraries raise for a folder without the right files.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Gemma 4's processor makes one for audio too, and complains of it
        processor = family.processor().from_pretrained(str(folder), trust_remote_code=False)
    preprocess = family.preprocess(processor)
    placeholder = str(getattr(processor, family.placeholder))
    return ImageProcessor(
        preprocess,
        _marks(processor, placeholder, preprocess(blank()).network_ids),
        settings=_settings(processor),
        max_tokens=max_tokens,
    )


def blank(size: tuple[int, int] = _BLANK) -> Pillow.Image:
    return Pillow.new("RGB", size, "white")


def _marks(processor: Any, placeholder: str, run: tuple[int, ...]) -> ImageMarks:
    """Find out what the processor writes around an image.

    Raises:
        ValueError: it does not write the run that `preprocess` gives.
    """
    written = processor(text=[placeholder], images=[blank()], add_special_tokens=False)["input_ids"]
    ids = [int(token) for token in np.array(written).reshape(-1)]
    start = len(ids) - len(list(dropwhile(lambda token: token != run[0], ids)))
    if tuple(ids[start : start + len(run)]) != run:
        raise ValueError(f"its processor writes {len(ids)} tokens for {placeholder!r}, and not the image's")
    sides = [_decoded(processor.tokenizer, part) for part in (ids[:start], ids[start + len(run) :])]
    return ImageMarks(placeholder, *sides)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _settings(processor: Any) -> str:
    """Return what decides how an image is processed, as text."""
    names = ("patch_size", "spatial_merge_size", "image_seq_length")
    own = {name: getattr(processor, name, None) for name in names}
    image_processor = processor.image_processor
    settings = {"processor": own, "class": type(image_processor).__name__, "image": vars(image_processor)}
    return json.dumps(settings, sort_keys=True, default=str)
