"""Decoding: one step makes one token for each row."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from start_llm.engine.row import Row, Sampled
from start_llm.engine.sampling import greedy

_STEPS_BETWEEN_CLEARS = 256
_NO_LIMIT = 2**31 - 1


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

    def step(self) -> Sampled:
        token, logprobs = self._take_next()
        self._next = self._launch(token)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
        return Sampled(self.row, cast("int", token.item()), logprobs[0])

    def release(self) -> Sampled:
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
        self._rows[uid] = row

    def remove(self, row: Row) -> Held | None:
        """Take a row out; None if it is not here."""
        uid = next((uid for uid, held in self._rows.items() if held is row), None)
        if uid is None:
            return None
        del self._rows[uid]
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        return Held(cast("list[Any]", caches), len(tokens))

    def step(self) -> list[Sampled]:
        """One token for each row; rows that were just added give theirs from the next step on."""
        if not self._rows:
            return []
        self._dictate()
        _, responses = self._generator.next()
        return [Sampled(self._rows[one.uid], int(one.token), one.logprobs) for one in responses]

    def _dictate(self) -> None:
        """Put what rows dictate in the place of what was sampled for them: neither has been fed yet.

        mlx_lm has no public way to do this that leaves the caches of the batch alone. What it does with
        `_next_tokens` is held by `tests/engine/test_batch.py`.
        """
        dictating = {uid: row for uid, row in self._rows.items() if row.dictated}
        if not dictating:
            return
        running: Any = self._generator._generation_batch  # pyright: ignore[reportPrivateUsage]
        for place, uid in enumerate(running.uids):
            if uid in dictating:
                running._next_tokens[place] = dictating[uid].dictated.popleft()

    def close(self) -> None:
        self._generator.close()


class Decoder:
    """All rows that are being decoded: alone while there is one, in a batch once there are several.

    Args:
        batches: whether the caches of this network can be merged; if not, rows take turns.
    """

    def __init__(self, network: Any, *, most_rows: int, batches: bool) -> None:
        self._network = network
        self._most_rows = most_rows
        self._batches = batches
        self._resting: list[Row] = []
        self._solos: list[Solo] = []
        self._batch = Batch(network, most_rows)

    @property
    def rows(self) -> list[Row]:
        return [*self._resting, *(solo.row for solo in self._solos), *self._batch.rows]

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
        return self._batch.remove(row) or Held([], 0)

    def step(self) -> list[Sampled]:
        if self._resting and self._solos and self._batches:
            return self._settle_solos()
        self._start_resting()
        return [*self._batch.step(), *(solo.step() for solo in self._solos)]

    def abandon(self) -> list[Row]:
        """Drop every row and start afresh, after a step that failed half way."""
        rows = self.rows
        self._batch.close()
        self._resting, self._solos, self._batch = [], [], Batch(self._network, self._most_rows)
        return rows

    def close(self) -> None:
        self._batch.close()

    def _settle_solos(self) -> list[Sampled]:
        """Bring lone rows to rest, so that they can join a batch with the newcomers."""
        settled = [solo.release() for solo in self._solos]
        self._resting = [*(solo.row for solo in self._solos), *self._resting]
        self._solos = []
        return settled

    def _start_resting(self) -> None:
        together = self._batches and len(self._batch) + len(self._resting) > 1
        while self._resting:
            # Only a row that has started leaves the list: if its start fails, `abandon` still finds it.
            if together:
                self._batch.add(self._resting[0])
            else:
                self._solos.append(Solo(self._network, self._resting[0]))
            del self._resting[0]
