"""Turns a request into the exact tokens that the model reads."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial

from start_llm.core.canonical import (
    CanonicalMessage,
    Conversation,
    MessageRecord,
    OmittedText,
    Root,
    chain,
    exact_keys,
    reasoning_digest,
)
from start_llm.core.chat import (
    ChatRequest,
    GenerationRequest,
    Json,
    Message,
    TextRequest,
    Thinking,
)
from start_llm.core.errors import ContextOverflow, InvalidRequest
from start_llm.core.family import Family, ReasoningMarks
from start_llm.core.images import ImageRun, hide_images
from start_llm.core.prompt import Boundary, ModelTokens, Prompt
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.adapt import adapt
from start_llm.prompt.boundaries import RARE
from start_llm.prompt.canonical_form import (
    canonical,
    for_the_model,
    ignored,
    root_of,
    rules_of,
)
from start_llm.prompt.client_marks import ClientMarks
from start_llm.prompt.drift import is_transient
from start_llm.prompt.image_runs import ImageEncoder, ImageExpander
from start_llm.prompt.inline_reasoning import split_inline_reasoning, without_assumed_reasoning
from start_llm.prompt.pieces import Encoded, PieceEncoder
from start_llm.prompt.remembered import ConversationScan, RememberedConversations
from start_llm.prompt.render import RenderedText, Renderer
from start_llm.prompt.scan import MessageScan, ScanRules
from start_llm.prompt.shorten import with_short_contents
from start_llm.prompt.substitution import with_marks
from start_llm.prompt.template import PromptTokenizer
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.facts import BUDGET_OPTION, TemplateFacts
from start_llm.prompt.template_audit.tool_forms import ToolForms
from start_llm.prompt.template_audit.visible_reasoning import shown_reasoning

_AS_THE_TEMPLATE_DOES = PromptPolicy()
_LARGE = 2**18
"""Characters of messages from which on it is worth to ask whether they can fit at all."""
_ASKING = ("user", "tool")
_DATE = "the date"


type RefuseBeyondDoubt = Callable[[str, str], None]
"""Raises `ContextOverflow` if the length of a text proves that its prompt does not fit. The second argument
is the field that it comes from."""
type RestoreReasoning = Callable[[Conversation, Sequence[int]], Sequence[str | None]]


def _any_length(text: str, param: str) -> None:
    del text, param


class Preparer:
    """Makes prompts for one model. Safe to use from any thread.

    Args:
        vision: the model's image processor; None if it sees no images.
        restore_reasoning: returns the reasoning of the replies at some indices of a conversation, None if
            unknown.
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
        self._policy = policy
        self._rules = rules_of(policy.drift) if policy.with_rules else ()
        self._restore_reasoning = restore_reasoning
        self._now = now
        placeholder = vision.placeholder if vision else None
        self.facts = audit(tokenizer, family, placeholder) if tokenizer.has_chat_template else TemplateFacts()
        self._remembered = RememberedConversations(ScanRules(self.facts.call_ids, self._marks, self._rules))
        self._pieces = PieceEncoder(tokenizer)
        self._images = ImageEncoder(tokenizer, self._pieces, vision, self.facts.image_text)
        self._renderer = Renderer(tokenizer, self.facts)
        self._client_marks = ClientMarks.of(tokenizer, family)
        self._tools = ToolForms(tokenizer, self.facts)

    def prepare(
        self, request: GenerationRequest, refuse_beyond_doubt: RefuseBeyondDoubt = _any_length
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
        sent, after = self._parted(self._without_assumed_reasoning(request.messages))
        now = self._now()
        options = self._options(request)
        with _shallow("messages"):
            self._refuse_giants(request, options, now, refuse_beyond_doubt)
        with _shallow("tools"):
            root, late_tools = self._root(request, options, now), request.late_tools
            request = replace(
                request,
                tools=tuple(map(self._client_marks.hidden_object, self._tools.shown(request.tools))),
                late_tools=tuple(map(self._client_marks.hidden_object, request.late_tools)),
            )
        with _shallow("messages"):
            looked = self._remembered.look(sent, late_tools, root.key(request.tenant))
            request = replace(request, messages=tuple(look.native for look in looked.looks))
            transient = tuple(looked.calls.copy().in_native_form(after)) if after else ()
            asked = self._conversation(request, transient, root, looked, now)
            shown = self._for_the_model(looked.looks, asked)
            text, is_shown = self._written(replace(request, messages=shown), transient, options, now)
            refuse_beyond_doubt(self._without_words(text.whole, request), "messages")
        runs = self._images.runs(request.images)
        encoded = self._encoded(text.whole, [place.offset for place in text.places], runs)
        ends = [place.message for place in text.places]
        prompt = Prompt(
            tokens=_tokens(encoded.ids, "messages"),
            images=tuple(runs.values()),
            boundaries=tuple(map(Boundary, ends, encoded.cuts)),
            conversation=None
            if transient and self._has_moving(request)
            else asked.with_shown(self._digests(shown, is_shown)),
            has_transient=bool(transient),
            lasting_end=self._encoded(text.lasting_end, (), runs).ids if text.lasting_end else None,
            omitted_chars=sum(message.omitted_chars for message in asked.canonical),
            reasoning_is_open=self._opens_reasoning(text.tail or text.behind(len(shown) - 1)),
            thinking=self._thinks(request.thinking),
        )
        return _going_on(prompt, request.messages[-1]) if request.continues_reply else prompt

    def _written(
        self,
        request: ChatRequest,
        transient: tuple[Message, ...],
        options: Mapping[str, Json],
        now: datetime,
    ) -> tuple[RenderedText, list[bool]]:
        """Return the prompt's text, with words for the marks of clients, and which reasoning it shows."""
        request = replace(request, messages=self._hidden(request.messages))
        transient = self._hidden(transient)
        options = self._client_marks.hidden_object(options)
        text = self._render(request, transient, options, now)
        words = partial(self._words, request, transient, options, now)
        is_shown = shown_reasoning(request.messages, text, self._marks, words)
        return (_up_to_last(text, request.messages, words) if request.continues_reply else text), is_shown

    def _refuse_giants(
        self,
        request: ChatRequest,
        options: Mapping[str, Json],
        now: datetime,
        refuse_beyond_doubt: RefuseBeyondDoubt,
    ) -> None:
        """Refuse messages that cannot fit before anything else is done with them, such as comparing them.

        A template may leave out any part of them, so what counts is what it writes.
        """
        contents = [message.content for message in request.messages]
        if sum(map(len, contents)) < _LARGE:
            return
        try:
            refuse_beyond_doubt(self._without_words("".join(contents), request), "messages")
        except ContextOverflow:
            shown = self._as_policy_shows(request.messages)
            whole = self._renderer.whole(adapt(replace(request, messages=shown), self.facts), options, now)
            refuse_beyond_doubt(self._without_words(whole, request), "messages")

    def _parted(self, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Split off transient messages at the end, if a question or a result precedes them."""
        end = len(messages)
        while self._rules and end and is_transient(messages[end - 1]):
            end -= 1
        asks = end > 0 and messages[end - 1].role in _ASKING
        return (messages[:end], messages[end:]) if asks else (messages, ())

    def _render(
        self,
        request: ChatRequest,
        transient: tuple[Message, ...],
        options: Mapping[str, Json],
        now: datetime,
    ) -> RenderedText:
        lasting = adapt(request, self.facts)
        if not transient:
            return self._renderer.render(lasting, options, now)
        whole = adapt(replace(request, messages=(*request.messages, *transient)), self.facts)
        return self._renderer.render_with_transient(lasting, whole, options, now)

    def _words(
        self,
        request: ChatRequest,
        transient: tuple[Message, ...],
        options: Mapping[str, Json],
        now: datetime,
        messages: Sequence[Message],
    ) -> str:
        """Return the prompt's text with other messages."""
        request = replace(request, messages=tuple(messages))
        if transient:
            return self._render(request, transient, options, now).whole
        return self._renderer.whole(adapt(request, self.facts), options, now)

    def _options(self, request: ChatRequest) -> dict[str, Json]:
        """Return the template's options. The client's override the policy's `shown_reasoning`."""
        kept = self.facts.preserve if self._policy.shown_reasoning == "true" else {}
        return {**kept, **request.template_options, **self._thinking_options(request.thinking)}

    # ------------------------------------------------------------------------------------- what is compared

    def _root(self, request: ChatRequest, options: Mapping[str, Json], now: datetime) -> Root:
        dates = [] if self._tells_now else self._dates(now)
        question = self._last_question(request) if self._has_moving(request) else None
        return root_of(self.facts.options_in_front(options), request.tools, dates, question)

    @property
    def _tells_now(self) -> bool:
        return any(rule.says_now for rule in self._rules)

    def _dates(self, now: datetime) -> list[str]:
        """Return the dates that the template writes."""
        return [now.strftime(form) for form in self.facts.dates]

    def _without_assumed_reasoning(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Drop reasoning that equals the answer, for families whose replies may begin inside reasoning.

        It runs before messages are compared and rendered, so both start from the same messages.
        """
        return tuple(map(without_assumed_reasoning, messages)) if self._family.orphan_close else messages

    @property
    def _marks(self) -> ReasoningMarks | None:
        """Marks of reasoning in a reply's text; None: such text is compared as text."""
        return self._family.reasoning if self._policy.with_rules else None

    def _has_moving(self, request: ChatRequest) -> bool:
        """Return whether the next question changes the whole prompt: something moves to it."""
        has = {"tools": request.tools, "system": any(one.role == "system" for one in request.messages)}
        return any(has[name] for name in self.facts.moving)

    def _last_question(self, request: ChatRequest) -> int | None:
        """Return the index of the question that shows what moves, until the next question."""
        adapted = adapt(request, self.facts)
        asking = (
            last for seen, last in zip(adapted.messages, adapted.lasts, strict=True) if seen["role"] == "user"
        )
        return max(asking, default=None)

    def _conversation(
        self,
        request: ChatRequest,
        transient: tuple[Message, ...],
        root: Root,
        looked: ConversationScan,
        now: datetime,
    ) -> Conversation:
        """Return the conversation as the client sent it; what is shown of reasoning is filled in later.

        Args:
            transient: messages after those of the request.
        """
        compared, keys = [look.canonical for look in looked.looks], looked.keys
        apart = [look.apart for look in looked.looks]
        if self._policy.checks_keys and _is_much_left_out(compared, apart):
            compared = canonical(apart, request.late_tools, rules=rules_of("exact"))
            keys = chain(looked.root, compared)
        compared = self._dated(compared, now)
        exact = exact_keys(keys, compared, [look.echoed for look in looked.looks])
        roles = [message.role for message in request.messages]
        return Conversation(
            tenant=request.tenant,
            root=root,
            messages=tuple(
                MessageRecord(
                    role=role,
                    canonical=message,
                    key=key,
                    exact=name,
                    echoed=look.echoed,
                    ids=ids,
                    can_hold_note=role in _ASKING,
                    ignored=look.ignored,
                )
                for role, message, key, name, look, ids in zip(
                    roles, compared, keys, exact, looked.looks, looked.names, strict=True
                )
            ),
            name=request.conversation_id,
            session=request.session_id or keys[_first_question(roles)].digest.hex(),
            transient=tuple(one for some in ignored(transient) for one in some),
        )

    def _dated(self, messages: list[CanonicalMessage], now: datetime) -> list[CanonicalMessage]:
        """Add the dates that the template itself writes to the omitted texts of the first message."""
        dates = self._dates(now) if self._tells_now else []
        if not dates:
            return messages
        written = tuple(
            OmittedText(f"{_DATE} {number}", "live", number, date, f"{_DATE}: {date}", is_clock=True)
            for number, date in enumerate(dates)
        )
        first, *rest = messages
        return [replace(first, omitted=(*first.omitted, *written)), *rest]

    # ------------------------------------------------------------------------------------- what is rendered

    def _for_the_model(self, looks: Sequence[MessageScan], asked: Conversation) -> tuple[Message, ...]:
        """Return the messages to render: without what is no content, with restored reasoning."""
        messages = [look.native for look in looks]
        if self._policy.with_rules:
            messages = list(for_the_model(messages))
        messages = list(self._as_policy_shows(messages))
        if self._policy.shown_reasoning == "false":
            return tuple(messages)
        bare = [
            index
            for index, look in enumerate(looks)
            if look.native.role == "assistant" and not look.apart.reasoning
        ]
        for index, reasoning in zip(bare, self._restore_reasoning(asked, bare), strict=True):
            if reasoning != messages[index].reasoning:
                messages[index] = replace(messages[index], reasoning=reasoning)
        return tuple(messages)

    def _as_policy_shows(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        if self._policy.shortens_writes:
            messages = list(map(with_short_contents, messages))
        return tuple(
            map(_without_reasoning, messages) if self._policy.shown_reasoning == "false" else messages
        )

    def _hidden(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(map(self._client_marks.hidden_message, messages))

    def _without_words(self, text: str, request: ChatRequest) -> str:
        """Return a text in which less than a token stands for each image, and no word for a mark."""
        text = with_marks(text)
        return hide_images(text) if request.images else text

    def _encoded(self, text: str, cuts: Sequence[int], runs: Mapping[bytes, ImageRun]) -> Encoded:
        broken = self._client_marks.broken(text, cuts)
        return self._images.encode(broken.text, broken.cuts, runs, broken.breaks)

    def _digests(self, messages: Sequence[Message], is_shown: Sequence[bool]) -> list[bytes | None]:
        """Return the digest of each message's reasoning, None for one that is not shown."""
        apart = (split_inline_reasoning(message, self._marks) for message in messages)
        return [
            reasoning_digest(message.reasoning) if shown else None
            for message, shown in zip(apart, is_shown, strict=True)
        ]

    def _thinks(self, thinking: Thinking) -> bool:
        switch = self.facts.switch
        own = switch.thinks if switch else True
        said = (one for one in (thinking.on, self._policy.thinking) if one is not None)
        return next(said, own)

    def _thinking_options(self, thinking: Thinking) -> dict[str, Json]:
        """Return the template options for reasoning, its effort and its budget."""
        on, switch, effort = self._thinks(thinking), self.facts.switch, self.facts.effort
        switched = switch.options(on=on) if switch else {}
        if on and self.facts.tells_budget and thinking.budget is not None:
            switched[BUDGET_OPTION] = thinking.budget
        word = thinking.effort if on or switch else "minimal"
        if effort is None or word is None:
            return switched
        return {**effort.options(word), **switched} if not on else {**switched, **effort.options(word)}

    def _opens_reasoning(self, tail: str) -> bool:
        marks = self._family.reasoning
        return marks is not None and tail.rfind(marks.opening) > tail.rfind(marks.closing)

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


def _is_much_left_out(compared: Sequence[CanonicalMessage], messages: Sequence[Message]) -> bool:
    """Return whether the keys leave out more than a tenth of the text."""
    omitted_chars = sum(message.omitted_chars for message in compared)
    return 10 * omitted_chars > sum(len(message.content) for message in messages)


def _up_to_last(
    text: RenderedText, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> RenderedText:
    """Return the text up to the end of the last message's content. A mark behind it shows where that is.

    Raises:
        InvalidRequest: the template does not show it.
    """
    mark = chr(RARE.start)
    last = replace(messages[-1], content=messages[-1].content + mark)
    before, found, _ = render([*messages[:-1], last]).rpartition(mark)
    if not found or not text.whole.startswith(before):
        problem = "The template of this model does not show where the last message ends: no reply can go on."
        raise InvalidRequest(problem, param="messages")
    places = [place for place in text.places if place.message < len(messages) - 1]
    return RenderedText(before, "", places)


def _going_on(prompt: Prompt, reply: Message) -> Prompt:
    """Return a prompt whose last message is the beginning of the reply."""
    return replace(
        prompt,
        conversation=prompt.conversation and prompt.conversation.without_last(),
        reasoning_is_open=False,
        thinking=False,
        begun_reply=reply,
    )


def _first_question(roles: Sequence[str]) -> int:
    """Return the index of the first question, or of the last message if there is no question.

    The key of this prefix names the session of a conversation without a session id.
    """
    return roles.index("user") if "user" in roles else len(roles) - 1


def _without_reasoning(message: Message) -> Message:
    return replace(message, reasoning=None) if message.role == "assistant" else message


def _tokens(ids: tuple[int, ...], param: str) -> ModelTokens:
    if not ids:
        raise InvalidRequest(f"'{param}' holds no token for the model to read.", param=param)
    return ModelTokens(ids)
