"""Open sequences: restore the longest cached prefix of a prompt into caches that the sequence continues from.

Owned by the engine thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from start_llm.cache.cache_counts import CacheCounts
from start_llm.cache.checkpoints import CheckpointKeeper
from start_llm.cache.disk.prompt_disk import PromptDisk
from start_llm.cache.kept_shares import note_kept
from start_llm.cache.layers import Layers
from start_llm.cache.pages import KeptUntil, PageTree, SequenceCache
from start_llm.cache.plan import RestorePlan, in_front_of_image, without_cutting
from start_llm.cache.prompt_lookup import PromptLookup, PromptMatch, message_ends
from start_llm.cache.restore import Restorer
from start_llm.core.common_beginning import common_length
from start_llm.core.events import Restored
from start_llm.core.prompt import KeptPrefix
from start_llm.core.thread_owners import ENGINE, owned_by

_OFF = Restored(0, "off")


@dataclass(frozen=True, slots=True)
class OpenedSequence:
    """The caches for a prompt.

    Attributes:
        seq_cache: active; the KV of its `tokens` is restored, the rest has to be computed.
        checkpoint_positions: where state is kept. Prefill has to stop there, unless the cache
            `passes_checkpoints`.
        restored: how much was restored, and why no more, as an event.
        is_in_place: it was restored without a copy.
    """

    seq_cache: SequenceCache
    checkpoint_positions: tuple[int, ...]
    restored: Restored
    is_in_place: bool = False


@owned_by(ENGINE)
@dataclass(eq=False, kw_only=True)
class SequenceOpener:
    """Opens the sequences of one prompt cache.

    Attributes:
        supports_reuse: see `PromptCache`. If not, every sequence begins with empty caches.
        lookup, restorer, checkpoints, disk, counts: the parts of the cache that it needs.
        clock: the cache's clock, in seconds.
    """

    supports_reuse: bool
    lookup: PromptLookup
    restorer: Restorer
    checkpoints: CheckpointKeeper
    disk: PromptDisk
    counts: CacheCounts
    clock: Callable[[], float]

    @property
    def _layers(self) -> Layers:
        return self.restorer.store.layers

    @property
    def _tree(self) -> PageTree:
        return self.restorer.store.tree

    def open(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        repeated_tokens: int = 0,
        room: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore the longest cached prefix of `ids`, and leave at least one token to compute.

        Args:
            salt: what is stored under one salt is never found under another.
            boundaries: ends of the messages, ascending, in tokens.
            repeated_tokens: prompt tokens of messages that were computed before, though perhaps rendered as
                other tokens. Only for telling why a prompt was not restored.
            room: tokens that the caches should take without growing: the prompt and part of the reply.
            most: tokens to restore at most; None: as many as there are.
        """
        match = self.lookup.match(ids, salt, most)
        for page in match.plan.path:  # one that is reopened has counted for its pages already
            page.uses += 1
        opened = self._open(match, boundaries, repeated_tokens, len(ids), room)
        self.counts.note_lookup(opened.restored, is_in_place=opened.is_in_place)
        return opened

    def open_for_idle_work(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], *, most: int | None = None
    ) -> OpenedSequence:
        """Restore a prompt for which nobody waits; see `open`. Nothing that is restored counts as used, no
        lookup is counted, and what sequence caches have is copied where they would lose tokens.
        """
        match = self.lookup.match(ids, salt, most)
        match = replace(match, plan=without_cutting(match.plan))
        return self._open(match, boundaries, 0, len(ids), len(ids), is_idle_work=True)

    def reopen(
        self,
        ids: tuple[int, ...],
        salt: bytes,
        boundaries: Sequence[int],
        before: SequenceCache,
        room: int = 0,
        *,
        most: int | None = None,
    ) -> OpenedSequence:
        """Restore a preempted sequence, with any reply tokens after its prompt. Counts no lookup.

        Args:
            before: its sequence cache when it was preempted. Others may have taken its caches since.
        """
        before.is_paused = False
        has_begun = len(ids) > before.prompt_length
        repeated_tokens = len(ids) if has_begun else before.repeated_tokens
        match = self.lookup.match(ids, salt, most)
        opened = self._open(match, boundaries, repeated_tokens, before.prompt_length, room)
        opened.seq_cache.is_prompt_counted = before.is_prompt_counted
        return self._with_kept(opened, ids, before.kept)

    def with_kept(
        self, opened: OpenedSequence, ids: tuple[int, ...], kept: Sequence[KeptPrefix]
    ) -> OpenedSequence:
        """Return an opened sequence whose beginnings stay at least so long, as far as the budget allows.

        Args:
            ids: its prompt.
        """
        now = self.clock()
        return self._with_kept(opened, ids, [KeptUntil(place.tokens, now + place.seconds) for place in kept])

    def _with_kept(
        self, opened: OpenedSequence, ids: tuple[int, ...], kept: Sequence[KeptUntil]
    ) -> OpenedSequence:
        seq_cache = opened.seq_cache
        seq_cache.kept = _each_once((*seq_cache.kept, *kept))  # beside those of whose caches it took over
        note_kept(seq_cache)
        if not (kept and self.supports_reuse and self._layers.has_state):
            return opened
        ends = {
            in_front_of_image(ids, place.tokens) for place in kept if place.tokens < seq_cache.prompt_length
        }
        more = {end for end in ends if end > len(seq_cache.tokens)}
        positions = tuple(sorted({*opened.checkpoint_positions, *more}))
        return replace(opened, checkpoint_positions=positions)

    def _open(
        self,
        match: PromptMatch,
        boundaries: Sequence[int],
        repeated_tokens: int,
        prompt_length: int,
        room: int,
        *,
        is_idle_work: bool = False,
    ) -> OpenedSequence:
        if not self.supports_reuse:
            seq_cache = SequenceCache(self._layers.fresh(room), match.root)
            seq_cache.prompt_length = prompt_length
            return OpenedSequence(seq_cache, (), _OFF)
        now, ids, plan = self.clock(), match.ids, match.plan
        restored, ever_computed = self.lookup.explain(match, boundaries, repeated_tokens)
        if is_idle_work:
            now = _last_use(plan)
        else:
            self._use(plan, now)
        if plan.is_cut:
            self.counts.note_cut_image()
        seq_cache = self.restorer.restore(plan, match.root, ids, room)
        with self.restorer.store.rollback_on_error(seq_cache):
            seq_cache.last_used, seq_cache.is_idle_work = now, is_idle_work
            seq_cache.boundaries = message_ends(ids, boundaries)
            prompt_end = seq_cache.boundaries[-1] if seq_cache.boundaries else prompt_length - 1
            seq_cache.shared_prefix_length = max(seq_cache.shared_prefix_length, prompt_end)
            seq_cache.prompt_length = prompt_length
            seq_cache.repeated_tokens = max(ever_computed, restored.repeated_tokens)
            positions: tuple[int, ...] = ()
            if self._layers.has_state:
                pages = self.disk.restorer.depth(match) if self.disk.restorer else len(match.matched)
                repeated_tokens = restored.repeated_tokens
                positions = self.checkpoints.positions(seq_cache, ids, pages, ever_computed, repeated_tokens)
        return OpenedSequence(seq_cache, positions, restored, plan.reused_in_place is not None)

    def _use(self, plan: RestorePlan, now: float) -> None:
        """Note that what a plan restores from is used now."""
        for item in (*plan.path, plan.tail and plan.tail.item, plan.checkpoint):
            if item:
                item.last_used = now
        if self.disk.write_back:
            self.disk.write_back.touch(plan.path)

    # ---------------------------------------------------------------------------------------------- questions

    def peek(
        self, ids: tuple[int, ...], salt: bytes, boundaries: Sequence[int], repeated_tokens: int = 0
    ) -> Restored:
        """Return what `open` would restore. Nothing of it is restored, and nothing counts as looked up."""
        if not self.supports_reuse:
            return _OFF
        match = self.lookup.match(ids, salt)
        self._tree.rejected_keys -= match.rejected_keys
        restored, _ = self.lookup.explain(match, boundaries, repeated_tokens)
        if self.disk.restorer is None:
            return restored
        length, pages = self.disk.restorer.length(match), self.disk.restorer.depth(match)
        restored = replace(restored, stored=max(restored.stored, pages * self._tree.page_size))
        return restored if length == match.plan.length else _with_disk(restored, length)

    def restorable(self, ids: tuple[int, ...], salt: bytes) -> int:
        """Return how many tokens of `ids` memory can restore now."""
        match = self.lookup.match(ids, salt)
        self._tree.rejected_keys -= match.rejected_keys
        return match.plan.length

    def shared_with(self, ids: Sequence[int], other: Sequence[int], positions: Sequence[int]) -> int:
        """Return how many tokens of `ids` could be restored from another prompt once that has been computed.

        Args:
            positions: at which a checkpoint of the other one will be kept, ascending.
        """
        if not self.supports_reuse:
            return 0
        common = common_length(tuple(ids), tuple(other))
        if self._layers.has_state and not self._layers.window:
            return max((position for position in positions if position <= common), default=0)
        return common


def _each_once(places: Sequence[KeptUntil]) -> tuple[KeptUntil, ...]:
    """Return each place once, with the latest of its times."""
    until: dict[int, float] = {}
    for place in places:
        until[place.tokens] = max(until.get(place.tokens, 0.0), place.until)
    return tuple(KeptUntil(*place) for place in until.items())


def _last_use(plan: RestorePlan) -> float:
    """Return when what is restored was used last; 0 if nothing is."""
    if plan.reused_in_place:
        return plan.reused_in_place.last_used
    tail = [plan.tail.item] if plan.tail else []
    checkpoint = [plan.checkpoint] if plan.checkpoint else []
    return max((item.last_used for item in (*plan.path, *tail, *checkpoint)), default=0.0)


def _with_disk(restored: Restored, length: int) -> Restored:
    """Return what is restored if the disk gives `length` tokens."""
    stored, repeated = max(restored.stored, length), max(restored.repeated_tokens, length)
    return replace(restored, tokens=length, miss=None, stored=stored, repeated_tokens=repeated)
