"""From the tokens of a fresh rendering to those that were computed for the same conversation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from start_llm.core.canonical import Conversation
from start_llm.core.prompt import Boundary
from start_llm.transcripts import drift
from start_llm.transcripts.guard import Claims, Guard, Reading
from start_llm.transcripts.store import Place, TranscriptStore, Variant

type Encode = Callable[[str], Sequence[int]]

_MOST_DEAR = 32
"""Notes that are too long: then only what needs none is looked for. Each takes a look at all messages."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens for a model.

    Attributes:
        ids: recorded tokens of the bound prefix, a note, and what the fresh rendering has behind that prefix.
        boundaries: in `ids`.
        readings: of each message, what `ids` say of it that its key does not.
        prefix: what was bound; None if nothing was, and all is fresh.
        replaced: tokens of the fresh rendering that the prefix stands for.
        noted: tokens of the note.
        before_note: tokens in front of it.
    """

    ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    readings: tuple[Reading, ...]
    prefix: Variant | None = None
    replaced: int = 0
    noted: int = 0
    before_note: int = 0

    def checkpoints(self) -> Iterator[int]:
        """Ends of messages, for the engine; but what goes on from a message with a note, and is not proven to
        be the same conversation, goes on in front of the note."""
        for before, one in pairwise((Boundary(-1, 0), *self.boundaries)):
            yield self.before_note if before.tokens < self.before_note < one.tokens else one.tokens


def fresh(conversation: Conversation, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> Bound:
    """The fresh rendering as it is."""
    return Bound(ids, tuple(boundaries), _readings(conversation, 0))


def _readings(conversation: Conversation, first: int) -> tuple[Reading, ...]:
    """Of the messages from one on, as they are rendered."""
    return tuple(
        Reading(message.omitted, shown, sent is None)
        for message, shown, sent in zip(
            conversation.messages[first:],
            conversation.shown[first:],
            conversation.echoed[first:],
            strict=True,
        )
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Recorded tokens that a conversation may go on from.

    Attributes:
        end: tokens of the fresh rendering that they stand for.
        told: what a note has to say.
        note: its tokens.
    """

    variant: Variant
    end: int
    told: tuple[drift.Change, ...] = ()
    note: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Binder:
    """Finds what a conversation goes on from.

    Attributes:
        encode: the tokens of a text.
    """

    store: TranscriptStore
    conversation: Conversation
    guard: Guard
    encode: Encode

    def bind(self, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> Bound | None:
        """Replace the beginning of a fresh rendering by tokens that were recorded for it.

        Of all that the guard admits, those leave least to compute. Only a message whose end is known in the
        rendering can end them: behind it the fresh tokens go on, beginning with the message's closer.

        Returns:
            What is rendered, if nothing is recorded. None if what is recorded costs more than it saves.
        """
        last = max((one.message for one in boundaries if self.conversation.notable[one.message]), default=-1)
        best: _Candidate | None = None
        dear = 0
        for one in self._candidates(boundaries):
            if best and len(ids) - one.end > _cost(best, len(ids)):
                break
            is_equal = self.guard.is_equal(one.variant)
            if not is_equal and dear >= _MOST_DEAR:
                continue
            told = () if is_equal else self._changes(one.variant)
            if told and one.variant.depth > last:
                continue  # a note has no place
            candidate = self._told(one, told, len(ids)) if told else one
            if candidate is None:
                dear += 1
            elif best is None or self._rank(candidate, len(ids)) < self._rank(best, len(ids)):
                best = candidate
        if best is None:
            return None if dear else fresh(self.conversation, ids, boundaries)
        self.store.use(best.variant)
        return self._bound(best, ids, boundaries)

    def _candidates(self, boundaries: Sequence[Boundary]) -> Iterator[_Candidate]:
        """All that the guard admits, the longest first."""
        ends = {boundary.message: boundary.tokens for boundary in boundaries}
        for depth in sorted(ends, reverse=True):
            for variant in self.store.at(self.conversation.keys[depth]):
                if self.guard.admits(variant):
                    yield _Candidate(variant, ends[depth])

    def _rank(self, one: _Candidate, whole: int) -> tuple[int, bool, float]:
        """The smaller, the better: what is left to compute; then those of this session; then the newest."""
        is_foreign = one.variant.session != self.conversation.session
        return _cost(one, whole), is_foreign, -one.variant.last_used

    def _changes(self, variant: Variant) -> tuple[drift.Change, ...]:
        """What the model would not know."""
        new = _readings(self.conversation, variant.depth + 1)
        return tuple(drift.changes((*variant.all_readings(), *new), self.conversation.messages))

    def _told(self, one: _Candidate, told: tuple[drift.Change, ...], whole: int) -> _Candidate | None:
        """With a note; None if it does not pay."""
        note = tuple(self.encode(drift.note(told)))
        before = sum(reading.noted for reading in one.variant.all_readings())
        prompt = whole - one.end + one.variant.length
        pays = drift.pays(len(note), before=before, saved=one.end, prompt=prompt)
        return _Candidate(one.variant, one.end, told, note) if pays else None

    def _bound(self, best: _Candidate, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> Bound:
        prefix, moved = best.variant, best.variant.length - best.end
        recorded = [Boundary(one.depth, one.length) for one in prefix.path()]
        rest = [Boundary(one.message, one.tokens + moved) for one in boundaries if one.tokens > best.end]
        bound = Bound(
            ids=_begun_with(prefix.tokens(), ids, best.end),
            boundaries=(*recorded, *rest),
            readings=(*prefix.all_readings(), *_readings(self.conversation, prefix.depth + 1)),
            prefix=prefix,
            replaced=best.end,
            noted=len(best.note),
        )
        return self._with_note(bound, best) if best.note else bound

    def _with_note(self, bound: Bound, best: _Candidate) -> Bound:
        """Behind the last message that may have one."""
        notable = self.conversation.notable
        place = next(one for one in reversed(bound.boundaries) if notable[one.message])
        readings = list(bound.readings)
        told = (*readings[place.message].told, *(change.told for change in best.told))
        noted = readings[place.message].noted + len(best.note)
        readings[place.message] = readings[place.message]._replace(told=told, noted=noted)
        return Bound(
            ids=(*bound.ids[: place.tokens], *best.note, *bound.ids[place.tokens :]),
            boundaries=tuple(
                Boundary(one.message, one.tokens + len(best.note)) if one.message >= place.message else one
                for one in bound.boundaries
            ),
            readings=tuple(readings),
            prefix=bound.prefix,
            replaced=bound.replaced,
            noted=bound.noted,
            before_note=place.tokens,
        )


def _cost(one: _Candidate, whole: int) -> int:
    return whole - one.end + len(one.note)


def _begun_with(recorded: array[int], ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    """The recorded tokens in place of those up to `end`. Often they are the same: making a tuple is dear."""
    is_same = len(recorded) == end and array("I", ids[:end]) == recorded
    return ids if is_same else (*recorded, *ids[end:])


def record_prompt(store: TranscriptStore, conversation: Conversation, bound: Bound) -> Variant | None:
    """These tokens are being computed: say so for each message that ends in them. Returns the last one."""
    last, ids = bound.prefix, array("I", bound.ids)
    for boundary in bound.boundaries:
        if last is not None and boundary.tokens <= last.length:
            continue
        last = store.add(
            Place(conversation.keys[boundary.message], boundary.message, boundary.tokens),
            ids,
            bound.readings,
            parent=_shorter(last, boundary.message),
            claims=Claims(conversation.names),
            session=conversation.session,
        )
    return last


def _shorter(variant: Variant | None, depth: int) -> Variant | None:
    """What a variant builds on, of less messages."""
    while variant is not None and variant.depth >= depth:
        variant = variant.parent
    return variant
