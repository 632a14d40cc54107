"""Plan how to restore a prompt; `cache.restore` carries it out. Pure functions over the prefix tree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from start_llm.cache.pages import CacheItem, Checkpoint, Page, SequenceCache
from start_llm.core.images import FIRST_IMAGE_TOKEN

_MAX_LATER_PAGES = 64
"""Pages after the last matching one that are searched for a state."""


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """What has tokens `start` to `end`, after the full pages.

    Attributes:
        item: a page, a sequence cache, or a checkpoint, whose tail is meant.
    """

    item: CacheItem
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A plan for caches that hold the first `length` tokens of a prompt.

    Attributes:
        path: the full pages within `length`.
        reused_in_place: an idle sequence cache whose caches are reused in place and trimmed to `length`.
            None: the pages and the tail are copied.
        tail: source of the tokens after the pages; None if there are none.
        checkpoint: gives the state of non-trimmable leaves, which may have to be taken back to `length`; None
            if there are none, or if the sequence cache has it.
        is_cut: more is stored, but it ends inside an image, so that the plan ends in front of it.
    """

    length: int = 0
    path: tuple[Page, ...] = ()
    reused_in_place: SequenceCache | None = None
    tail: RestoreSource | None = None
    checkpoint: Checkpoint | None = None
    is_cut: bool = False


def plan_restore(root: Page, matched: list[Page], ids: tuple[int, ...], *, has_state: bool) -> RestorePlan:
    """Return the longest restore that leaves at least one token to compute, and does not end inside an image.

    Args:
        matched: the full pages that `ids[:-1]` starts with.
    """
    deepest = _deepest_state if has_state else _deepest_tokens
    plan, is_cut = deepest(root, matched, ids[:-1]), False
    while (start := in_front_of_image(ids, plan.length)) < plan.length:
        within = [page for page in matched if page.end <= start]
        plan, is_cut = deepest(root, within, ids[:start]), True
    return replace(plan, is_cut=True) if is_cut else plan


def without_cutting(plan: RestorePlan) -> RestorePlan:
    """Return a plan that copies where `plan` would cut tokens off a sequence cache that it takes over."""
    seq_cache = plan.reused_in_place
    if seq_cache is None or plan.length == len(seq_cache.tokens):
        return plan
    start = plan.path[-1].end if plan.path else 0
    tail = RestoreSource(seq_cache, start, plan.length) if start < plan.length else None
    return replace(plan, reused_in_place=None, tail=tail)


def in_front_of_image(ids: Sequence[int], position: int) -> int:
    """Return the start of the image inside which a position is; the position itself if it is in none.

    Images without any token between them count as one.
    """
    if not 0 < position < len(ids) or ids[position] < FIRST_IMAGE_TOKEN:
        return position
    while position > 0 and ids[position - 1] >= FIRST_IMAGE_TOKEN:
        position -= 1
    return position


def _deepest_tokens(root: Page, path: list[Page], ids: tuple[int, ...]) -> RestorePlan:
    """Plan for a network without non-trimmable state: any position will do."""
    return _plan(path, _deepest_source(root, path, ids), ids)


def stored_length(root: Page, matched: list[Page], ids: tuple[int, ...]) -> int:
    """Return how many tokens of `ids[:-1]` are stored, whether or not there is state at their end."""
    return _deepest_source(root, matched, ids[:-1]).end


def _deepest_source(root: Page, path: list[Page], ids: tuple[int, ...]) -> RestoreSource:
    """Return the source with the longest match after the full pages, which may be empty.

    It is a sequence cache that ends before the next page is full, or a page.
    """
    end = path[-1] if path else root
    rest = ids[end.end :]
    nothing = RestoreSource(end, end.end, end.end)
    stored = ((page, length) for page, length in end.by_tokens.by_common_length(rest) if page.holder)
    longest = [next(end.seq_caches.by_common_length(rest), None), next(stored, None)]
    sources = (RestoreSource(match[0], end.end, end.end + match[1]) for match in longest if match)
    return max((nothing, *sources), key=lambda source: source.end)


def _plan(path: list[Page], tail: RestoreSource, ids: tuple[int, ...]) -> RestorePlan:
    seq_cache = _giver(path, tail, ids)
    if seq_cache is not None:
        return RestorePlan(tail.end, tuple(path), reused_in_place=seq_cache)
    return RestorePlan(tail.end, tuple(path), tail=tail if tail.start < tail.end else None)


def _giver(path: list[Page], tail: RestoreSource, ids: tuple[int, ...]) -> SequenceCache | None:
    """Return an idle sequence cache that starts with these tokens; None if there is none.

    It must hold nothing after them that other prompts are expected to share, or that its own sequence, which
    was preempted, goes on from: only a reply that has ended.
    """
    holders = [item.holder if isinstance(item, Page) else item for item in (tail.item, *reversed(path))]
    seq_caches = {id(holder): holder for holder in holders if isinstance(holder, SequenceCache)}
    return next((seq_cache for seq_cache in seq_caches.values() if _may_give(seq_cache, tail.end, ids)), None)


def _may_give(seq_cache: SequenceCache, length: int, ids: tuple[int, ...]) -> bool:
    if seq_cache.is_active or length < seq_cache.least_taken or length > len(seq_cache.tokens):
        return False
    return tuple(seq_cache.tokens[:length]) == ids[:length]


def _deepest_state(root: Page, path: list[Page], ids: tuple[int, ...]) -> RestorePlan:
    """Plan for a network with non-trimmable state.

    It can resume only at the ends of idle sequence caches, at checkpoints, and where one of these can be
    taken back to.
    """
    plan = _deepest_kept_state(root, path, ids)
    return _from_later_state(root, path, ids, plan.length) or plan


def _deepest_kept_state(root: Page, path: list[Page], ids: tuple[int, ...]) -> RestorePlan:
    for depth in range(len(path), -1, -1):
        page = path[depth - 1] if depth else root
        if not (page.seq_caches or page.checkpoints):
            continue
        rest = ids[page.end :]
        seq_cache = next(_ending(page, rest), None)
        checkpoint = next(page.checkpoints.beginnings_of(rest), None)
        if seq_cache and (not checkpoint or len(seq_cache.tokens) >= checkpoint.position):
            return RestorePlan(len(seq_cache.tokens), tuple(path[:depth]), reused_in_place=seq_cache)
        if checkpoint:
            return _from_checkpoint(path[:depth], checkpoint, ids)
    return RestorePlan()


def _ending(page: Page, rest: tuple[int, ...]) -> Iterator[SequenceCache]:
    """Yield the idle sequence caches that `rest` begins with after a page, the longest first."""
    for seq_cache in page.seq_caches.beginnings_of(rest):
        if not seq_cache.is_active and seq_cache.tokens:
            yield seq_cache


def _from_checkpoint(path: list[Page], checkpoint: Checkpoint, ids: tuple[int, ...]) -> RestorePlan:
    tail = RestoreSource(checkpoint, checkpoint.page.end, checkpoint.position)
    return replace(_plan(path, tail, ids), checkpoint=checkpoint)


def _from_later_state(
    root: Page, path: list[Page], ids: tuple[int, ...], longer_than: int
) -> RestorePlan | None:
    """Plan with a checkpoint that is taken back to where its tokens and `ids` part; None if there is none."""
    end = path[-1] if path else root
    rest = ids[end.end :]
    source = max(_deepest_source(root, path, ids), _deepest_tail(end, rest), key=lambda source: source.end)
    if source.end <= longer_than:
        return None
    common = rest[: source.end - end.end]
    rewindable = (
        checkpoint
        for checkpoint in _checkpoints_after(end, common)
        if checkpoint.position - checkpoint.state.reach <= source.end
    )
    checkpoint = next(rewindable, None)
    if checkpoint is None:
        return None
    return replace(_plan(path, source, ids), checkpoint=checkpoint)


def _deepest_tail(page: Page, rest: tuple[int, ...]) -> RestoreSource:
    """Return the checkpoint of a page whose tail has most in common with `rest`; it may be empty."""
    item, length = next(page.checkpoints.by_common_length(rest), (page, 0))
    return RestoreSource(item, page.end, page.end + length)


def _checkpoints_after(page: Page, common: tuple[int, ...]) -> Iterator[Checkpoint]:
    """Yield checkpoints whose tokens go on with `common` after a page; of those on later pages, some."""
    yield from page.checkpoints.beginning_with(common)
    waiting = list(page.by_tokens.beginning_with(common))
    for _ in range(_MAX_LATER_PAGES):
        if not waiting:
            return
        later = waiting.pop()
        yield from later.checkpoints
        waiting += later.children.values()
