"""From the tokens of a fresh rendering to those that were computed for the same conversation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.canonical import Conversation
from start_llm.core.prompt import Boundary
from start_llm.transcripts.store import Held, TranscriptStore, Variant


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens for a model.

    Attributes:
        ids: recorded tokens of the bound prefix, and those of the fresh rendering behind it.
        boundaries: in `ids`.
        held: for each message what `ids` hold of it that its key does not say.
        prefix: what was bound; None if nothing was, and all is fresh.
        replaced: tokens of the fresh rendering that the prefix stands for.
    """

    ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    held: Held
    prefix: Variant | None = None
    replaced: int = 0


def fresh(conversation: Conversation, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> Bound:
    """The fresh rendering as it is."""
    return Bound(ids, tuple(boundaries), Held(tuple(conversation.shown), tuple(conversation.own)))


def bind(
    store: TranscriptStore,
    conversation: Conversation,
    ids: tuple[int, ...],
    boundaries: Sequence[Boundary],
    *,
    keeps_thoughts: bool = True,
) -> Bound:
    """Replace the longest known prefix of a fresh rendering by the tokens recorded for it.

    Only a message whose end is known in the rendering can end the prefix: behind it the fresh tokens go on,
    beginning with the message's closer.

    Args:
        keeps_thoughts: the prefix may hold thoughts that the fresh rendering no longer shows.
    """
    places = {boundary.message: boundary.tokens for boundary in boundaries}

    def worth(variant: Variant) -> tuple[int, ...] | None:
        return rank(variant, conversation, keeps_thoughts=keeps_thoughts) if variant.depth in places else None

    prefix = next(store.find(conversation.keys, worth), None)
    if prefix is None:
        return fresh(conversation, ids, boundaries)
    end = places[prefix.depth]
    recorded = [Boundary(one.depth, one.length) for one in prefix.path()]
    moved = prefix.length - end
    rest = [Boundary(one.message, one.tokens + moved) for one in boundaries if one.tokens > end]
    return Bound(
        ids=(*prefix.tokens(), *ids[end:]),
        boundaries=(*recorded, *rest),
        held=_held(prefix, conversation),
        prefix=prefix,
        replaced=end,
    )


def _held(prefix: Variant, conversation: Conversation) -> Held:
    recorded, behind = prefix.held(), slice(prefix.depth + 1, None)
    return Held(
        thoughts=(*recorded.thoughts, *conversation.shown[behind]),
        own=(*recorded.own, *conversation.own[behind]),
        replied=recorded.replied,
    )


def record_prompt(store: TranscriptStore, conversation: Conversation, bound: Bound) -> Variant | None:
    """These tokens are being computed: say so for each message that ends in them. Returns the last one."""
    last, ids = bound.prefix, array("I", bound.ids)
    for boundary in bound.boundaries:
        if last is not None and boundary.message <= last.depth:
            continue
        last = store.add(
            conversation.keys[boundary.message],
            boundary.message,
            ids[: boundary.tokens],
            bound.held,
            parent=last,
            session=conversation.session,
        )
    return last


def rank(variant: Variant, conversation: Conversation, *, keeps_thoughts: bool) -> tuple[int, ...] | None:
    """Thoughts that the client sent count most, then whose conversation it is.

    What differs and is not in the key may stay as it was computed, where a reply that was written here stands
    behind it: the client sends that back, so it is this conversation's earlier value and not another's.

    None if the tokens hide a thought that would be shown, or hold what is not this conversation's.
    """
    recorded, echoes = variant.held(), 0
    new = slice(recorded.replied + 1, variant.depth + 1)
    if recorded.own[new] != tuple(conversation.own[new]):
        return None
    thoughts = zip(recorded.thoughts, conversation.echoed, conversation.shown, strict=False)
    for depth, (held, echoed, shown) in enumerate(thoughts):
        is_hidden = held is None and shown is not None
        is_another = held is not None and echoed not in (None, held)
        is_not_ours = depth > recorded.replied and held not in (None, echoed, shown)
        is_too_much = held is not None and shown is None and not keeps_thoughts
        if is_hidden or is_another or is_not_ours or is_too_much:
            return None
        echoes += held is not None and held == echoed
    return echoes, int(variant.session == conversation.session)
