"""Decide which prompts are prefilled in one forward pass: short ones that have nothing in common.

What two prompts share is computed for one and restored for the other, so one waits for the other.
"""

from collections.abc import Sequence

from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.engine_request import EngineRequest
from start_llm.engine.prefill import Prefill
from start_llm.engine.schedule import QueuedRequest

_MOST_TOGETHER = 8
_SHORT = 512
"""Tokens of a prompt, restored ones included, up to which it may share passes.

Its KV is copied into a batch and out of it. A pass of more tokens takes longer than reading the weights.
"""
_CHEAPER_TWICE = 16
"""Tokens that may be computed for two prompts of a pass: a pass of their own would take longer."""


def may_share_passes(first: QueuedRequest, prefills: Sequence[Prefill]) -> bool:
    """Return whether a request may share the passes of prompts that are being prefilled, by its kind."""
    request, others = first.generation.request, [prefill.sequence for prefill in prefills]
    is_excluded = first.sequence is not None and first.sequence.excluded_from_batches
    return (
        len(prefills) < _MOST_TOGETHER
        and not is_excluded
        and not any(other.excluded_from_batches for other in others)
        and _is_short_text(request, first.tokens)
        and all(_is_short_text(other.generation.request, len(other.tokens)) for other in others)
        and all(other.adapters == request.adapters for other in others)
    )


def _is_short_text(request: EngineRequest, tokens: int) -> bool:
    return tokens <= _SHORT and not request.images


def repeats_others(
    first: QueuedRequest, restored: int, prefills: Sequence[Prefill], cache: PromptCache
) -> bool:
    """Return whether more of a request could be restored if it waited for these prompts.

    Args:
        restored: tokens of the request that are restored if it does not wait.
    """
    salt = first.generation.request.salt
    return any(
        cache.opener.shared_with(first.ids, prefill.sequence.tokens, prefill.checkpoint_positions)
        > restored + _CHEAPER_TWICE
        for prefill in prefills
        if prefill.sequence.generation.request.salt == salt
    )
