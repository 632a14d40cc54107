"""Binds a prompt: replaces its beginning by the tokens that were computed for the same conversation.

The *fresh rendering* of a request, the chat template's output, differs from what the model read and wrote
before: clients leave out reasoning and serialise calls anew. The recorded tokens are most likely in the KV
cache still, so taking them saves prefill. Some of what they say may have changed since, such as a date in the
system prompt; a *note* then tells the model the new value.

The *depth* of a recorded prefix is the index of its last message. A message's *closer* is the special token
that ends it in the template. Its *boundary* lies before the closer, because the model's own reply is recorded
without one: the next rendering writes it.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from start_llm.core.canonical import Conversation
from start_llm.core.images import FIRST_IMAGE_TOKEN, ImageRun, image_spans
from start_llm.core.prompt import Boundary
from start_llm.transcripts import drift_notes as drift
from start_llm.transcripts.guard import Guard
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.transcript_store import PrefixNode, TranscriptStore, Variant

type Encode = Callable[[str], Sequence[int]]

_MAX_UNUSABLE_NOTES = 32
"""After so many candidates whose notes are impossible or too costly, only candidates that need no note are
tried: to find out what a note would say takes a pass over all messages.
"""


@dataclass(frozen=True, slots=True)
class BoundPrompt:
    """The tokens to compute for a request.

    Attributes:
        ids: recorded tokens of the bound prefix, then the rest of the fresh rendering, with a note if one is
            needed.
        boundaries: ends of messages in `ids`.
        details: for each message, the parts that `ids` show and that its key leaves out, such as reasoning,
            dates and notes.
        prefix: the recorded prefix; None if everything is rendered fresh.
        replaced_tokens: number of tokens of the fresh rendering that the prefix replaces.
        note_tokens: number of tokens of the note.
        before_note: number of tokens before the note.
    """

    ids: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    details: tuple[MessageDetails, ...]
    prefix: Variant | None = None
    replaced_tokens: int = 0
    note_tokens: int = 0
    before_note: int = 0

    def resume_positions(self) -> Iterator[int]:
        """Yield the positions at which other requests may resume: the ends of messages.

        The note belongs to this conversation alone. For the message that has it, yield the position before
        it, from which a request that is not proven to be the same conversation may resume.
        """
        for start, end in pairwise((Boundary(-1, 0), *self.boundaries)):
            yield self.before_note if start.tokens < self.before_note < end.tokens else end.tokens


def fresh(conversation: Conversation, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> BoundPrompt:
    """Return the fresh rendering unchanged."""
    return BoundPrompt(ids, tuple(boundaries), _details(conversation, 0))


def _details(conversation: Conversation, first: int) -> tuple[MessageDetails, ...]:
    """Return the details of the messages from `first` on, as the fresh rendering shows them."""
    return tuple(
        MessageDetails(message.omitted, reasoning=message.shown, is_ours=message.echoed is None)
        for message in conversation.messages[first:]
    )


@dataclass(frozen=True, slots=True)
class _BindingCandidate:
    """Recorded tokens that a conversation may go on from.

    Attributes:
        fresh_end: number of tokens of the fresh rendering that they replace; they may be more or fewer.
        changes: values that have changed since, which a note must tell.
        note: the tokens of that note; empty if nothing has changed.
    """

    variant: Variant
    fresh_end: int
    changes: tuple[drift.Change, ...] = ()
    note: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptBinder:
    """Chooses the recorded tokens that a conversation goes on from.

    Attributes:
        encode: tokenises a text.
        images: the runs of the conversation's images, by their first tokens.
        _known_images: for variants that were looked at, whether all their images are those runs.
        _notes: tokens of notes that were written, by what they tell.
    """

    store: TranscriptStore
    conversation: Conversation
    guard: Guard
    encode: Encode
    images: Mapping[int, ImageRun] = field(default_factory=dict[int, ImageRun])
    _known_images: dict[Variant, bool] = field(default_factory=dict[Variant, bool], init=False)
    _notes: dict[tuple[drift.Change, ...], tuple[int, ...]] = field(
        default_factory=dict[tuple[drift.Change, ...], tuple[int, ...]], init=False
    )

    def bind(self, ids: tuple[int, ...], boundaries: Sequence[Boundary]) -> BoundPrompt | None:
        """Replace the beginning of a fresh rendering by recorded tokens.

        Of the candidates that the guard admits, take the one that leaves the fewest tokens to compute, its
        note included. A conversation that has tokens of its own does not leave them for others, which may say
        another clock: what those have behind its own is new to it in any case. It takes theirs only where its
        own all need notes that are impossible or too long. A recorded prefix can only end with a message
        whose boundary in the rendering is known; the fresh tokens from that boundary on, beginning with the
        message's closer, follow it.

        A note stands at the end of the last message that can hold one. It must not lie inside the recorded
        prefix, whose tokens stay as they are, so a prefix that ends behind that message cannot have a note.

        Returns:
            The fresh rendering if nothing usable is recorded. None if the only usable prefixes need notes
            that cost more than they save: the caller takes the fresh rendering then, and reports why.
        """
        best, are_costly = self._best(ids, boundaries, self._candidates(boundaries))
        if best and self.guard.is_foreign(best.variant) and self._has_own(boundaries):
            candidates = self._candidates(boundaries)
            own = (candidate for candidate in candidates if not self.guard.is_foreign(candidate.variant))
            best = self._best(ids, boundaries, own)[0] or best
        if best is None:
            return None if are_costly else fresh(self.conversation, ids, boundaries)
        return self._bound(best, ids, boundaries)

    def _best(
        self, ids: tuple[int, ...], boundaries: Sequence[Boundary], candidates: Iterator[_BindingCandidate]
    ) -> tuple[_BindingCandidate | None, bool]:
        """Return the best candidate, and whether the note of another one cost more than it saved.

        Args:
            candidates: the longest first.
        """
        last_note_holder = max(
            (end.message for end in boundaries if self.conversation.messages[end.message].can_hold_note),
            default=-1,
        )
        best: _BindingCandidate | None = None
        costly_notes = impossible_notes = 0
        for candidate in candidates:
            if best and len(ids) - candidate.fresh_end > _cost(best, len(ids)):
                break
            is_equal = self.guard.is_equal(candidate.variant)
            if not is_equal and costly_notes + impossible_notes >= _MAX_UNUSABLE_NOTES:
                continue
            changes = () if is_equal else self._changes(candidate.variant)
            if changes and candidate.variant.depth > last_note_holder:
                impossible_notes += 1
                continue
            usable = self._with_paid_note(candidate, changes, len(ids)) if changes else candidate
            if usable is None:
                costly_notes += 1
            elif best is None or self._rank(usable, len(ids)) < self._rank(best, len(ids)):
                best = usable
        return best, costly_notes > 0

    def _has_own(self, boundaries: Sequence[Boundary]) -> bool:
        return any(self.guard.is_own(candidate.variant) for candidate in self._candidates(boundaries))

    def _candidates(self, boundaries: Sequence[Boundary]) -> Iterator[_BindingCandidate]:
        """Yield the recorded prefixes that the guard admits, the longest first."""
        ends = {boundary.message: boundary.tokens for boundary in boundaries}
        for depth in sorted(ends, reverse=True):
            for variant in self.store.at(self.conversation.messages[depth].key):
                if self.guard.admits(variant) and self._knows_images(variant):
                    yield _BindingCandidate(variant, ends[depth])

    def _knows_images(self, variant: Variant) -> bool:
        """Return whether all image tokens are those that the model would read now.

        A server that was started with another IMAGE_MAX_TOKENS may have recorded others. Each part of a path
        is looked at once: no image goes on behind the end of a message.
        """
        if not self.images:
            return True
        new: list[Variant] = []
        link: Variant | None = variant
        while link is not None and link not in self._known_images:
            new.append(link)
            link = link.parent
        are_known = link is None or self._known_images[link]
        for link in reversed(new):
            are_known = self._known_images[link] = are_known and self._shows_images(link.delta)
        return are_known

    def _shows_images(self, tokens: array[int]) -> bool:
        if max(tokens, default=0) < FIRST_IMAGE_TOKEN:
            return True
        try:
            spans = image_spans(tokens, self.images)
        except KeyError:
            return False
        return all(tuple(tokens[span.start : span.end]) == span.run.tokens for span in spans)

    def _rank(self, candidate: _BindingCandidate, fresh_length: int) -> tuple[int, bool, float]:
        """Return a sort key, smallest first: tokens left to compute, own session, newest."""
        of_another_session = candidate.variant.session != self.conversation.session
        return _cost(candidate, fresh_length), of_another_session, -candidate.variant.last_used

    def _changes(self, variant: Variant) -> tuple[drift.Change, ...]:
        """Return what a note would have to tell the model: what the recorded tokens lack or say wrongly."""
        details = (*variant.all_details(), *_details(self.conversation, variant.depth + 1))
        proven = self.guard.proven(variant)
        return tuple(drift.changes(details, self.conversation.canonical, proven=proven))

    def _with_paid_note(
        self, candidate: _BindingCandidate, changes: tuple[drift.Change, ...], fresh_length: int
    ) -> _BindingCandidate | None:
        """Return the candidate with its note, or None if the note does not pay."""
        note = self._notes.get(changes)
        if note is None:
            note = self._notes[changes] = tuple(self.encode(drift.note(changes)))
        earlier = sum(details.note_tokens for details in candidate.variant.all_details())
        prompt = fresh_length - candidate.fresh_end + candidate.variant.length
        pays = drift.is_worth_telling(len(note), before=earlier, saved=candidate.fresh_end, prompt=prompt)
        return _BindingCandidate(candidate.variant, candidate.fresh_end, changes, note) if pays else None

    def _bound(
        self, best: _BindingCandidate, ids: tuple[int, ...], boundaries: Sequence[Boundary]
    ) -> BoundPrompt:
        """Put the recorded prefix and the rest of the fresh rendering together."""
        prefix, shift = best.variant, best.variant.length - best.fresh_end
        recorded = [Boundary(variant.depth, variant.length) for variant in prefix.path()]
        rest = [
            Boundary(end.message, end.tokens + shift) for end in boundaries if end.tokens > best.fresh_end
        ]
        bound = BoundPrompt(
            ids=_spliced(prefix.tokens(), ids, best.fresh_end),
            boundaries=(*recorded, *rest),
            details=(*prefix.all_details(), *_details(self.conversation, prefix.depth + 1)),
            prefix=prefix,
            replaced_tokens=best.fresh_end,
            note_tokens=len(best.note),
        )
        return self._with_note(bound, best) if best.note else bound

    def _with_note(self, bound: BoundPrompt, best: _BindingCandidate) -> BoundPrompt:
        """Insert the note at the end of the last message that can hold one, before its closer."""
        messages = self.conversation.messages
        place = next(end for end in reversed(bound.boundaries) if messages[end.message].can_hold_note)
        details = list(bound.details)
        noted = (*details[place.message].noted, *(change.noted for change in best.changes))
        note_tokens = details[place.message].note_tokens + len(best.note)
        details[place.message] = details[place.message]._replace(noted=noted, note_tokens=note_tokens)
        return replace(
            bound,
            ids=(*bound.ids[: place.tokens], *best.note, *bound.ids[place.tokens :]),
            boundaries=tuple(
                Boundary(end.message, end.tokens + len(best.note)) if end.message >= place.message else end
                for end in bound.boundaries
            ),
            details=tuple(details),
            before_note=place.tokens,
        )


def _cost(candidate: _BindingCandidate, fresh_length: int) -> int:
    """Return the number of tokens that are likely not cached: those behind the prefix, and the note."""
    return fresh_length - candidate.fresh_end + len(candidate.note)


def _spliced(recorded: array[int], ids: tuple[int, ...], end: int) -> tuple[int, ...]:
    """Replace the tokens up to `end` by the recorded ones.

    If both are equal, return `ids` itself: building a long tuple is expensive.
    """
    is_same = len(recorded) == end and array("I", ids[:end]) == recorded
    return ids if is_same else (*recorded, *ids[end:])


def record_prompt(store: TranscriptStore, conversation: Conversation, bound: BoundPrompt) -> Variant | None:
    """Record the prompt's tokens, a variant for each message boundary in them, as it is submitted.

    Returns:
        The variant of the last message, or the bound prefix if no message ends after it.
    """
    last, ids = bound.prefix, array("I", bound.ids)
    if last is not None:
        store.use(last)
    for boundary in bound.boundaries:
        if last is not None and boundary.tokens <= last.length:
            continue  # it is recorded already; behind a note the last message of the prefix is not
        last = store.add(
            PrefixNode(
                conversation.messages[boundary.message].key,
                boundary.message,
                boundary.tokens,
                conversation.tenant,
            ),
            ids,
            bound.details,
            parent=_shorter(last, boundary.message),
            claims=Claims(conversation.names),
            session=conversation.session,
        )
    return last


def _shorter(variant: Variant | None, depth: int) -> Variant | None:
    """Return the nearest variant on the path of `variant` that ends before message `depth`.

    That is `variant` itself, unless a note follows its last message, which is then recorded once more.
    """
    while variant is not None and variant.depth >= depth:
        variant = variant.parent
    return variant
