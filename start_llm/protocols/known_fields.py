"""Names every field that each kind of body may have.

The proxy passes on these and no others. `tests/protocols/test_known_fields.py` compares the table with what
the parsers look at.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from start_llm.protocols.routes import BodyKind
from start_llm.protocols.sessions import BODY_KEYS, BRANCH_KEYS, PARENT_KEYS

_SESSION = frozenset((*BODY_KEYS, *PARENT_KEYS, *BRANCH_KEYS))
_THINKING = frozenset(
    "enable_thinking output_config reasoning reasoning_effort thinking thinking_budget".split()
)
_SAMPLING = frozenset(
    "adapter frequency_penalty hlg logit_bias min_p presence_penalty repetition_context_size "
    "repetition_penalty seed temperature top_k top_p".split()
)
_EVERYWHERE = frozenset("extra_body metadata model".split())
_CONVERSATION = (
    _EVERYWHERE
    | _SESSION
    | _THINKING
    | _SAMPLING
    | frozenset("chat_template_kwargs stream tool_choice tools".split())
)
# Fields of the protocols that change nothing here. Clients send them with each request.
_WITHOUT_EFFECT = frozenset(
    "prompt_cache_retention safety_identifier service_tier store user verbosity".split()
)

IN_EXTRA_BODY = _SESSION | _THINKING
"""Members of `extra_body` that are looked at."""
IN_METADATA = IN_EXTRA_BODY | {"user_id"}
"""Members of `metadata` that are looked at."""


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of a kind of body.

    Attributes:
        names: those at the top level.
        repeats_metadata: the reply repeats `metadata`, so all of its members count.
    """

    names: frozenset[str]
    repeats_metadata: bool = False


_CHAT = KnownFields(
    _CONVERSATION
    | _WITHOUT_EFFECT
    | frozenset(
        "add_generation_prompt continue_final_message guided_json "
        "logprobs max_completion_tokens max_tokens messages n n_predict parallel_tool_calls "
        "prompt_cache_options response_format return_progress return_receipt "
        "return_token_ids stop stream_options top_logprobs".split()
    )
)
_TEXT = KnownFields(
    _EVERYWHERE
    | _SESSION
    | _SAMPLING
    | frozenset(
        "best_of echo logprobs max_completion_tokens max_tokens n n_predict prompt prompt_cache_options "
        "return_progress return_receipt return_token_ids stop stream stream_options suffix user".split()
    )
)
_MESSAGES = KnownFields(
    _CONVERSATION
    | frozenset(
        "context_management diagnostics max_tokens messages output_format return_receipt service_tier "
        "stop_sequences system".split()
    )
)
_RESPONSES = KnownFields(
    _CONVERSATION
    | _WITHOUT_EFFECT
    | frozenset(
        "background client_metadata conversation include input instructions max_completion_tokens "
        "max_output_tokens max_tokens n parallel_tool_calls previous_response_id prompt "
        "prompt_cache_options return_receipt stop text "
        "top_logprobs truncation".split()
    ),
    repeats_metadata=True,
)
_EMBEDDINGS = KnownFields(frozenset("adapter dimensions encoding_format input model user".split()))

KNOWN_FIELDS: Mapping[BodyKind, KnownFields] = {
    "chat": _CHAT,
    "text": _TEXT,
    "embeddings": _EMBEDDINGS,
    "messages": _MESSAGES,
    "responses": _RESPONSES,
}
"""The kinds that the proxy takes."""
