"""Builds the reply of POST /v1/cache/explain: the reasons that a prompt's cached prefix is short."""

from collections.abc import Mapping
from dataclasses import asdict

from start_llm.core.chat import Json
from start_llm.core.explanation import Difference, Explanation


def explanation_body(explanation: Explanation) -> Mapping[str, Json]:
    """Return the body of the reply. `docs/explain.md` describes every field."""
    restored, against, cause = explanation.restored, explanation.against, explanation.cause
    return {
        "object": "cache.explanation",
        "summary": explanation.line,
        "prompt_tokens": explanation.prompt_tokens,
        "cached_tokens": restored.tokens,
        "kept_tokens": restored.stored,
        "lost_tokens": explanation.lost,
        "miss_reason": restored.miss,
        "bound": {
            "messages": explanation.bound_messages,
            "tokens": explanation.bound_tokens,
            "refusal": explanation.refusal,
        },
        "compared_with": {"messages": against.messages, "tokens": against.tokens} if against else None,
        "divergence": _difference(cause) if cause else None,
        "differences": [_difference(difference) for difference in explanation.differences],
    }


def _difference(difference: Difference) -> Json:
    fields = asdict(difference)
    return {
        "message": fields.pop("message"),
        "role": fields.pop("role"),
        "class": fields.pop("drift"),
        **fields,
    }
