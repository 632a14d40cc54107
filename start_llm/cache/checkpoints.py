"""Where the state of whole leaves is kept: it is large, so only where somebody may come back to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from start_llm.cache.pages import Checkpoint

_STRIDE = 2048
_MOST_OF_A_CONVERSATION = 6


def places(boundaries: Sequence[int], done: int, total: int, matched: int) -> list[int]:
    """Positions at which a prefill stops to keep the state, ascending.

    Args:
        boundaries: ends of the messages.
        done: tokens that are restored.
        total: tokens of the prompt.
        matched: tokens that were computed before, although no state was kept there: a place of divergence.

    They are the end of the first message, the end of the last one, where an earlier conversation went another
    way, and, in between, a stride.
    """
    ends = [end for end in boundaries if done < end < total]
    wanted = {*ends[-1:]} | ({*ends} & {*boundaries[:1]})
    diverged = [end for end in ends if end <= matched]
    wanted |= set(diverged[-1:])
    wanted |= set(range(_next_stride(done), total - 1, _STRIDE))
    return sorted(wanted)


def _next_stride(position: int) -> int:
    return (position // _STRIDE + 1) * _STRIDE


def superseded(newest: Checkpoint, bytes_per_token: float, *, is_short: bool) -> Checkpoint | None:
    """A checkpoint on the way to the newest one that should go; None if there is none.

    The first and the newest stay. A conversation has six at most; of more, the one that saves least goes.

    Args:
        is_short: whether memory for checkpoints is. Then one has to save more tokens than its bytes are worth
            in KV, where there is any.
    """
    kept = sorted(_on_the_way(newest), key=lambda one: one.position)
    inner = kept[1:-1]
    if not inner:
        return None
    saved = {id(one): one.position - before.position for before, one in zip(kept, inner, strict=False)}
    least = min(inner, key=lambda one: saved[id(one)])
    is_poor = 0 < saved[id(least)] * bytes_per_token < least.state.nbytes and saved[id(least)] < _STRIDE
    are_too_many = len(kept) > _MOST_OF_A_CONVERSATION
    return least if (is_short and is_poor) or are_too_many else None


def _on_the_way(newest: Checkpoint) -> Iterator[Checkpoint]:
    """Those that the newest one's tokens pass through, itself included; not those of other conversations."""
    page, next_tokens = newest.page, newest.tail
    while True:
        for checkpoint in page.checkpoints:
            if checkpoint.tail == next_tokens[: len(checkpoint.tail)]:
                yield checkpoint
        if page.parent is None:
            return
        page, next_tokens = page.parent, page.tokens
