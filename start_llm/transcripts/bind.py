"""From the tokens of a fresh rendering to those that were computed for the same conversation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.core.canonical import Conversation
from start_llm.core.prompt import Boundary
from start_llm.transcripts import drift
from start_llm.transcripts.lineage import Lineages
from start_llm.transcripts.store import Held, TranscriptStore, Variant

type Encode = Callable[[str], Sequence[int]]


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
    held = Held(
        thoughts=tuple(conversation.shown),
        own=tuple(conversation.own),
        live=drift.values_of(conversation.live),
        noted=(0,) * len(conversation.keys),
    )
    return Bound(ids, tuple(boundaries), held)


def bind(
    store: TranscriptStore,
    conversation: Conversation,
    ids: tuple[int, ...],
    boundaries: Sequence[Boundary],
    *,
    lineages: Lineages,
    keeps_thoughts: bool = True,
) -> Bound:
    """Replace the longest known prefix of a fresh rendering by the tokens recorded for it.

    Only a message whose end is known in the rendering can end the prefix: behind it the fresh tokens go on,
    beginning with the message's closer. Where a note has to stand behind it, no message can that is behind
    the last one that may have a note.

    Args:
        keeps_thoughts: the prefix may hold thoughts that the fresh rendering no longer shows.
        lineages: whose replies are.
    """
    places = {boundary.message: boundary.tokens for boundary in boundaries}
    last = max((message for message in places if conversation.notable[message]), default=-1)

    def worth(variant: Variant) -> tuple[int, ...] | None:
        if variant.depth not in places:
            return None
        found = rank(variant, conversation, keeps_thoughts=keeps_thoughts, lineages=lineages)
        has_changed = found is not None and found[1] < 0
        return None if has_changed and variant.depth > last else found

    prefix = next(store.find(conversation.keys, worth), None)
    if prefix is None:
        return fresh(conversation, ids, boundaries)
    end = places[prefix.depth]
    recorded = [Boundary(one.depth, one.length) for one in prefix.path()]
    moved = prefix.length - end
    rest = [Boundary(one.message, one.tokens + moved) for one in boundaries if one.tokens > end]
    return Bound(
        ids=_begun_with(prefix.tokens(), ids, end),
        boundaries=(*recorded, *rest),
        held=_held(prefix, conversation),
        prefix=prefix,
        replaced=end,
    )


def _begun_with(recorded: array[int], ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    """The recorded tokens in place of those up to `end`. Often they are the same: making a tuple is dear."""
    is_same = len(recorded) == end and array("I", ids[:end]) == recorded
    return ids if is_same else (*recorded, *ids[end:])


def _held(prefix: Variant, conversation: Conversation) -> Held:
    recorded, behind = prefix.held(), slice(prefix.depth + 1, None)
    live = drift.values_of(conversation.live[behind])
    return Held(
        thoughts=(*recorded.thoughts, *conversation.shown[behind]),
        own=(*recorded.own, *conversation.own[behind]),
        live=(*recorded.live, *live),
        noted=(*recorded.noted, *(0 for _ in live)),
        replied=recorded.replied,
    )


def changes(held: Held, conversation: Conversation) -> list[drift.Change]:
    """What a conversation says of now, and these tokens with its new messages do not."""
    new = drift.values_of(conversation.live[len(held.live) :])
    return drift.changes((*held.live, *new), conversation.live)


def _is_one_lineage(
    held: Held,
    told: Sequence[drift.Change],
    conversation: Conversation,
    lineages: Lineages,
) -> bool:
    """What tells of one project or chat changes only where a reply that was written here stands behind it.

    And only if nobody else got that reply. What was told behind the last one is nobody's yet.
    """
    changed = {change.field for change in told if change.field.is_block}
    if not changed:
        return True
    if held.replied <= max(field.message for field in changed):
        return False
    answered = held.live[: held.replied]
    is_answered = drift.blocks(answered) == drift.blocks(held.live)
    return is_answered and lineages.is_only(conversation.words(held.replied), answered)


def with_note(bound: Bound, conversation: Conversation, encode: Encode) -> Bound | None:
    """With a note behind the last message that may have one; None if it would not pay.

    Args:
        encode: the tokens of a text.
    """
    told = changes(bound.held, conversation)
    if not told:
        return bound
    place = next(one for one in reversed(bound.boundaries) if conversation.notable[one.message])
    tokens = tuple(encode(drift.note(told)))
    if not drift.pays(len(tokens), before=sum(bound.held.noted), saved=bound.replaced, prompt=len(bound.ids)):
        return None
    return replace(
        bound,
        ids=(*bound.ids[: place.tokens], *tokens, *bound.ids[place.tokens :]),
        boundaries=tuple(
            replace(one, tokens=one.tokens + len(tokens)) if one.message >= place.message else one
            for one in bound.boundaries
        ),
        held=_noted(bound.held, place.message, told, len(tokens)),
    )


def _noted(held: Held, message: int, told: Sequence[drift.Change], tokens: int) -> Held:
    live, noted = list(held.live), list(held.noted)
    live[message] = (*live[message], *(change.told for change in told))
    noted[message] += tokens
    return replace(held, live=tuple(live), noted=tuple(noted))


def record_prompt(store: TranscriptStore, conversation: Conversation, bound: Bound) -> Variant | None:
    """These tokens are being computed: say so for each message that ends in them. Returns the last one."""
    last, ids = bound.prefix, array("I", bound.ids)
    for boundary in bound.boundaries:
        if last is not None and boundary.tokens <= last.length:
            continue
        last = store.add(
            conversation.keys[boundary.message],
            boundary.message,
            ids[: boundary.tokens],
            bound.held,
            parent=_shorter(last, boundary.message),
            session=conversation.session,
        )
    return last


def _shorter(variant: Variant | None, depth: int) -> Variant | None:
    """What a variant builds on, of less messages."""
    while variant is not None and variant.depth >= depth:
        variant = variant.parent
    return variant


def rank(
    variant: Variant,
    conversation: Conversation,
    *,
    keeps_thoughts: bool,
    lineages: Lineages,
) -> tuple[int, int, int] | None:
    """Thoughts that the client sent count most, then how little has changed, then whose conversation it is.

    None if the tokens hide a thought that would be shown, or hold what is not this conversation's.
    """
    held = variant.held()
    told = changes(held, conversation)
    echoes = _echoes(held, conversation, keeps_thoughts=keeps_thoughts)
    if echoes is None or not _is_one_lineage(held, told, conversation, lineages):
        return None
    return echoes, -len(told), int(variant.session == conversation.session)


def _echoes(recorded: Held, conversation: Conversation, *, keeps_thoughts: bool) -> int | None:
    """How many thoughts are held that the client sent; None if some are not this conversation's.

    What differs and is not in the key may stay as it was computed, where a reply that was written here stands
    behind it: the client sends that back, so it is this conversation's earlier value and not another's.
    """
    echoes = 0
    new = slice(recorded.replied + 1, len(recorded.own))
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
    return echoes
