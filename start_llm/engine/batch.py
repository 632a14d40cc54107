"""Decoding: one step makes one token for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from start_llm.engine import merging
from start_llm.engine.admission import planned_tokens
from start_llm.engine.row import Row, Sampled
from start_llm.engine.sampling import BatchSampler
from start_llm.engine.scores import Scores

_STEPS_BETWEEN_CLEARS = 256
_CHEAP_PADDING = 2048
"""Tokens. The KV of so many is small beside the weights of any model."""


class Held(NamedTuple):
    """Caches of a row that is taken out, and how many of its tokens they hold."""

    caches: list[Any]
    tokens: int


class _Launched(NamedTuple):
    """A step that is being computed.

    Attributes:
        tokens: sampled ids [rows].
        chances: [rows], that they had.
        scores: of the rows that ask for them.
    """

    tokens: mx.array
    chances: mx.array
    scores: list[Scores | None]


class Group:
    """Rows that decode in one forward pass.

    The next step is already being computed while the tokens of one are handed out.

    One row keeps its own caches; those of several are merged. Rows that have joined are fed from the next
    step on, and stand behind the others.
    """

    def __init__(self, network: Any, row: Row) -> None:
        self._network = network
        self._rows = [row]
        self._caches: list[Any] = row.cache
        self._contexts: dict[int, TokenBuffer] = {}
        self._sampler: BatchSampler | None = None
        self._steps = 0
        self._next: _Launched | None = None
        self._next = self._launch(_last_tokens([row]))

    @property
    def rows(self) -> list[Row]:
        return list(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of merged caches, padding included. Those of one row are its strand's."""
        return sum(cache.nbytes for cache in self._caches) if len(self._rows) > 1 else 0

    def step(self) -> list[Sampled]:
        """One token for each row; rows that have just joined give theirs from the next step on."""
        fed, chances, scores = self._take_next()
        stepped, newcomers = self._rows[: len(scores)], self._rows[len(scores) :]
        self._next = self._launch(mx.concatenate([fed, _last_tokens(newcomers)]) if newcomers else fed)
        self._steps += 1
        if self._steps % _STEPS_BETWEEN_CLEARS == 0:
            mx.clear_cache()
            self._plan_growth()
        found = zip(stepped, cast("list[int]", fed.tolist()), _numbers(chances), scores, strict=True)
        return [_sampled(*each) for each in found]

    def wait(self) -> None:
        """Until the step that is being computed is done."""
        if self._next:
            mx.eval(self._next.tokens)

    def join(self, row: Row) -> None:
        """Take a row that is at rest. If this fails, nobody in the group has caches any more."""
        if len(self._rows) == 1:
            lone = self._rows[0]
            self._caches = merging.merge([self._caches, row.cache])
            self._lend(lone)
        else:
            merging.extend(self._caches, row.cache)
        self._rows.append(row)
        self._lend(row)
        self._plan_growth()
        self._sampler = None

    def _plan_growth(self) -> None:
        """Merged caches grow by what the rows may still write, as far as there is memory planned for that."""
        if len(self._rows) > 1:
            merging.grow_by(self._caches, growth(self._rows))
            for row in self._rows:
                row.width = width(self._rows)

    def _lend(self, row: Row) -> None:
        row.cache = []
        row.strand.lend(partial(self._copy_of, row))

    def _copy_of(self, row: Row) -> list[Any]:
        """Caches with all that was fed of a row, not computed yet."""
        return merging.copy_of(self._caches, self._place(row))

    def _place(self, row: Row) -> int:
        return next(place for place, one in enumerate(self._rows) if one is row)

    def release(self, row: Row) -> Sampled | None:
        """The last token computed for a row: it is at rest once it has accepted it, and is taken out.

        None if it is at rest already, since it has just joined.
        """
        place = self._place(row)
        if self._next is None or place >= len(self._next.scores):
            return None
        scores = self._next.scores[place]
        if row.dictated:
            return _sampled(row, row.dictated.popleft(), 1.0, scores)
        token = cast("int", self._next.tokens[place].item())
        return _sampled(row, token, cast("float", self._next.chances[place].item()), scores)

    def remove(self, row: Row) -> Held:
        """Take a row out. Its caches hold all of its tokens, but the last one if it has just joined."""
        place = self._place(row)
        is_fed = self._next is not None and place < len(self._next.scores)
        caches = self._take_out(place) if len(self._rows) > 1 else self._caches
        del self._rows[place]
        self._contexts.pop(id(row), None)
        self._forget_next(place)
        self._sampler = None
        row.width = 0
        if len(self._rows) == 1:
            self._give_back(self._rows[0])
        self._plan_growth()
        return Held(caches, len(row.tokens) if is_fed else len(row.tokens) - 1)

    def _take_out(self, place: int) -> list[Any]:
        return merging.take_out(self._caches, place, len(self._rows))

    def _give_back(self, row: Row) -> None:
        """The last row of a batch has caches of its own again, which are faster."""
        merging.unmerge(self._caches)
        row.cache, row.width = self._caches, 0
        row.strand.take_back(self._caches)

    def _forget_next(self, place: int) -> None:
        if self._next is None or place >= len(self._next.scores):
            return
        kept = [other for other in range(len(self._next.scores)) if other != place]
        scores = [self._next.scores[other] for other in kept]
        tokens, chances, _ = self._next
        self._next = _Launched(tokens[mx.array(kept)], chances[mx.array(kept)], scores) if kept else None

    def _take_next(self) -> _Launched:
        """What was sampled, or what rows dictate in its place: neither has been fed yet."""
        if self._next is None:
            return _Launched(mx.array([], dtype=mx.uint32), mx.array([]), [])
        tokens, chances, scores = self._next
        rows = self._rows[: len(scores)]
        if any(row.dictated for row in rows):
            is_dictated = mx.array([bool(row.dictated) for row in rows])
            dictated = [row.dictated.popleft() if row.dictated else 0 for row in rows]
            tokens = mx.where(is_dictated, mx.array(dictated, dtype=mx.uint32), tokens)
            chances = mx.where(is_dictated, 1, chances)
        return _Launched(tokens, chances, scores)

    def _launch(self, tokens: mx.array) -> _Launched:
        """Feed `tokens` [rows] and sample; nothing is awaited but what guides have to know."""
        logits = self._processed(tokens, self._network(tokens[:, None], cache=self._caches)[:, -1, :])
        if self._sampler is None:
            self._sampler = BatchSampler([row.chooser for row in self._rows], logits.shape[-1])
        sampled, chances = self._sampler(logits)
        scores = [self._scores(place, logits, sampled) for place in range(len(self._rows))]
        mx.async_eval(sampled, chances, [one.arrays for one in scores if one])
        return _Launched(sampled, chances, scores)

    def _scores(self, place: int, logits: mx.array, sampled: mx.array) -> Scores | None:
        wanted = self._rows[place].generation.job.top_logprobs
        return None if wanted is None else Scores(logits[place], sampled[place], wanted)

    def _processed(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [rows, vocabulary] after the processors of the rows that have any."""
        if not any(row.processors for row in self._rows):
            return logits
        if any(row.is_guided for row in self._rows):
            # A guide waits for the token that is fed: by then the device has the network to compute.
            mx.async_eval(logits)
        return mx.concatenate(
            [
                self._processed_row(row, tokens[place : place + 1], logits[place : place + 1])
                for place, row in enumerate(self._rows)
            ]
        )

    def _processed_row(self, row: Row, token: mx.array, logits: mx.array) -> mx.array:
        if not row.processors:
            return logits
        if id(row) not in self._contexts:
            self._contexts[id(row)] = TokenBuffer(row.tokens[:-1])
        context = self._contexts[id(row)].update_and_fetch(token)
        for processor in row.processors:
            logits = processor(context, logits)
        return logits


def _last_tokens(rows: Sequence[Row]) -> mx.array:
    """Of rows at rest: what they are fed next."""
    return mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)


def _sampled(row: Row, token: int, chance: float, scores: Scores | None) -> Sampled:
    return Sampled(row, token, row.chooser.surprisal(chance), scores.told(token) if scores else None)


def _numbers(array: mx.array) -> list[float]:
    return cast("list[float]", array.tolist())


def fits(lengths: Sequence[int]) -> bool:
    """Whether rows of these lengths, in tokens, may share a batch, which pads all to the longest.

    Padding costs memory and time like tokens do; a second batch reads all weights again at every step.
    """
    return padding(lengths) <= max(sum(lengths) // 2, _CHEAP_PADDING)


def growth(rows: Sequence[Row]) -> int:
    """Tokens for which the row that may still write most has memory; at least one."""
    return max(1, *(planned_tokens(row.generation.job, len(row.tokens)) - len(row.tokens) for row in rows))


def width(rows: Sequence[Row]) -> int:
    """Tokens that each of these rows takes in a batch, until the next growth is planned."""
    return max(_lengths(rows)) + growth(rows)


def padding(lengths: Sequence[int]) -> int:
    """Tokens that are added to rows of these lengths to make them equal."""
    return len(lengths) * max(lengths) - sum(lengths)


class Decoder:
    """All rows that are being decoded: alone, or in groups with others of a similar length.

    Args:
        batches: whether rows of this network may share a pass; if not, they take turns.
        has_room: whether there is memory for sequences of these lengths, in tokens: a batch costs as much as
            if all of its rows were as long as the longest, and wrote as much.
    """

    def __init__(
        self, network: Any, batches: bool, has_room: Callable[[Sequence[int]], bool] = lambda _: True
    ) -> None:
        self._network = network
        self._can_batch = batches
        self._has_room = has_room
        self._resting: list[Row] = []
        self._groups: list[Group] = []
        self._joining: Group | None = None

    @property
    def rows(self) -> list[Row]:
        return [*self._resting, *(row for group in self._groups for row in group.rows)]

    @property
    def groups(self) -> list[Group]:
        """Rows that decode: each group takes its step by itself."""
        return list(self._groups)

    def holds(self, row: Row) -> bool:
        return any(one is row for one in self.rows)

    @property
    def batched_bytes(self) -> int:
        """Bytes of the caches of all batches, padding included."""
        return sum(group.nbytes for group in self._groups)

    def wait(self) -> None:
        """Until all steps that are being computed are done."""
        for group in self._groups:
            group.wait()

    def add(self, row: Row) -> None:
        """Take a row that is at rest; it decodes from the next step on."""
        self._resting.append(row)

    def remove(self, row: Row) -> Held:
        """Take a row out. Its caches hold every token that was fed: all but the last, if it is at rest."""
        if any(one is row for one in self._resting):
            self._resting = [one for one in self._resting if one is not row]
            return Held(row.cache, len(row.tokens) - 1)
        group = self._group_of(row)
        if group is None:
            return Held([], 0)
        if len(group.rows) == 1:
            self._groups.remove(group)
        return group.remove(row)

    def release(self, row: Row) -> tuple[Held, Sampled | None]:
        """Take a row out that will go on later: its caches, and its next token if that is computed already.

        Once it has accepted that token it is at rest, and its caches hold all tokens but this one.
        """
        group = self._group_of(row)
        sampled = group.release(row) if group else None
        return self.remove(row), sampled

    def _group_of(self, row: Row) -> Group | None:
        return next((group for group in self._groups if any(one is row for one in group.rows)), None)

    @property
    def next_to_start(self) -> Row | None:
        return self._resting[0] if self._resting else None

    def start_next(self) -> None:
        """Let the first row that is at rest decode. If that fails, see `drop_starting`."""
        row = self._resting[0]
        self._joining = self._group_for(row) if self._can_batch else None
        if self._joining:
            self._joining.join(row)
        else:
            self._groups.append(Group(self._network, row))
        self._joining = None
        del self._resting[0]

    def drop_starting(self) -> list[Row]:
        """Forget the row whose start has failed, and the group that it was to join: they have no caches."""
        failed, self._joining = self._joining, None
        row = self._resting.pop(0)
        return [row, *(one for one in (self.drop(failed) if failed else []) if one is not row)]

    def drop(self, group: Group) -> list[Row]:
        """Forget a group whose step has failed half way, and what its rows have computed."""
        self._groups.remove(group)
        return group.rows

    def abandon(self) -> list[Row]:
        """Drop every row and start afresh."""
        rows = self.rows
        self._resting, self._groups, self._joining = [], [], None
        return rows

    def _group_for(self, row: Row) -> Group | None:
        """The group whose rows the row fits best."""
        fitting = [group for group in self._groups if self._may_join(row, group)]
        return min(fitting, key=lambda group: padding(_lengths([*group.rows, row])), default=None)

    def _may_join(self, row: Row, group: Group) -> bool:
        rows = [*group.rows, row]
        if any(one.is_alone for one in rows) or not fits(_lengths(rows)):
            return False
        others = [one.rows for one in self._groups if one is not group]
        return self._has_room([width(some) for some in (rows, *others) for _ in some])


def _lengths(rows: Sequence[Row]) -> list[int]:
    return [len(row.tokens) for row in rows]
