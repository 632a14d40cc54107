"""From the tokens of a fresh rendering to those that were computed for the same conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.core.canonical import CanonicalKey
from start_llm.core.prompt import Boundary
from start_llm.transcripts.store import TranscriptStore, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request, as it is compared.

    Attributes:
        keys: one for each message.
        thoughts: digest of each message's echoed thought; None: it has none, or the client did not send it.
        session: None if nobody said.
    """

    keys: Sequence[CanonicalKey]
    thoughts: Sequence[bytes | None]
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens for a model.

    Attributes:
        ids: recorded tokens of the bound prefix, and those of the fresh rendering behind it.
        boundaries: in `ids`.
        prefix: what was bound; None if nothing was, and all is fresh.
    """

    ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    prefix: Variant | None = None


def bind(
    store: TranscriptStore, conversation: Conversation, ids: tuple[int, ...], boundaries: tuple[Boundary, ...]
) -> Bound:
    """Replace the longest known prefix of a fresh rendering by the tokens recorded for it.

    Only a message whose end is known in the rendering can end the prefix: behind it the fresh tokens go on,
    beginning with the message's closer.
    """
    places = {boundary.message: boundary.tokens for boundary in boundaries}
    for variant in store.find(conversation.keys, conversation.thoughts, conversation.session):
        if variant.depth not in places:
            continue
        end = places[variant.depth]
        recorded = [Boundary(one.depth, one.length) for one in variant.path()]
        moved = variant.length - end
        rest = [Boundary(one.message, one.tokens + moved) for one in boundaries if one.tokens > end]
        return Bound((*variant.tokens(), *ids[end:]), (*recorded, *rest), variant)
    return Bound(ids, boundaries)


def record_prompt(store: TranscriptStore, conversation: Conversation, bound: Bound) -> Variant | None:
    """These tokens are being computed: say so for each message that ends in them. Returns the last one."""
    last = bound.prefix
    for boundary in bound.boundaries:
        if last is not None and boundary.message <= last.depth:
            continue
        last = store.add(
            conversation.keys[boundary.message],
            boundary.message,
            bound.ids[: boundary.tokens],
            parent=last,
            thought=conversation.thoughts[boundary.message],
            session=conversation.session,
        )
    return last
