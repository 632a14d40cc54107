"""Decoding: one step makes one token for each row."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from start_llm.cache.layers import settle
from start_llm.engine.row import Row, Sampled
from start_llm.engine.sampling import greedy

_STEPS_BETWEEN_CLEARS = 256
_NO_LIMIT = 2**31 - 1
_CHEAP_PADDING = 2048
"""Tokens. The KV of so many is small beside the weights of any model."""


class Held(NamedTuple):
    """Caches of a row that is taken out, and how many of its tokens they hold."""

    caches: list[Any]
    tokens: int


class Solo:
    """Decodes one row. The next step is already being computed while a token is handed out."""

    def __init__(self, network: Any, row: Row) -> None:
        self.row = row
        self._network = network
        self._steps = 0
        self._context = mx.array(row.tokens[:-1], dtype=mx.uint32) if row.processors else None
        self._next = self._launch(mx.array(row.tokens[-1:], dtype=mx.uint32))

    @property
    def rows(self) -> list[Row]:
        return [self.row]

    def step(self) -> list[Sampled]:
        token, logprobs = self._take_next()
        self._next = self._launch(token)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return [Sampled(self.row, cast("int", token.item()), logprobs[0])]

    def release(self, row: Row) -> Sampled:  # noqa: ARG002 - it has but one
        """The last token computed; the row is at rest once it has accepted it."""
        token, logprobs = self._take_next()
        return Sampled(self.row, cast("int", token.item()), logprobs[0])

    def _take_next(self) -> tuple[mx.array, mx.array]:
        """What was sampled, or what the row dictates in its place: neither has been fed yet."""
        token, logprobs = self._next
        if self.row.dictated:
            token = mx.array([self.row.dictated.popleft()], dtype=mx.uint32)
        return token, logprobs

    def _launch(self, token: mx.array) -> tuple[mx.array, mx.array]:
        """Feed `token` [1] and sample. Returns ids [1] and log-probabilities [1, vocabulary], not awaited."""
        logits = self._network(token[None], cache=self.row.cache)[:, -1, :]
        if self._context is not None:
            self._context = mx.concatenate([self._context, token])
            for processor in self.row.processors:
                logits = processor(self._context, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        sampled = self.row.sampler(logprobs)
        mx.async_eval(sampled, logprobs)
        return sampled, logprobs


class Batch:
    """Decodes several rows in one forward pass, through mlx_lm's BatchGenerator."""

    def __init__(self, network: Any, most_rows: int) -> None:
        self._rows: dict[int, Row] = {}
        self._generator = BatchGenerator(
            network, sampler=greedy, completion_batch_size=most_rows, prefill_batch_size=most_rows
        )

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def add(self, row: Row) -> None:
        """Take a row that is at rest. Its cache is copied into the batch."""
        (uid,) = self._generator.insert(
            [row.tokens[-1:]],
            max_tokens=[_NO_LIMIT],
            caches=[row.cache],
            all_tokens=[row.tokens[:-1]],
            samplers=[row.sampler],
            logits_processors=[row.processors],
        )
        row.cache = []
        row.strand.lend(partial(self._copy_of, uid))
        self._rows[uid] = row

    def _copy_of(self, uid: int) -> list[Any]:
        """Caches with all that was fed of a row, not computed yet."""
        return cast("list[Any]", self._generator.extract_cache([uid])[uid][0])

    def release(self, row: Row) -> Sampled | None:
        """The last token computed for a row: it is at rest once it has accepted it, and is taken out.

        None if it is at rest already, on its way into the batch.
        """
        running, uid = self._running, self._uid(row)
        if uid not in running.uids:
            return None
        place = running.uids.index(uid)
        token = row.dictated.popleft() if row.dictated else int(running._next_tokens[place].item())
        return Sampled(row, token, running._next_logprobs[place])

    def _uid(self, row: Row) -> int | None:
        return next((uid for uid, held in self._rows.items() if held is row), None)

    def remove(self, row: Row) -> Held | None:
        """Take a row out; None if it is not here."""
        uid = self._uid(row)
        if uid is None:
            return None
        del self._rows[uid]
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        # Else the batch as it was stays in memory until the next step: behind what is not computed yet, and
        # behind rows that are views of it, which is how mlx_lm takes padding away (lesson 26).
        mx.eval([cache.state for cache in caches])
        settle(self._running.prompt_cache)
        if not self._rows:
            self._forget_last_step()
        return Held(cast("list[Any]", caches), len(tokens))

    def _forget_last_step(self) -> None:
        """Else an empty batch keeps the log-probabilities of all rows that were in its last step."""
        self._running._current_tokens, self._running._current_logprobs = None, []

    @property
    def _running(self) -> Any:
        """What mlx_lm has no public way to reach; held by `tests/engine/test_batch.py`."""
        return self._generator._generation_batch  # pyright: ignore[reportPrivateUsage]

    def step(self) -> list[Sampled]:
        """One token for each row; rows that were just added give theirs from the next step on."""
        if not self._rows:
            return []
        self._dictate()
        _, responses = self._generator.next()
        if len(responses) < len(self._rows):
            # Rows have been copied in: what they were copied from goes before anybody asks for more memory.
            mx.eval([cache.state for cache in self._running.prompt_cache])
        return [Sampled(self._rows[one.uid], int(one.token), one.logprobs) for one in responses]

    def _dictate(self) -> None:
        """Put what rows dictate in the place of what was sampled for them: neither has been fed yet.

        mlx_lm has no public way to do this that leaves the caches of the batch alone.
        """
        dictating = {uid: row for uid, row in self._rows.items() if row.dictated}
        if not dictating:
            return
        running = self._running
        for place, uid in enumerate(running.uids):
            if uid in dictating:
                running._next_tokens[place] = dictating[uid].dictated.popleft()

    @property
    def nbytes(self) -> int:
        """Bytes of its caches, padding included."""
        return int(self._generator.prompt_cache_nbytes)

    def close(self) -> None:
        self._generator.close()


type Group = Solo | Batch


def fits(lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths, in tokens, may share a batch, which pads all to the longest.

    Padding costs memory and time like tokens do; a second batch reads all weights again at every step.
    """
    return padding(lengths) <= max(sum(lengths) // 2, _CHEAP_PADDING)


def padding(lengths: Sequence[int]) -> int:
    """Tokens that are added to rows of these lengths to make them equal."""
    return len(lengths) * max(lengths) - sum(lengths)


class Decoder:
    """All rows that are being decoded: alone, or in batches with others of a similar length.

    Args:
        batches: whether the caches of this network can be merged; if not, rows take turns.
    """

    def __init__(self, network: Any, *, most_rows: int, batches: bool) -> None:
        self._network = network
        self._most_rows = most_rows
        self._can_batch = batches
        self._resting: list[Row] = []
        self._solos: list[Solo] = []
        self._batches: list[Batch] = []

    @property
    def rows(self) -> list[Row]:
        batched = (row for batch in self._batches for row in batch.rows)
        return [*self._resting, *(solo.row for solo in self._solos), *batched]

    def holds(self, row: Row) -> bool:
        return any(one is row for one in self.rows)

    @property
    def batched_bytes(self) -> int:
        """Bytes of the caches of all batches, padding included."""
        return sum(batch.nbytes for batch in self._batches)

    def add(self, row: Row) -> None:
        """Take a row that is at rest; it decodes from the next step on."""
        self._resting.append(row)

    def remove(self, row: Row) -> Held:
        """Take a row out. Its caches hold every token that was fed: all but the last, if it is at rest."""
        if any(one is row for one in self._resting):
            self._resting = [one for one in self._resting if one is not row]
            return Held(row.cache, len(row.tokens) - 1)
        if any(solo.row is row for solo in self._solos):
            self._solos = [solo for solo in self._solos if solo.row is not row]
            return Held(row.cache, len(row.tokens))
        for batch in self._batches:
            if held := batch.remove(row):
                return held
        return Held([], 0)

    def release(self, row: Row) -> tuple[Held, Sampled | None]:
        """Take a row out that will go on later: its caches, and its next token if that is computed already.

        Once it has accepted that token it is at rest, and its caches hold all tokens but this one.
        """
        sampled = None
        for group in self.groups:
            if any(one is row for one in group.rows):
                sampled = group.release(row)
        return self.remove(row), sampled

    @property
    def groups(self) -> list[Group]:
        """Rows that decode: each group takes its step by itself."""
        return [*(batch for batch in self._batches if len(batch)), *self._solos]

    def settle(self) -> list[Sampled]:
        """Bring lone rows to rest that can share a batch with a newcomer, which starts in the next step."""
        self._close_empty_batches()
        return self._settle_solos() if self._resting and self._can_batch else []

    @property
    def next_to_start(self) -> Row | None:
        return self._resting[0] if self._resting else None

    def start_next(self) -> None:
        """Let the first row that is at rest decode. If that fails, it is still there, to be taken out."""
        self._start(self._resting[0], self._resting[1:])
        del self._resting[0]

    def drop(self, group: Group) -> list[Row]:
        """Forget a group whose step has failed half way, and what its rows have computed."""
        rows = group.rows
        if isinstance(group, Batch):
            self._batches.remove(group)
            with suppress(RuntimeError):
                group.close()
        else:
            self._solos.remove(group)
        return rows

    def abandon(self) -> list[Row]:
        """Drop every row and start afresh."""
        rows, batches = self.rows, self._batches
        self._resting, self._solos, self._batches = [], [], []
        for batch in reversed(batches):
            # A device that has failed does not even wait for its work.
            with suppress(RuntimeError):
                batch.close()
        return rows

    def close(self) -> None:
        # Each remembers the limit on wired memory that it has found: the first one, the original.
        for batch in reversed(self._batches):
            batch.close()

    def _close_empty_batches(self) -> None:
        """The first one stays, for the limit that it remembers."""
        for batch in [batch for batch in self._batches[1:] if not len(batch)]:
            self._batches.remove(batch)
            batch.close()

    def _settle_solos(self) -> list[Sampled]:
        """Bring lone rows to rest that can share a batch with a newcomer."""
        joining = [solo for solo in self._solos if any(_fit([solo.row, row]) for row in self._resting)]
        sampled = [solo.release(solo.row) for solo in joining]
        self._resting = [*(solo.row for solo in joining), *self._resting]
        self._solos = [solo for solo in self._solos if solo not in joining]
        return sampled

    def _start(self, row: Row, others: list[Row]) -> None:
        batch = self._batch_for(row, others) if self._can_batch else None
        if batch is None:
            self._solos.append(Solo(self._network, row))
        else:
            batch.add(row)

    def _batch_for(self, row: Row, others: list[Row]) -> Batch | None:
        """The batch with rows that the row fits best; an empty one, if another row will follow."""
        fitting = [batch for batch in self._batches if len(batch) and _fit([*batch.rows, row])]
        if fitting:
            return min(fitting, key=lambda batch: padding([len(one.tokens) for one in (*batch.rows, row)]))
        if not any(_fit([row, other]) for other in others):
            return None
        empty = next((batch for batch in self._batches if not len(batch)), None)
        if empty is None:
            empty = Batch(self._network, self._most_rows)
            self._batches.append(empty)
        return empty


def _fit(rows: Sequence[Row]) -> bool:
    return not any(row.is_alone for row in rows) and fits([len(row.tokens) for row in rows])
