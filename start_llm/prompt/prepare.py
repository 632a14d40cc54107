"""Turns a request into the exact tokens that the model reads."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime

from start_llm.core.canonical import reasoning_digest
from start_llm.core.chat import ChatRequest, GenerationRequest, KeptPlace, Message, TextRequest
from start_llm.core.common_beginning import common_length
from start_llm.core.errors import ContextOverflow, InvalidRequest
from start_llm.core.family import Family
from start_llm.core.images import ImageRun, hide_images
from start_llm.core.prompt import Boundary, KeptPrefix, ModelTokens, Prompt
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.client_marks import ClientMarks
from start_llm.prompt.conversation_reader import ConversationReader, RestoreReasoning
from start_llm.prompt.image_runs import ImageEncoder, ImageExpander
from start_llm.prompt.inline_reasoning import split_inline_reasoning
from start_llm.prompt.kept_places import (
    beginning_of,
    is_at_end,
    marked_places,
    offset_in_text,
    places_in_order,
)
from start_llm.prompt.pieces import Encoded, PieceEncoder
from start_llm.prompt.prompt_writer import PromptSource, PromptWriter, WrittenPrompt
from start_llm.prompt.render import RenderedText
from start_llm.prompt.substitution import with_marks
from start_llm.prompt.template import PromptTokenizer
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.facts import TemplateFacts
from start_llm.prompt.template_audit.tool_forms import ToolForms
from start_llm.prompt.template_options import TemplateOptions

_AS_THE_TEMPLATE_DOES = PromptPolicy()
_LARGE = 2**18
"""Characters of messages from which on it is worth to ask whether they can fit at all."""

type RefuseBeyondDoubt = Callable[[str, str], None]
"""Raises `ContextOverflow` if the length of a text proves that its prompt does not fit. The second argument
is the field that it comes from."""


class Preparer:
    """Makes prompts for one model. Safe to use from any thread.

    Args:
        vision: the model's image processor; None if it sees no images.
        restore_reasoning: see `prompt.conversation_reader`.
        now: clock for templates that write dates.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        family: Family,
        *,
        vision: ImageExpander | None = None,
        policy: PromptPolicy = _AS_THE_TEMPLATE_DOES,
        restore_reasoning: RestoreReasoning = lambda _, replies: [None] * len(replies),
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._now = now
        placeholder = vision.placeholder if vision else None
        self.facts = audit(tokenizer, family, placeholder) if tokenizer.has_chat_template else TemplateFacts()
        self._options = TemplateOptions(self.facts, policy)
        self._reader = ConversationReader(family, self.facts, policy, restore_reasoning)
        self._client_marks = ClientMarks.of(tokenizer, family)
        self._writer = PromptWriter(tokenizer, self.facts, self._client_marks, self._reader.marks)
        self._pieces = PieceEncoder(tokenizer)
        self._images = ImageEncoder(tokenizer, self._pieces, vision, self.facts.image_text)
        self._tools = ToolForms(tokenizer, self.facts)

    def prepare(
        self, request: GenerationRequest, refuse_beyond_doubt: RefuseBeyondDoubt = lambda _text, _param: None
    ) -> Prompt:
        """Render and tokenise a request.

        Raises:
            InvalidRequest: the template refuses the messages, the prompt has no tokens, or is refused.
            ClientGone: the client has left.
        """
        if isinstance(request, TextRequest):
            if isinstance(request.prompt, str):
                refuse_beyond_doubt(request.prompt, "prompt")
            return Prompt(tokens=_tokens(self._text_ids(request), "prompt"))
        return self._chat(request, refuse_beyond_doubt)

    def _chat(self, request: ChatRequest, refuse_beyond_doubt: RefuseBeyondDoubt) -> Prompt:
        if not self._tokenizer.has_chat_template:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="messages")
        options, now = self._options.of(request), self._now()
        with _shallow("messages"):
            self._refuse_giants(PromptSource(request, (), options, now), refuse_beyond_doubt)
        with _shallow("tools"):
            root = self._reader.root(request, options, now)
            shown_tools = tuple(map(self._client_marks.hidden_object, self._tools.shown(request.tools)))
            late_tools = tuple(map(self._client_marks.hidden_object, request.late_tools))
        with _shallow("messages"):
            read = self._reader.read(request, root)
            asked = self._reader.conversation(request, read, now)
            shown = self._reader.shown_messages(read, asked)
            native = replace(request, tools=shown_tools, late_tools=late_tools, messages=read.messages)
            source = PromptSource(native, read.transient, options, now).with_messages(shown)
            written = self._writer.write(source)
            refuse_beyond_doubt(self._without_words(written.text.whole, native), "messages")
        is_bound = not (read.transient and self._reader.has_moving(native))
        opens_reasoning = self._opens_reasoning(written.text.tail or written.text.behind(len(shown) - 1))
        prompt = self._tokenised(native, written)
        prompt = replace(
            prompt,
            kept=self._kept_prefixes(request, native, shown, written.text, prompt),
            conversation=asked.with_shown(self._digests(shown, written)) if is_bound else None,
            has_transient=bool(read.transient),
            omitted_chars=sum(message.omitted_chars for message in asked.canonical),
            reasoning_is_open=opens_reasoning is True,
            thinking=self._options.thinks(request.thinking) and opens_reasoning is not False,
        )
        if not request.continues_reply:
            return prompt
        begun = replace(native.messages[-1], reasoning=shown[-1].reasoning)
        begun = split_inline_reasoning(begun, self._reader.marks)
        return _going_on(prompt, begun if written.shows_reasoning[-1] else replace(begun, reasoning=None))

    def _refuse_giants(self, source: PromptSource, refuse_beyond_doubt: RefuseBeyondDoubt) -> None:
        """Refuse messages that cannot fit before anything else is done with them, such as comparing them.

        A template may leave out any part of them, so what counts is what it writes.
        """
        request = source.request
        contents = [message.content for message in request.messages]
        if sum(map(len, contents)) < _LARGE:
            return
        try:
            refuse_beyond_doubt(self._without_words("".join(contents), request), "messages")
        except ContextOverflow:
            native = in_native_form(self._reader.as_policy_shows(request.messages), self.facts.call_ids)
            request = replace(request, tools=self._tools.shown(request.tools), messages=native)
            whole = self._writer.whole(replace(source, request=request))
            refuse_beyond_doubt(self._without_words(whole, request), "messages")

    def _tokenised(self, request: ChatRequest, written: WrittenPrompt) -> Prompt:
        """Return the tokens of a text, its images, and where its messages end."""
        text, runs = written.text, self._images.runs(request.images)
        encoded = self._encoded(text.whole, [place.offset for place in text.places], runs)
        ends = [place.message for place in text.places]
        return Prompt(
            tokens=_tokens(encoded.ids, "messages"),
            images=tuple(runs.values()),
            boundaries=tuple(map(Boundary, ends, encoded.cuts)),
            lasting_end=self._encoded(text.lasting_end, (), runs).ids if text.lasting_end else None,
        )

    def _kept_prefixes(
        self,
        request: ChatRequest,
        native: ChatRequest,
        shown: Sequence[Message],
        text: RenderedText,
        prompt: Prompt,
    ) -> tuple[KeptPrefix, ...]:
        """Return the beginnings of a prompt that its client asks to keep.

        Args:
            native: the request with its messages in the template's order.
            shown: these messages as the template got them.
            prompt: what the text gives.
        """
        ends = {boundary.message: boundary.tokens for boundary in prompt.boundaries}
        runs = self._images.runs(request.images)

        def tokens_before(message: int, place: KeptPlace) -> int:
            asked = request.messages[message]
            *before, own = places_in_order(request.messages, native.messages, message)
            if is_at_end(place, asked):
                return ends.get(max([own, *before]), 0)
            if own not in ends:
                return 0
            content = shown[own].content
            written = text.whole[: text.end_of(own) or 0]
            beginning = beginning_of(place, asked.content, content)
            hidden = self._client_marks.hidden
            offset = beginning and offset_in_text(hidden(beginning), hidden(content), written)
            return self._tokens_alike(text, offset, runs, prompt.tokens.ids) if offset else 0

        marked = marked_places(request.messages)
        return tuple(KeptPrefix(tokens_before(message, place), place.seconds) for message, place in marked)

    def _tokens_alike(
        self, text: RenderedText, offset: int, runs: Mapping[bytes, ImageRun], ids: tuple[int, ...]
    ) -> int:
        """Return how many of a text's tokens do not depend on what follows its first `offset` characters."""
        cuts = [place.offset for place in text.places if place.offset <= offset]
        alone = self._encoded(text.whole[:offset], cuts, runs).ids
        return common_length(alone, ids)

    def _encoded(self, text: str, cuts: Sequence[int], runs: Mapping[bytes, ImageRun]) -> Encoded:
        broken = self._client_marks.broken(text, cuts)
        return self._images.encode(broken.text, broken.cuts, runs, broken.breaks)

    def _without_words(self, text: str, request: ChatRequest) -> str:
        """Return a text in which less than a token stands for each image, and no word for a mark."""
        text = with_marks(text)
        return hide_images(text) if request.images else text

    def _digests(self, messages: Sequence[Message], written: WrittenPrompt) -> list[bytes | None]:
        """Return the digest of each message's reasoning, None for one that is not shown."""
        apart = (split_inline_reasoning(message, self._reader.marks) for message in messages)
        return [
            reasoning_digest(message.reasoning) if shown else None
            for message, shown in zip(apart, written.shows_reasoning, strict=True)
        ]

    def _opens_reasoning(self, tail: str) -> bool | None:
        """Return whether a generation prompt opens reasoning (True) or closes it; None if it does neither."""
        marks = self._family.reasoning
        opened, closed = (tail.rfind(marks.opening), tail.rfind(marks.closing)) if marks else (0, 0)
        return None if opened == closed else opened > closed

    def _text_ids(self, request: TextRequest) -> tuple[int, ...]:
        if isinstance(request.prompt, str):
            return tuple(self._tokenizer.encode(request.prompt, as_document=True))
        return request.prompt


@contextmanager
def _shallow(param: str) -> Generator[None]:
    """Raise InvalidRequest if a value is nested deeper than Python's recursion limit allows."""
    try:
        yield
    except RecursionError as error:
        raise InvalidRequest(f"'{param}' are nested too deeply.", param=param) from error


def _going_on(prompt: Prompt, reply: Message) -> Prompt:
    """Return a prompt whose last message is the beginning of the reply."""
    return replace(
        prompt,
        conversation=prompt.conversation and prompt.conversation.without_last(),
        reasoning_is_open=False,
        thinking=False,
        begun_reply=reply,
    )


def _tokens(ids: tuple[int, ...], param: str) -> ModelTokens:
    if not ids:
        raise InvalidRequest(f"'{param}' holds no token for the model to read.", param=param)
    return ModelTokens(ids)
