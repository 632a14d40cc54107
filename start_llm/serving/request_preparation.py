"""Make of a parsed request everything that the engine and the output stream need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from start_llm.core.adapters import BASE_MODEL, AdapterChoice, AdapterStack, NoAdapters
from start_llm.core.chat import ChatRequest, GenerationRequest
from start_llm.core.engine_request import Guide, ReasoningLimit
from start_llm.core.errors import ContextOverflow, InvalidRequest, OverBudget
from start_llm.core.model_card import ModelCard
from start_llm.core.prompt import Prompt
from start_llm.output.splitter import PlainSplitter, Splitter
from start_llm.output.structured_output import StructuredOutput, StructuredOutputTokenizer, offered_names
from start_llm.output.tool_aliases import AliasChooser, ToolAliases
from start_llm.prompt.draft_texts import DraftTexts
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template import TemplateTokenizer


class RequestTokenizer(TemplateTokenizer, StructuredOutputTokenizer, Protocol):
    """The tokenizer interface that requests need."""

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it; 0 if nothing is known."""
        ...


_NO_ALIASES = ToolAliases()
_NO_ADAPTERS = NoAdapters()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request, its prompt, and how its reply is constrained and read.

    Attributes:
        original: The request as its client sent it, parsed.
        request: The same with the model's names for tools. Its tenant stands for the tenant under these
            adapters, too.
        prompt: Its exact tokens, before transcripts bind them to recorded ones.
        prompt_field: The field to name if the prompt is too long.
        messages: The number of messages; 0 for a text completion.
        splitter: Separates the reply into reasoning, answer and tool calls.
        compile_guide: Returns the guide that enforces the output constraint, None without one. Raises
            `InvalidRequest` if the constraint cannot be enforced.
        logit_bias: Bias by token id: the request's own, and the one against tool calls that are forbidden.
        reasoning_limit: None without a reasoning budget.
        max_calls: The most tool calls to report; None without a limit.
        trims_leading_space: The tokenizer puts a space before every text; the reply has none.
        adapters: The adapters under which it is computed.
        aliases: The model's names for tools; the request and its prompt have them.
        draft_texts: The tokens of texts that the reply may repeat, other than the prompt's.
    """

    original: GenerationRequest
    request: GenerationRequest
    prompt: Prompt
    prompt_field: str
    messages: int = 0
    splitter: Splitter
    compile_guide: Callable[[], Guide | None] = lambda: None
    logit_bias: Mapping[int, float]
    reasoning_limit: ReasoningLimit | None = None
    max_calls: int | None = None
    trims_leading_space: bool = False
    adapters: AdapterStack = BASE_MODEL
    aliases: ToolAliases = _NO_ALIASES
    draft_texts: tuple[Sequence[int], ...] = ()

    @property
    def session(self) -> str:
        """The name that requests of one session share: the client's, or one from the conversation."""
        conversation = self.prompt.conversation
        return (conversation.session if conversation else self.request.session_id) or ""


def demand_room(model: ModelCard, prompt_length: int, param: str, *, is_counted: bool = True) -> None:
    """Refuse a prompt of so many tokens if it leaves no room for a reply.

    Args:
        param: the field that it comes from.
        is_counted: False: it has at least so many.

    Raises:
        ContextOverflow: It is as long as the window.
        OverBudget: It is as long as what fits into memory.
    """
    if prompt_length >= model.own_window:
        raise ContextOverflow(
            prompt_tokens=prompt_length, window=model.own_window, param=param, is_counted=is_counted
        )
    if prompt_length >= model.memory_window:
        raise OverBudget(
            prompt_tokens=prompt_length,
            window=model.memory_window,
            budget_bytes=model.budget_bytes,
            param=param,
            is_counted=is_counted,
        )


class RequestPreparer:
    """Prepares requests for one model.

    Args:
        adapters: The adapters that requests can choose.
        draft_texts: None if replies are not drafted.
    """

    def __init__(
        self,
        preparer: Preparer,
        tokenizer: RequestTokenizer,
        model: ModelCard,
        adapters: AdapterChoice = _NO_ADAPTERS,
        draft_texts: DraftTexts | None = None,
    ) -> None:
        self._preparer = preparer
        self._tokenizer = tokenizer
        self.model = model
        self._adapters = adapters
        self._draft_texts = draft_texts
        self._structured_output = StructuredOutput(tokenizer, model.family, model.vocabulary)
        self._aliases = AliasChooser(model.family, tokenizer.chat_template)

    def prepare(self, request: GenerationRequest) -> PreparedRequest:
        """Render and tokenize the prompt, and choose how the reply is read.

        Raises:
            RequestError: The prompt cannot be made.
        """
        adapters = self._adapters.stack(request.options.adapter)
        aliases, renamed = self._with_aliases(request)
        prepared = self._prepare(request, replace(renamed, tenant=adapters.scope(request.tenant)))
        if adapters.digest and prepared.prompt.images:
            raise InvalidRequest(
                "'adapter' cannot be used with images: another network reads them, without the adapter.",
                param="adapter",
            )
        return replace(prepared, adapters=adapters, aliases=aliases)

    def _with_aliases(self, request: GenerationRequest) -> tuple[ToolAliases, GenerationRequest]:
        """Give names that the model can write to the tools that have others."""
        if not isinstance(request, ChatRequest):
            return _NO_ALIASES, request
        offered = offered_names(request)
        aliases = self._aliases.choose(offered)
        return aliases, aliases.in_prompt(request)

    def _prepare(self, original: GenerationRequest, request: GenerationRequest) -> PreparedRequest:
        prompt = self._preparer.prepare(request, self._refuse_beyond_doubt)
        if isinstance(request, ChatRequest):
            return self._chat(original, request, prompt)
        return PreparedRequest(
            original=original,
            request=request,
            prompt=prompt,
            prompt_field="prompt",
            splitter=PlainSplitter(),
            logit_bias=request.options.logit_bias,
        )

    def _refuse_beyond_doubt(self, text: str, param: str) -> None:
        """Refuse a text whose length proves that it does not fit, before it is encoded."""
        demand_room(self.model, self._tokenizer.fewest_tokens(text), param, is_counted=False)

    def _chat(self, original: GenerationRequest, request: ChatRequest, prompt: Prompt) -> PreparedRequest:
        if prompt.begun_reply and request.form.is_enforced:
            raise InvalidRequest(
                "A reply that goes on from the last of 'messages' cannot be held to a form or a tool call.",
                param="messages",
            )
        return PreparedRequest(
            original=original,
            request=request,
            prompt=prompt,
            prompt_field="messages",
            messages=len(request.messages),
            splitter=self._structured_output.splitter(request, prompt),
            compile_guide=partial(self._structured_output.guide, request, prompt),
            logit_bias={**request.options.logit_bias, **self._structured_output.bias(request)},
            reasoning_limit=self._reasoning_limit(request, prompt),
            max_calls=1 if request.form.one_call else None,
            trims_leading_space=self._tokenizer.trims_leading_space and not prompt.begun_reply,
            draft_texts=self._draft_texts.of(request.messages) if self._draft_texts else (),
        )

    def _reasoning_limit(self, request: ChatRequest, prompt: Prompt) -> ReasoningLimit | None:
        """Limit reasoning to the request's budget, in families that mark the end of their reasoning."""
        marks, budget = self.model.family.reasoning, request.thinking.budget
        if budget is None or marks is None:
            return None
        closing = self._structured_output.cut(request)
        return ReasoningLimit(
            max_reasoning_tokens=budget,
            starts_open=prompt.reasoning_is_open,
            opening=marks.mark,
            closing=marks.closing,
            closing_tokens=tuple(self._tokenizer.encode(closing, as_document=False)),
        )
