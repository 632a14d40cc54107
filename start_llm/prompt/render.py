"""A conversation as text, and where its messages end in it."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from start_llm.core.chat import Json
from start_llm.prompt.adapt import Adapted
from start_llm.prompt.boundaries import Closers, Place, Rendered
from start_llm.prompt.facts import TemplateFacts
from start_llm.prompt.growing import PlaceFinder
from start_llm.prompt.template import Rendering, TemplateTokenizer

_MOST_TAILS = 64


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A rendered conversation.

    Attributes:
        whole: with the tail that makes the model answer.
        tail: what the tail adds.
        places: ends of messages that the next request will have too, in `whole`.
        lasting_end: what would stand behind the last place without the messages that the next request will
            not have; None if there are none, or if it cannot be told.
    """

    whole: str
    tail: str
    places: Sequence[Place]
    lasting_end: str | None = None

    def end_of(self, message: int) -> int | None:
        """Where a message ends, if that is known."""
        return next((place.offset for place in self.places if place.message == message), None)


class Renderer:
    """Renders for one template. Safe to use from any thread."""

    def __init__(self, tokenizer: TemplateTokenizer, facts: TemplateFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._places = PlaceFinder(Closers.of(tokenizer.added_tokens, facts.closers))
        self._tails: dict[str, str] = {}

    def render(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> RenderedText:
        """The prompt, where its tail begins, and a rendering that shows where messages end.

        Args:
            now: one moment for all renderings of a request.
        """
        rendering = self._rendering(adapted, options, now)
        whole = rendering.text(adapted.messages, with_tail=True)
        tail = self._tail(adapted, options, whole, rendering)
        if not self._facts.can_be_cut:
            return RenderedText(whole, tail, [])
        places = self._places.locate(
            Rendered(adapted.messages, adapted.lasts, whole, len(whole) - len(tail)),
            lambda messages: rendering.text(messages, with_tail=True),
        )
        return RenderedText(whole, tail, places)

    def _rendering(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> Rendering:
        return Rendering(self._tokenizer, adapted.tools, options, now.strftime, self._facts.stand_ins)

    def whole(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> str:
        """The prompt alone."""
        rendering = self._rendering(adapted, options, now)
        return rendering.text(adapted.messages, with_tail=True)

    def render_with_transient(
        self, lasting: Adapted, whole: Adapted, options: Mapping[str, Json], now: datetime
    ) -> RenderedText:
        """The lasting messages as if nothing came behind them, and behind them what does.

        So no message at the end that is gone in the next request is taken for the last question, which
        decides what templates show of the messages before it.

        Args:
            whole: the lasting messages, and those behind them.
        """
        kept, full = self.render(lasting, options, now), self.render(whole, options, now)
        last = max(lasting.lasts)
        end, there = kept.end_of(last), full.end_of(last)
        if end is not None and there is None and _is_inserted(kept.whole, end, full.whole):
            there = end
        if end is not None and there is not None:
            text = kept.whole[:end] + full.whole[there:]
            return RenderedText(text, full.tail, kept.places, lasting_end=kept.whole[end:])
        places = [place for place in full.places if place.message <= last]
        end = kept.end_of(places[-1].message) if places else 0
        return RenderedText(full.whole, full.tail, places, None if end is None else kept.whole[end:])

    def _tail(self, adapted: Adapted, options: Mapping[str, Json], whole: str, rendering: Rendering) -> str:
        """What makes the model answer: what did so behind a conversation that ended alike, if it is there."""
        last = adapted.messages[-1] if adapted.messages else {}
        ending = json.dumps([options, bool(adapted.tools), sorted(last), last.get("role")], sort_keys=True)
        known = self._tails.get(ending)
        if known and whole.endswith(known):
            return known
        tail = _difference(whole, rendering.text(adapted.messages, with_tail=False))
        if len(self._tails) >= _MOST_TAILS:
            self._tails.clear()
        self._tails[ending] = tail
        return tail


def _is_inserted(text: str, place: int, longer: str) -> bool:
    """The longer text is this one with more at one place: in its last turn, where a template merges."""
    is_longer = len(longer) > len(text)
    return is_longer and longer.startswith(text[:place]) and longer.endswith(text[place:])


def _difference(text: str, other: str) -> str:
    """What follows in `text` once it is no longer the same as `other`."""
    same = bisect_left(range(1, len(other) + 1), True, key=lambda end: text[:end] != other[:end])
    return text[same:]
