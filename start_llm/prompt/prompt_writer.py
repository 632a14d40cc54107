"""Writes the text of a prompt with the chat template, and finds out which reasoning it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from start_llm.core.chat import ChatRequest, Json, Message
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import ReasoningMarks
from start_llm.prompt.adapt import adapt
from start_llm.prompt.boundaries import RARE
from start_llm.prompt.client_marks import ClientMarks
from start_llm.prompt.render import RenderedText, Renderer
from start_llm.prompt.template import PromptTokenizer
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.visible_reasoning import shown_reasoning


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What a prompt is written from.

    Attributes:
        transient: messages after those of the request, which the next request will not have.
        now: for templates that write dates.
    """

    request: ChatRequest
    transient: tuple[Message, ...]
    options: Mapping[str, Json]
    now: datetime

    def with_messages(self, messages: Sequence[Message]) -> PromptSource:
        return replace(self, request=replace(self.request, messages=tuple(messages)))


@dataclass(frozen=True, slots=True)
class WrittenPrompt:
    """The text of a prompt, with words in place of clients' marks and images.

    Attributes:
        shows_reasoning: for each message, whether the text shows its reasoning.
    """

    text: RenderedText
    shows_reasoning: list[bool]


class PromptWriter:
    """Writes prompts with one model's template.

    Args:
        marks: of reasoning in the text of a reply.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        facts: TemplateFacts,
        client_marks: ClientMarks,
        marks: ReasoningMarks | None,
    ) -> None:
        self._renderer = Renderer(tokenizer, facts)
        self._facts = facts
        self._client_marks = client_marks
        self._marks = marks

    def write(self, source: PromptSource) -> WrittenPrompt:
        """Write a prompt; up to the end of its last message's content if a reply goes on from there."""
        source = self._without_marks(source)
        text, messages = self._render(source), source.request.messages

        def rendered(others: Sequence[Message]) -> str:
            return self._whole(source.with_messages(others))

        shows_reasoning = shown_reasoning(messages, text, self._marks, rendered)
        if source.request.continues_reply:
            mark = chr(RARE.start)
            last = replace(messages[-1], content=messages[-1].content + mark)
            text = _up_to(mark, text, rendered([*messages[:-1], last]), len(messages) - 1)
        return WrittenPrompt(text, shows_reasoning)

    def whole(self, source: PromptSource) -> str:
        """Return the text of a prompt, clients' marks included."""
        return self._renderer.whole(adapt(source.request, self._facts), source.options, source.now)

    def _without_marks(self, source: PromptSource) -> PromptSource:
        """Put words in the place of the marks that clients quote."""
        hidden, request = self._client_marks.hidden_message, source.request
        return replace(
            source,
            request=replace(request, messages=tuple(map(hidden, request.messages))),
            transient=tuple(map(hidden, source.transient)),
            options=self._client_marks.hidden_object(source.options),
        )

    def _render(self, source: PromptSource) -> RenderedText:
        lasting = adapt(source.request, self._facts)
        if not source.transient:
            return self._renderer.render(lasting, source.options, source.now)
        messages = (*source.request.messages, *source.transient)
        whole = adapt(source.with_messages(messages).request, self._facts)
        return self._renderer.render_with_transient(lasting, whole, source.options, source.now)

    def _whole(self, source: PromptSource) -> str:
        return self._render(source).whole if source.transient else self.whole(source)


def _up_to(mark: str, text: RenderedText, marked: str, last: int) -> RenderedText:
    """Return the text up to where a mark stands in the same text with the mark.

    White space in front of the mark stays, though the template may trim a text that ends with it.

    Args:
        last: index of the message that the mark ends.

    Raises:
        InvalidRequest: the template does not show it.
    """
    before, separator, _ = marked.rpartition(mark)
    if not separator or not text.whole.startswith(before.rstrip()):
        problem = "The template of this model does not show where the last message ends: no reply can go on."
        raise InvalidRequest(problem, param="messages")
    return RenderedText(before, "", [place for place in text.places if place.message < last])
