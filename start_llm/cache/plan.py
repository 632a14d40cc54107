"""How a prompt is restored: decided here, done in `prompt_cache`. Pure functions over the tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from start_llm.cache.pages import Checkpoint, Page, Strand, common_length


@dataclass(frozen=True, slots=True)
class Source:
    """A page, a strand or a checkpoint's tail that has tokens `start` to `end`, behind the full pages."""

    holder: Page | Strand | Checkpoint
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How to get caches for the first `length` tokens of a prompt.

    Attributes:
        path: the full pages within `length`.
        hand_over: a resting strand whose caches are taken as they are, and trimmed to `length`; None: copies
            are made of the pages and the tail.
        tail: what is behind the pages; None: nothing.
        checkpoint: gives the state of whole leaves; None if there are none, or if the strand has it.
    """

    length: int = 0
    path: tuple[Page, ...] = ()
    hand_over: Strand | None = None
    tail: Source | None = None
    checkpoint: Checkpoint | None = None


def plan_restore(root: Page, matched: list[Page], ids: tuple[int, ...], *, has_state: bool) -> Plan:
    """The longest restore that leaves at least one token to compute.

    Args:
        matched: the full pages that `ids[:-1]` begins with.
    """
    usable = ids[:-1]
    if has_state:
        return _deepest_state(root, matched, usable)
    return _deepest_tokens(root, matched, usable)


def _deepest_tokens(root: Page, path: list[Page], ids: tuple[int, ...]) -> Plan:
    """Without state any position will do."""
    tail = _deepest_source(root, path, ids)
    return _plan(path, tail, tail.end, ids)


def kept_length(root: Page, matched: list[Page], ids: tuple[int, ...]) -> int:
    """How many tokens of `ids[:-1]` are kept, whether or not there is state at their end."""
    return _deepest_source(root, matched, ids[:-1]).end


def _deepest_source(root: Page, path: list[Page], ids: tuple[int, ...]) -> Source:
    """What is behind the full pages: what a page or a strand there has in common with `ids`."""
    end = path[-1] if path else root
    rest = ids[end.end :]
    best = Source(end, end.end, end.end)
    for holder, tokens in _behind(end, rest):
        length = common_length(tokens[: len(rest)], rest[: len(tokens)])
        if length > best.end - best.start:
            best = Source(holder, end.end, end.end + length)
    return best


def _behind(page: Page, rest: tuple[int, ...]) -> Iterator[tuple[Page | Strand, tuple[int, ...]]]:
    """What follows a page and begins like `rest`: strands that end before the next one is full, and pages."""
    for strand in page.strands:
        if strand.tokens[page.end : page.end + 1] == list(rest[:1]):
            yield strand, tuple(strand.tokens[page.end :])
    for child in page.beginning_like(rest):
        if child.holder is not None:
            yield child, child.tokens


def _plan(path: list[Page], tail: Source, length: int, ids: tuple[int, ...]) -> Plan:
    strand = _giver(path, tail, length, ids)
    if strand is not None:
        return Plan(length, tuple(path), hand_over=strand)
    return Plan(length, tuple(path), tail=tail if tail.start < tail.end else None)


def _giver(path: list[Page], tail: Source, length: int, ids: tuple[int, ...]) -> Strand | None:
    """A resting strand that begins with these very tokens, and has only a reply to lose behind them."""
    holders = [one.holder if isinstance(one, Page) else one for one in (tail.holder, *reversed(path))]
    strands = {id(one): one for one in holders if isinstance(one, Strand)}
    return next((one for one in strands.values() if _may_give(one, length, ids)), None)


def _may_give(strand: Strand, length: int, ids: tuple[int, ...]) -> bool:
    if strand.is_live or length < strand.shared_to or length > len(strand.tokens):
        return False
    return tuple(strand.tokens[:length]) == ids[:length]


def _deepest_state(root: Page, path: list[Page], ids: tuple[int, ...]) -> Plan:
    """With state, only places where it was kept: ends of resting strands, and checkpoints."""
    for depth in range(len(path), -1, -1):
        page = path[depth - 1] if depth else root
        if not (page.strands or page.checkpoints):
            continue
        rest = ids[page.end :]
        strand = max(_ending(page, rest), key=lambda one: len(one.tokens), default=None)
        checkpoint = max(_kept(page, rest), key=lambda one: one.position, default=None)
        if strand and (not checkpoint or len(strand.tokens) >= checkpoint.position):
            return Plan(len(strand.tokens), tuple(path[:depth]), hand_over=strand)
        if checkpoint:
            return _from_checkpoint(path[:depth], checkpoint, ids)
    return Plan()


def _ending(page: Page, rest: tuple[int, ...]) -> Iterator[Strand]:
    for strand in page.strands:
        tail = tuple(strand.tokens[page.end :])
        if not strand.is_live and strand.tokens and tail == rest[: len(tail)]:
            yield strand


def _kept(page: Page, rest: tuple[int, ...]) -> Iterator[Checkpoint]:
    for checkpoint in page.checkpoints:
        if checkpoint.tail == rest[: len(checkpoint.tail)]:
            yield checkpoint


def _from_checkpoint(path: list[Page], checkpoint: Checkpoint, ids: tuple[int, ...]) -> Plan:
    tail = Source(checkpoint, checkpoint.page.end, checkpoint.position)
    plan = _plan(path, tail, checkpoint.position, ids)
    return Plan(plan.length, plan.path, plan.hand_over, plan.tail, checkpoint)
