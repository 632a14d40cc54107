"""Requests with images that an engine answers, alone or as rank 0 of several: the same, in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from start_llm.core.events import Restored, Text
from start_llm.core.sampling import Sampling
from start_llm.engine.resources import EngineResources
from start_llm.models.loader import LoadedModel
from tests.engine.harness import Stepper, Watched, engine_request
from tests.ties import Reference
from tests.vision.seeing import SeenPrompt, picture, prompt, words

LENGTH = 5
"""Tokens of a reply."""
PIECE = 13
"""Tokens of a chunk, which is much shorter than an image."""
KEPT_IMAGES = 2
"""Images that are kept as the tower has seen them."""


@dataclass(frozen=True)
class Scored:
    """A greedy reply, with the distances of the two highest logits."""

    ids: list[int]
    gaps: list[float]
    restored: int
    tower_runs: int

    @property
    def reference(self) -> Reference:
        return Reference(tuple(self.ids), tuple(self.gaps))


@dataclass(frozen=True)
class Seen:
    """What an engine has answered.

    Attributes:
        greedy: the turns of conversations about pictures, with the runs of the tower up to then.
        seeded: replies about different pictures that were decoded together.
        counts: tokens that were computed and reused, and restores that ended in front of an image.
    """

    greedy: list[Scored]
    seeded: list[list[int]]
    counts: tuple[int, int, int]


def image_bytes_for(model: LoadedModel) -> int:
    """Room for a few pictures: the last one that is seen takes the place of the first."""
    config: Any = model.config
    numbers = int(config.get("hidden_size") or config["text_config"]["hidden_size"])
    deepest = 1 + len(config["vision_config"].get("deepstack_visual_indexes") or ())
    tokens = 20  # of a picture of 160 by 128 pixels, at least
    return KEPT_IMAGES * tokens * numbers * 4 * deepest * 5 // 4


def play(model: LoadedModel, resources: EngineResources) -> Seen:
    """Turns with a picture, without a new one, with a second one; one given up; known and forgotten ones."""
    engine = _Talk(model, resources)
    beginning = (words(9, 1), picture(1, 160, 128), words(3, 2))
    first = engine.ask(prompt(model, *beginning))
    engine.ask(first.then(*engine.last, 5, 6, 7))
    second = prompt(model, *beginning, picture(2, 160, 128), words(3, 3))
    engine.give_up(second)
    engine.ask(second)
    engine.ask(prompt(model, words(3, 4), picture(2, 160, 128), words(3, 5)))
    seeded = engine.ask_together(
        prompt(model, words(3, 7), picture(3, 160, 128), words(3, 8)),
        SeenPrompt((5, 6, 7) * 10, (), "", ()),
    )
    engine.ask(prompt(model, words(3, 6), picture(1, 160, 128), words(3, 5)))
    metrics = resources.cache._metrics
    counts = (metrics.computed_tokens, metrics.reused_tokens, metrics.cut_images)
    return Seen(engine.heard, seeded, counts)


def ask_once(model: LoadedModel, resources: EngineResources) -> None:
    """About one picture."""
    _Talk(model, resources).ask(prompt(model, words(3, 1), picture(1, 160, 128), words(3, 2)))


class _Talk:
    """Asks an engine, and keeps what it hears."""

    def __init__(self, model: LoadedModel, resources: EngineResources) -> None:
        self._model = model
        self._engine = Stepper(resources, clock=resources.clock, longest_chunk=PIECE)
        self.heard: list[Scored] = []

    @property
    def last(self) -> list[int]:
        return self.heard[-1].ids

    def ask(self, seen: SeenPrompt) -> SeenPrompt:
        """Greedily."""
        watched = self._submit(seen, top_logprobs=2)
        self._engine.finish(watched)
        ran = self._engine.metrics.tower_runs
        self.heard.append(Scored(watched.tokens, _gaps(watched), _restored(watched), ran))
        return seen

    def give_up(self, seen: SeenPrompt) -> None:
        """In the middle of its last image."""
        watched = self._submit(seen)
        start, _ = seen.spans[-1]
        self._engine.step_until(
            lambda: self._engine.metrics.prefill and self._engine.metrics.prefill[0] > start
        )
        watched.generation.cancel()
        self._engine.step(2)

    def ask_together(self, *prompts: SeenPrompt) -> list[list[int]]:
        """Each with a seed of its own."""
        replies = [
            self._submit(seen, Sampling(temperature=1.0, seed=place)) for place, seen in enumerate(prompts)
        ]
        self._engine.finish(*replies)
        return [reply.tokens for reply in replies]

    def _submit(self, seen: SeenPrompt, sampling: Sampling | None = None, **more: Any) -> Watched:
        asked = engine_request(
            seen.ids,
            LENGTH,
            sampling or Sampling(temperature=0),
            images=seen.runs,
            boundaries=(len(seen.ids),),
            **more,
        )
        return self._engine.submit(asked)


def _gaps(watched: Watched) -> list[float]:
    scored = [token for event in watched.seen if isinstance(event, Text) for token in event.logprobs]
    return [token.top[0].logprob - token.top[1].logprob for token in scored]


def _restored(watched: Watched) -> int:
    return next(event.tokens for event in watched.seen if isinstance(event, Restored))
