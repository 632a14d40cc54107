"""Renders a conversation to text and finds where its messages end."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from start_llm.core.chat import Json
from start_llm.prompt.adapt import Adapted
from start_llm.prompt.boundaries import MessageEnd, Rendered, TurnClosers
from start_llm.prompt.growing import MessageEndFinder
from start_llm.prompt.template import Rendering, TemplateTokenizer
from start_llm.prompt.template_audit.facts import TemplateFacts

_MAX_TAILS = 64


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A rendered conversation.

    Attributes:
        whole: the text with the generation prompt.
        tail: the generation prompt.
        places: ends in `whole` of the messages that the next request will have too.
        lasting_end: text that would follow the last of these ends without the transient messages; None if
            there are none or if it is not known.
    """

    whole: str
    tail: str
    places: Sequence[MessageEnd]
    lasting_end: str | None = None

    def end_of(self, message: int) -> int | None:
        """Return the end of a message, or None if it is not known."""
        return next((place.offset for place in self.places if place.message == message), None)

    def behind(self, message: int) -> str:
        """Return the text after the end of a message; empty if that end is not known.

        A template may write what begins a reply at the end of a result, and add no generation prompt.
        """
        end = self.end_of(message)
        return "" if end is None else self.whole[end:]


class Renderer:
    """Renders for one template. Safe to use from any thread."""

    def __init__(self, tokenizer: TemplateTokenizer, facts: TemplateFacts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._places = MessageEndFinder(TurnClosers.of(tokenizer.added_tokens, facts.closers))
        self._tails: dict[str, str] = {}

    def render(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> RenderedText:
        """Render a prompt and find its generation prompt and the ends of its messages.

        Args:
            now: the same time for all renderings of a request.
        """
        rendering = self._rendering(adapted, options, now)
        whole = rendering.text(adapted.messages, add_generation_prompt=True)
        tail = self._tail(adapted, options, whole, rendering)
        if not self._facts.can_be_cut:
            return RenderedText(whole, tail, [])
        places = self._places.locate(
            Rendered(adapted.messages, adapted.lasts, whole, len(whole) - len(tail)),
            lambda messages: rendering.text(messages, add_generation_prompt=True),
        )
        return RenderedText(whole, tail, places)

    def _rendering(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> Rendering:
        return Rendering(
            self._tokenizer,
            adapted.tools,
            options,
            now.strftime,
            self._facts.stand_ins,
            lists_no_tools=self._facts.lists_no_tools,
        )

    def whole(self, adapted: Adapted, options: Mapping[str, Json], now: datetime) -> str:
        """Return the prompt's text alone."""
        rendering = self._rendering(adapted, options, now)
        return rendering.text(adapted.messages, add_generation_prompt=True)

    def render_with_transient(
        self, lasting: Adapted, whole: Adapted, options: Mapping[str, Json], now: datetime
    ) -> RenderedText:
        """Render the lasting messages as if nothing followed them, and append the transient messages.

        So a transient message at the end does not count as the last question, which decides what templates
        show of earlier messages.

        Args:
            whole: the lasting messages and the transient ones.
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
        """Return the generation prompt.

        One that is known for conversations with such an ending is used if the text ends with it.
        """
        last = adapted.messages[-1] if adapted.messages else {}
        ending = json.dumps([options, bool(adapted.tools), sorted(last), last.get("role")], sort_keys=True)
        known = self._tails.get(ending)
        if known and whole.endswith(known):
            return known
        tail = _difference(whole, rendering.text(adapted.messages, add_generation_prompt=False))
        if len(self._tails) >= _MAX_TAILS:
            self._tails.clear()
        self._tails[ending] = tail
        return tail


def _is_inserted(text: str, place: int, longer: str) -> bool:
    """Return whether the longer text has an insertion at one place, as where templates merge turns."""
    is_longer = len(longer) > len(text)
    return is_longer and longer.startswith(text[:place]) and longer.endswith(text[place:])


def _difference(text: str, other: str) -> str:
    """Return the rest of `text` after the part that it shares with `other`."""
    same = bisect_left(range(1, len(other) + 1), True, key=lambda end: text[:end] != other[:end])
    return text[same:]
