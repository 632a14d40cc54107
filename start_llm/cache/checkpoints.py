"""Choose where to keep checkpoints of non-trimmable state, which is large, and which of them to drop."""

from collections.abc import Iterator, Sequence

from start_llm.cache.eviction import Evictor
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import Checkpoint, SequenceCache
from start_llm.cache.plan import in_front_of_image
from start_llm.core.thread_owners import ENGINE, owned_by

_STRIDE = 2048
MAX_OF_A_CONVERSATION = 6
_MAX_OF_A_TEXT = 16
_TEXT_SHARE = 1 / 8
"""Share of the memory for checkpoints that more than six of one text may take."""
_TEXT_STEP = 256
"""Tokens between the checkpoints of a text. Shorter chunks would cost a GPU too much of its speed."""
_LEAST_IN_MESSAGE = 256
"""Tokens that a state inside a message has to save."""
_LEAST_STEP = 16
"""Fewer tokens are worth neither a chunk of their own nor a state."""


@owned_by(ENGINE)
class CheckpointKeeper:
    """Keeps the state of sequences, within the memory that the limits leave for it."""

    def __init__(self, store: PageStore, evictor: Evictor) -> None:
        self._layers = store.layers
        self._store = store
        self._evictor = evictor

    def positions(
        self, seq_cache: SequenceCache, ids: tuple[int, ...], pages: int, ever_computed: int, repeated: int
    ) -> tuple[int, ...]:
        """Choose where the prefill of a prompt stops to keep state; inside an image it could not be used.

        Args:
            seq_cache: holds what was restored.
            pages: number of full pages that match the prompt.
            ever_computed: tokens at its beginning that were computed before as these very tokens.
            repeated: see `choose_positions`.
        """
        done, total = len(seq_cache.tokens), seq_cache.prompt_length
        deepest = pages * self._store.tree.page_size
        known = max(ever_computed, deepest)
        if seq_cache.boundaries:
            chosen = choose_positions(seq_cache.boundaries, done, total, deepest, repeated, known)
        else:
            step = step_in_text(self._layers.window)
            chosen = choose_positions_in_text(done, total, known, self._max_of_a_text(), step)
        positions = {in_front_of_image(ids, position) for position in chosen}
        return tuple(sorted(position for position in positions if position > done))

    def keep(self, seq_cache: SequenceCache, now: float, ahead: int = 0) -> None:
        """Keep the state at the end of a sequence cache's tokens, and drop those that are too many beside it.

        These are not written to the disk first: what is kept of their conversation is worth more.

        Args:
            now: seconds on the cache's clock. What a client asks to keep until later stays as long as there
                is room.
            ahead: tokens that its caches hold beyond.
        """
        reach = 0 if seq_cache.boundaries else step_in_text(self._layers.window)
        checkpoint = self._store.checkpoints.keep(seq_cache, reach, ahead)
        while checkpoint and (victim := self._next_to_drop(checkpoint, seq_cache.boundaries, now)):
            self._store.checkpoints.drop(victim)

    def _next_to_drop(
        self, checkpoint: Checkpoint, boundaries: tuple[int, ...], now: float
    ) -> Checkpoint | None:
        return checkpoint_to_drop(
            checkpoint,
            self._store.token_bytes,
            boundaries,
            is_tight=self._store.checkpoints.usage.nbytes > self._evictor.limits.checkpoint_bytes / 2,
            most=MAX_OF_A_CONVERSATION if boundaries else self._max_of_a_text(),
            now=now,
        )

    def _max_of_a_text(self) -> int:
        return max_of_a_text(self._store.checkpoints.mean_bytes, self._evictor.limits.checkpoint_bytes)


def choose_positions(
    boundaries: Sequence[int], done: int, total: int, matched: int, repeated: int = 0, known: int = 0
) -> list[int]:
    """Return the positions at which a prefill stops to keep the state, ascending.

    They are the end of the first message, the end of the last message, the last message end within `matched`,
    and a stride of 2,048 tokens in between. If messages are read again, also the end of the message before
    the last: a client that has changed an earlier question will change the last one too. And where the prompt
    parts from what was computed before, if that is deep inside a message: a system text that names a folder
    at its end, or that the template folds into the first question, parts there each time.

    Args:
        boundaries: ends of the messages.
        done: tokens that were restored.
        total: tokens of the prompt.
        matched: tokens in matching full pages. An earlier conversation diverged there, and no state was kept.
        repeated: tokens of the messages that were computed before, perhaps as other tokens.
        known: tokens at its beginning that were computed before as these very tokens.
    """
    ends = [end for end in boundaries if done < end < total]
    wanted = {*ends[-1:]} | ({*ends} & {*boundaries[:1]})
    diverged = [end for end in ends if end <= matched]
    wanted |= set(diverged[-1:])
    before = max([done, *(end for end in boundaries if end <= known)])
    if before + _LEAST_IN_MESSAGE <= known < total:
        wanted.add(known)
    if any(end <= repeated for end in ends):
        wanted |= set(ends[-2:])
    wanted |= set(range(_next_stride(done), total - 1, _STRIDE))
    return sorted(wanted)


def _next_stride(position: int, stride: int = _STRIDE) -> int:
    return (position // stride + 1) * stride


def step_in_text(window: int) -> int:
    """Return the tokens between two checkpoints of a prompt without messages, if memory allows as many.

    States of windows can be taken back by that, to any place between two of them. Then a window's length is
    enough: shorter steps would keep the same tokens more often.

    Args:
        window: tokens of the windows; 0 if there are other states, which cannot be taken back.
    """
    return min(max(window // _TEXT_STEP, 1) * _TEXT_STEP, _STRIDE)


def choose_positions_in_text(
    done: int, total: int, known: int, most: int, step: int = _TEXT_STEP
) -> list[int]:
    """Return the positions at which the prefill of a prompt without messages stops, ascending.

    They are its last token, in front of which it resumes when it is repeated; the place where it parts from
    what was computed before, because a text is edited where it was edited last; and as many in between as it
    may have, a step or several apart, so that an edit elsewhere does not go back to the beginning.

    Args:
        done: tokens that were restored.
        total: tokens of the prompt.
        known: tokens at its beginning that were computed before.
        most: checkpoints that the prompt may have.
        step: see `step_in_text`.
    """
    end = total - 1
    if done >= end:
        return []
    step = min((end // (most * step) + 1) * step, _STRIDE)
    parting = {known} if done + _LEAST_STEP <= known < end else set[int]()
    strides = range(_next_stride(done, step), end, step)
    spaced = {
        position
        for position in strides
        if min(abs(position - near) for near in (done, known, end)) >= _LEAST_STEP
    }
    return sorted({end} | parting | spaced)


def max_of_a_text(state_bytes: float, share_bytes: float) -> int:
    """Return how many checkpoints a prompt without messages may have: six, or more of them if they are small.

    Args:
        state_bytes: of one state; 0 if it is not known yet.
        share_bytes: memory for all checkpoints.
    """
    affordable = _TEXT_SHARE * share_bytes // state_bytes if state_bytes else _MAX_OF_A_TEXT
    return int(min(max(affordable, MAX_OF_A_CONVERSATION), _MAX_OF_A_TEXT))


def checkpoint_to_drop(
    newest: Checkpoint,
    bytes_per_token: float,
    boundaries: Sequence[int],
    *,
    is_tight: bool,
    most: int = MAX_OF_A_CONVERSATION,
    now: float = 0,
) -> Checkpoint | None:
    """Return a checkpoint on the path to the newest one that should be dropped; None if there is none.

    The newest one stays, and so does the one at the end of the first message, where other conversations with
    the same rules leave. Beyond `most`, the one that saves the fewest tokens is dropped, but not the last one
    at the end of an earlier message: a client that changes its last message in the next request goes on from
    there.

    Args:
        boundaries: ends of the messages. If there is no checkpoint at the first one, the first checkpoint
            stays in its place.
        is_tight: checkpoint memory is short. Then a checkpoint must save 2,048 tokens, or KV of at least its
            own size; this does not apply to a network without KV.
        most: checkpoints of one conversation.
        now: one that a client asks to keep until later is dropped only if memory is short, and all others are
            gone.
    """
    on_path = sorted(_on_the_way(newest), key=lambda checkpoint: checkpoint.position)
    starts = [0, *(checkpoint.position for checkpoint in on_path)]
    saved = {
        id(checkpoint): checkpoint.position - start
        for start, checkpoint in zip(starts, on_path, strict=False)
    }
    shared = next((checkpoint for checkpoint in on_path if checkpoint.position in boundaries[:1]), on_path[0])
    others = [checkpoint for checkpoint in on_path[:-1] if checkpoint is not shared]
    free = [checkpoint for checkpoint in others if checkpoint.kept_until <= now]
    inner = free or (others if is_tight and len(on_path) > most else [])
    if not inner:
        return None
    if len(on_path) > most:
        before = next(
            (checkpoint for checkpoint in reversed(inner) if checkpoint.position in boundaries), None
        )
        droppable = [checkpoint for checkpoint in inner if checkpoint is not before]
        if not droppable:
            return before if is_tight else None
        return min(droppable, key=lambda checkpoint: saved[id(checkpoint)])
    least = min(inner, key=lambda checkpoint: saved[id(checkpoint)])
    is_poor = 0 < saved[id(least)] * bytes_per_token < least.state.nbytes and saved[id(least)] < _STRIDE
    return least if is_tight and is_poor else None


def _on_the_way(newest: Checkpoint) -> Iterator[Checkpoint]:
    """Yield the checkpoints on the newest one's path, itself included; not those of other conversations."""
    page, next_tokens = newest.page, newest.tail
    while True:
        yield from page.checkpoints.beginnings_of(next_tokens)
        if page.parent is None:
            return
        page, next_tokens = page.parent, page.tokens
