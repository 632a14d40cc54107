"""Requests, as every protocol says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.sampling import SamplingChoice

type Role = Literal["system", "user", "assistant", "tool"]
type KeptThoughts = Literal["true", "template", "false"]
"""Which thoughts stay in a conversation: all, those that the template shows, none."""
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
type Calls = Literal["none", "may", "must"]
"""Whether a reply has calls of tools."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant turn made. `arguments` is the parsed object."""

    id: str
    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, its text parts joined.

    `tool_references` name late tools of the request that this message makes known. `reply_name` is the one of
    the reply that the client says this is (`core.ids`).
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_references: tuple[str, ...] = ()
    name: str | None = None
    reply_name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """What a request says about thinking.

    Attributes:
        on: whether to think; None leaves it to the server.
        effort: minimal, low, medium, high or xhigh, for templates that take one.
        budget: most tokens of the thought; the engine then closes it.
    """

    on: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What a request says about the reply to make.

    Attributes:
        max_tokens: upper bound for the reply; None leaves it to the server.
        stop: strings that end the reply where they stand in its answer, and are not part of it.
        sampling, presence_penalty, frequency_penalty, logit_bias, seed: see `core.sampling.Sampling`.
        top_logprobs: None reports no log-probabilities; 0..20 alternatives beside the chosen token.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingChoice = field(default_factory=SamplingChoice)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonAnswer:
    """The answer is one JSON text.

    Attributes:
        schema: that it follows.
        field: of the request that has the schema.
    """

    schema: Mapping[str, Json]
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """What a reply may be, behind its thought.

    Attributes:
        answer: None for an answer in any words.
        calls: whether tools may be called, or have to be; then there is no answer beside the calls.
        tools: names of the tools that may be called; None for every offered one.
        one_call: no more than one.
    """

    answer: JsonAnswer | None = None
    calls: Calls = "may"
    tools: frozenset[str] | None = None
    one_call: bool = False

    @property
    def is_enforced(self) -> bool:
        """Whether the model is held to it token by token."""
        return self.answer is not None or self.calls == "must"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a session comes from, as the client says. Nothing depends on it.

    Attributes:
        parent: the session that it was begun from.
        branch: the branch of a session that it is.
    """

    parent: str | None = None
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """The call that a request came in, for those who look it up later.

    Attributes:
        id: that the client is told.
        endpoint: the first of its paths.
        model: that is loaded.
    """

    id: str
    endpoint: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to continue.

    Attributes:
        tools: function schemas as the client sent them, for the chat template.
        late_tools: tools that are shown where a message refers to them (`Message.tool_references`).
        form: what the reply may be; nothing of it stands in the prompt.
        template_options: extra variables for the chat template (`chat_template_kwargs`).
        session_id: what its client says that requests have in common: a hint, for statistics and fairness.
        conversation_id: its name of this one conversation, which may then have said other things before.
        tenant: whose request it is; tenants share nothing that was computed.
        is_background: nobody waits in front of a screen for it, as far as its client says.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Json], ...] = ()
    late_tools: tuple[Mapping[str, Json], ...] = ()
    form: OutputForm = field(default_factory=OutputForm)
    thinking: Thinking = field(default_factory=Thinking)
    template_options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    options: GenerationOptions = field(default_factory=GenerationOptions)
    session_id: str | None = None
    conversation_id: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    tenant: bytes = b""
    is_background: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text, or its token ids, to continue without any template."""

    prompt: str | tuple[int, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    session_id: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    tenant: bytes = b""
    is_background: bool = False


type GenerationRequest = ChatRequest | TextRequest
