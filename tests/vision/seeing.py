"""Pictures, prompts with pictures in them, and what mlx_vlm itself says to such a prompt."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream
from PIL import Image as Pillow

from scripts import tiny_vision_models
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Finished, Text, Usage
from start_llm.core.images import Image, ImageRun
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel, load
from start_llm.models.vision import Vision
from start_llm.models.vision_families import VISION_FAMILIES
from tests.cache.conversations import Picture
from tests.conftest import lasting_folder
from tests.engine.harness import Watched, engine_request, uncached_resources

FAMILIES = tiny_vision_models.VISION_FAMILIES
WORDS = "the window shows a red button and behind it some text about a file".split()

type Part = str | Image


@cache
def folder_of(family: str) -> Path:
    """The folder of a tiny model that sees. Do not change it."""
    return tiny_vision_models.build(family, lasting_folder())


@cache
def model_of(family: str) -> LoadedModel:
    return load(folder_of(family))


def resources_of(family: str, **more: Any) -> EngineResources:
    """What an engine loop runs. No token ends a reply: it is as long as it is asked to be."""
    model = model_of(family)
    return uncached_resources(
        network=model.network,
        token_bytes=model.tokenizer.token_bytes,
        eos_token_ids=frozenset(),
        max_sequences=4,
        batches=True,
        vision=eyes(model),
        **more,
    )


def usage(watched: Watched) -> Usage:
    assert isinstance(watched.ending, Finished), watched.ending
    return watched.ending.usage


@cache
def picture(number: int, width: int = 96, height: int = 64) -> Image:
    """A picture of coloured noise, coarse enough that towers tell two of them apart."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (6, 8, 3), np.uint8)
    shown = Pillow.fromarray(coarse).resize((width, height), Pillow.Resampling.NEAREST)
    data = io.BytesIO()
    shown.save(data, "PNG")
    return Image(data.getvalue(), width, height)


def words(number: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(f" {rng.choice(WORDS)}" for _ in range(number))


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt for the engine, and as text for mlx_vlm's processor."""

    ids: tuple[int, ...]
    runs: tuple[ImageRun, ...]
    text: str
    images: tuple[Image, ...]

    def request(self, max_tokens: int = 8, **more: Any) -> EngineRequest:
        return engine_request(self.ids, max_tokens, images=self.runs, **more)

    def then(self, *tokens: int) -> SeenPrompt:
        """The prompt with text tokens behind it."""
        return replace(self, ids=(*self.ids, *tokens))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each image."""
        starts = [self.ids.index(run.tokens[0]) for run in self.runs]
        return [(start, start + len(run)) for start, run in zip(starts, self.runs, strict=True)]


def eyes(model: LoadedModel) -> Vision:
    assert model.vision, model.blind_reason
    return model.vision


def prompt(model: LoadedModel, *parts: Part) -> SeenPrompt:
    """Texts and pictures, as the model's template puts them together."""
    processor = eyes(model).processor
    begin, end = ("<|vision_start|>", "<|vision_end|>") if eyes(model).moves_positions else ("", "")
    ids, runs, text = list[int](), list[ImageRun](), ""
    for part in parts:
        if isinstance(part, str):
            ids += _encoded(model, part)
            text += part
            continue
        run = processor.expand(part)
        ids += [
            *_encoded(model, begin + processor.before),
            *run.tokens,
            *_encoded(model, processor.after + end),
        ]
        runs.append(run)
        text += begin + processor.placeholder + end
    images = tuple(part for part in parts if isinstance(part, Image))
    return SeenPrompt(tuple(ids), tuple(runs), text, images)


def _encoded(model: LoadedModel, text: str) -> list[int]:
    return model.tokenizer.encode(text, as_document=False) if text else []


def pictures(model: LoadedModel, count: int) -> list[Picture]:
    """Small ones, as they stand in prompts."""
    prompts = [prompt(model, picture(number)) for number in range(count)]
    return [Picture(seen.ids, seen.runs[0]) for seen in prompts]


# ---------------------------------------------------------------------------------------------------- mlx_vlm


@dataclass(frozen=True)
class GreedyReply:
    """Greedy tokens with their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


class Reference:
    """mlx_vlm, loaded apart from the server's model."""

    def __init__(self, folder: Path, model_type: str) -> None:
        from mlx_vlm.utils import load_model

        self.model: Any = load_model(folder)
        self._processor = (
            VISION_FAMILIES[model_type].processor().from_pretrained(str(folder), trust_remote_code=False)
        )

    def says(self, asked: SeenPrompt, length: int) -> GreedyReply:
        """Computed in one shot, and generated, by mlx_vlm alone."""
        from mlx_vlm.generate.ar import generate_step

        pictures = [Pillow.open(io.BytesIO(image.data)).convert("RGB") for image in asked.images]
        made = dict(self._processor(text=[asked.text], images=pictures, add_special_tokens=False))
        ids, pixels = mx.array(np.array(made.pop("input_ids"))), made.pop("pixel_values")
        assert tuple(cast("list[int]", ids[0].tolist())) == network_ids(asked)
        mask = mx.array(np.array(made.pop("attention_mask")))
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in made:
                made[name] = mx.array(np.array(made[name]))
        tokens, logprobs = list[int](), list[float]()
        self._forget()
        with mx.stream(generation_stream):
            for token, scores in generate_step(
                ids, self.model, pixels, mask, max_tokens=length, temperature=0.0, **made
            ):
                tokens.append(int(token))
                logprobs.append(cast("float", scores[tokens[-1]].item()))
        return GreedyReply(tokens, logprobs)

    def _forget(self) -> None:
        """mlx_vlm keeps positions of the last prompt in the model."""
        for name in ("_rope_deltas", "_position_ids"):
            if hasattr(self.model.language_model, name):
                setattr(self.model.language_model, name, None)


def network_ids(asked: SeenPrompt) -> tuple[int, ...]:
    ids = list(asked.ids)
    for (start, end), run in zip(asked.spans, asked.runs, strict=True):
        ids[start:end] = run.network_ids
    return tuple(ids)


@cache
def mlx_vlm_of(family: str) -> Reference:
    return Reference(folder_of(family), str(model_of(family).config["model_type"]))


def greedy_reply(watched: Watched) -> GreedyReply:
    """A reply to a request with `top_logprobs`."""
    scored = [
        entry.chosen.logprob for event in watched.seen if isinstance(event, Text) for entry in event.logprobs
    ]
    return GreedyReply(watched.tokens, scored)


def difference(ours: GreedyReply, theirs: GreedyReply) -> float:
    """The largest one of log-probabilities."""
    assert ours.tokens == theirs.tokens
    return max(abs(left - right) for left, right in zip(ours.logprobs, theirs.logprobs, strict=True))
