"""Requests, independent of the protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from start_llm.core.images import Image
from start_llm.core.sampling import SamplingChoice

type Role = Literal["system", "user", "assistant", "tool"]
type KeptReasoning = Literal["true", "template", "false"]
"""Reasoning that stays in a conversation: all of it, what the template shows, or none."""
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
PROGRAM_HEADER = "x-start-llm-program"
"""Names the program that sends a request, in front of its User-Agent: some can only send their SDK's."""
CUSTOM_ARGUMENT = "input"
"""The one argument of a custom tool, as the model knows it: its text."""
type Calls = Literal["none", "may", "must"]
"""Tool calls in a reply: forbidden, allowed or required."""


type ToolSchemas = tuple[Mapping[str, Json], ...]
"""Tools as functions, in the form of chat templates."""


def tool_name(tool: Mapping[str, Json]) -> str:
    """Return the name in a tool's schema; empty if it has none."""
    function = tool.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


def tool_names(tools: ToolSchemas) -> frozenset[str]:
    return frozenset(map(tool_name, tools))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant message. `arguments` is the parsed object."""

    id: str
    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextGrammar:
    """A grammar that the text of a custom tool has to follow.

    Attributes:
        tool: the model's name for the tool.
        field: the request field that has the grammar.
    """

    tool: str
    syntax: Literal["lark", "regex"]
    definition: str
    field: str


class KeptPlace(NamedTuple):
    """A place in a message up to which the client asks to keep the prompt.

    Attributes:
        characters: of the message's content that are in front of it; -1: all of the message is.
        seconds: for which to keep it at least.
    """

    characters: int
    seconds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message of a conversation, its text parts joined. An image in `content` is its word (`Image.word`).

    `tool_references` names the late tools of the request that this message introduces. `reply_name` is the
    random name of the reply that the client says this message is (`core.ids`). `kept` are in the order of the
    content.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tool_references: tuple[str, ...] = ()
    name: str | None = None
    reply_name: str = field(default="", compare=False)
    kept: tuple[KeptPlace, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """A request's options for reasoning.

    Attributes:
        on: whether to reason; None leaves it to the server.
        effort: minimal, low, medium, high or xhigh, for templates that take one.
        budget: most tokens of reasoning; the engine then closes it.
    """

    on: bool | None = None
    effort: str | None = None
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """A request's options for the reply.

    Attributes:
        max_tokens: upper bound for the reply; None leaves it to the server, and 0 asks for none.
        stop: strings that end the reply if they occur in its answer. They are not part of the reply.
        sampling, presence_penalty, frequency_penalty, logit_bias, seed: see `core.sampling.Sampling`.
        top_logprobs: None reports no log-probabilities; 0..20 alternatives beside the chosen token.
        adapter: the names of adapters, as in `core.adapters.adapter_names`.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingChoice = field(default_factory=SamplingChoice)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    top_logprobs: int | None = None
    adapter: str = ""

    @property
    def is_prewarm(self) -> bool:
        """True if the prompt is only to be read into the cache, and nothing is to be generated."""
        return self.max_tokens == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonAnswer:
    """The answer is one JSON text.

    Attributes:
        field: the request field that has the schema.
        is_strict: a keyword that cannot be enforced is refused; else it is left out.
    """

    schema: Mapping[str, Json]
    field: str
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputConstraint:
    """The constraint on a reply after its reasoning.

    Attributes:
        answer: None for free text.
        calls: whether tools may or must be called; if they must, the reply is calls only.
        tools: names of the tools that may be called; None for all that are offered.
    """

    answer: JsonAnswer | None = None
    calls: Calls = "may"
    tools: frozenset[str] | None = None
    one_call: bool = False

    @property
    def is_enforced(self) -> bool:
        """True if a grammar constrains the model's tokens."""
        return self.answer is not None or self.calls == "must"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of a session, as the client states it. Nothing depends on it.

    Attributes:
        parent: the session that it was started from.
    """

    parent: str | None = None
    branch: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The API call that a request came in, for later look-ups.

    Attributes:
        id: reported to the client.
        endpoint: the first of its paths.
        model: the loaded one.
        client: the program that sent it; empty if it does not say.
        mended: paths of messages in which something was mended, because clients cannot take them back.
        unknown_model: the name that was asked for, if no model has it.
        key: a digest of the API key that it came with; empty for none. Requests of several keys may be one
            tenant's.
    """

    id: str
    endpoint: str
    model: str
    client: str = ""
    mended: tuple[str, ...] = ()
    unknown_model: str = ""
    key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to continue.

    Attributes:
        images: the images whose words are in the messages, by their digests.
        tools: function schemas as the client sent them, for the chat template.
        grammars: what the text of custom tools has to follow. It holds where a call is demanded.
        late_tools: tools that are shown where a message refers to them (`Message.tool_references`).
        form: constraint on the reply; the prompt contains nothing of it.
        template_options: extra variables for the chat template (`chat_template_kwargs`).
        session_id: the client's name for what requests have in common: a hint, for statistics and fairness.
        conversation_id: the client's name for this one conversation, whose earlier messages may have had
            other text.
        tenant: whose request it is; tenants share nothing that was computed.
        is_background: nobody waits for it (`protocols.urgency`), so it gives way to others.
        continues_reply: the last message is the beginning of the reply, which goes on from it.
        compared_with: the random name of an earlier reply (`core.ids`): the client asks where this request
            leaves the one that it answers. None if it does not ask.
    """

    messages: tuple[Message, ...]
    images: Mapping[bytes, Image] = field(default_factory=dict[bytes, Image])
    tools: tuple[Mapping[str, Json], ...] = ()
    late_tools: tuple[Mapping[str, Json], ...] = ()
    grammars: tuple[TextGrammar, ...] = ()
    form: OutputConstraint = field(default_factory=OutputConstraint)
    thinking: Thinking = field(default_factory=Thinking)
    template_options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    options: GenerationOptions = field(default_factory=GenerationOptions)
    session_id: str | None = None
    conversation_id: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    tenant: bytes = b""
    is_background: bool = False
    continues_reply: bool = False
    compared_with: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """A text, or its token ids, to continue without a template."""

    prompt: str | tuple[int, ...]
    options: GenerationOptions = field(default_factory=GenerationOptions)
    session_id: str | None = None
    lineage: Lineage = field(default_factory=Lineage)
    tenant: bytes = b""
    is_background: bool = False


type GenerationRequest = ChatRequest | TextRequest
