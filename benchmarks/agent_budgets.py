"""What a cache of a size has to compute of recorded sessions, without a server: a part of `agents.py`."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from benchmarks.agent_traces import BLOCK, in_time, recorded_sessions
from benchmarks.harness import row, table
from start_llm.cache.eviction import EvictionLimits
from tests.cache.desk import ALL_NETWORKS, Clock, prompt_cache
from tests.cache.fakes import BYTES_OF_A_TOKEN

type Numbers = npt.NDArray[np.int32]

_ALL_OF_IT_S = 1e9
"""For trimming what is kept: until nothing is left of it."""


@dataclass(frozen=True)
class Prompt:
    """A recorded prompt, in blocks.

    Attributes:
        at: its time, in seconds.
        blocks: numbers of its blocks and of those of its reply; equal ones follow equal ones.
        length: without the reply.
        ends: of its messages.
    """

    at: float
    blocks: Numbers
    length: int
    ends: tuple[int, ...]

    def missing(self, restored: int) -> int:
        """Blocks to compute, one at least, if so many from its beginning on are kept."""
        return max(self.length - restored, 1)


def prompts_of(sessions: Sequence[Mapping[str, Any]], at_once: int, block: int) -> list[Prompt]:
    """Return the prompts of recorded sessions in the order in which `traces` sends them.

    Args:
        block: recorded tokens of a block. What is less than a block is left out, and prompts begin alike up
            to the last message that they share as a whole.
    """
    asked: list[list[Prompt]] = [[] for _ in sessions]
    prompts, numbered = list[Prompt](), 0
    for at, number in in_time(sessions, at_once):
        before, requests = asked[number], sessions[number]["requests"]
        _, parent, shared, tokens, reply = requests[len(before)]
        length = max(tokens // block, 1)
        known, ends = np.empty(0, np.int32), [sessions[number]["instructions"] // block]
        if parent >= 0:
            spoken, ends = before[parent].blocks, [*before[parent].ends, len(before[parent].blocks)]
            goes_on = shared >= requests[parent][3] - BLOCK
            most = len(spoken) if goes_on else shared // block
            ends = [end for end in ends if end <= min(most, length)]
            known = spoken[: max(ends, default=0)]
        new = length + reply // block - len(known)
        blocks = np.concatenate([known, np.arange(numbered, numbered + new, dtype=np.int32)])
        numbered += new
        ends = tuple(sorted({*(end for end in ends if 0 < end < length), max(length - 1, 1)}))
        before.append(Prompt(at, blocks, length, ends))
        prompts.append(before[-1])
    return prompts


@dataclass(frozen=True)
class Counted:
    """Blocks that a cache computes, and that enter it: the first time, or again after they were evicted."""

    computed: int
    entered: int


def unavoidable(prompts: Sequence[Prompt]) -> int:
    """Blocks that a cache of any size has to compute."""
    return least_recently_used(prompts, _count(prompts)).computed


def least_recently_used(prompts: Sequence[Prompt], most: int) -> Counted:
    """Of a cache for so many blocks that evicts what was not used for the longest time, ends first."""
    groups = [np.full(len(prompt.blocks), number, np.int32) for number, prompt in enumerate(prompts)]
    return _played(prompts, groups, most, sign=1)


def best_possible(prompts: Sequence[Prompt], most: int) -> Counted:
    """Of a cache for so many blocks that knows which blocks are used latest from now on, and evicts those.

    No cache of this size computes less (Belady, A study of replacement algorithms, 1966).
    """
    latest = np.full(_count(prompts), len(prompts), np.int32)
    groups = list[Numbers]()
    for number in reversed(range(len(prompts))):
        blocks = prompts[number].blocks
        groups.append(latest[blocks])
        latest[blocks] = number
    return _played(prompts, groups[::-1], most, sign=-1)


def _count(prompts: Sequence[Prompt]) -> int:
    return max(int(prompt.blocks.max(initial=-1)) for prompt in prompts) + 1


def _played(prompts: Sequence[Prompt], groups: Sequence[Numbers], most: int, sign: int) -> Counted:
    """Play all prompts, one after the other. While it runs, a prompt is kept whatever its length.

    Args:
        groups: of each prompt's blocks, the number of the prompt that used them last, or will use them next;
            those of a number beyond all prompts are never used again.
        sign: 1: the lowest number is evicted first; -1: the highest.
    """
    held = computed = entered = 0
    is_kept = np.zeros(_count(prompts), np.bool_)
    group = np.zeros(len(is_kept), np.int32)
    victims = list[int]()
    for prompt, numbers in zip(prompts, groups, strict=True):
        blocks, before = prompt.blocks, is_kept[prompt.blocks]
        computed += prompt.missing(len(blocks) if before.all() else int(before.argmin()))
        group[blocks] = numbers
        is_kept[blocks] = numbers < len(prompts)
        held += int(is_kept[blocks].sum()) - int(before.sum())
        entered += int((~before).sum())
        for number in np.unique(numbers[numbers < len(prompts)]):
            heapq.heappush(victims, sign * int(number))
        while held > most:
            number = sign * victims[0]
            path = prompts[number].blocks[::-1]
            evicted = path[is_kept[path] & (group[path] == number)][: held - most]
            is_kept[evicted] = False
            held -= len(evicted)
            if not len(evicted):
                heapq.heappop(victims)
    return Counted(computed, entered)


def ours(prompts: Sequence[Prompt], most: int, network: str) -> int:
    """Return the blocks that the server's prompt cache has computed, with a budget for so many.

    A block is one token of a cache that computes nothing, and a page is four of them; a state takes as much
    as seven. Its clock is the recording's, pauses of more than ten minutes cut to that.
    """
    clock = Clock()
    cache, _ = prompt_cache(network, EvictionLimits(budget_bytes=most * BYTES_OF_A_TOKEN), clock)
    began, computed = clock.now, 0
    for prompt in prompts:
        clock.now = began + prompt.at
        ids = tuple(prompt.blocks.tolist())
        opened = cache.opener.open(ids[: prompt.length], b"", prompt.ends)
        sequence, positions = opened.seq_cache, opened.checkpoint_positions
        computed += prompt.length - len(sequence.tokens)
        for end in sorted({*(place for place in positions if place < prompt.length), prompt.length - 1}):
            chunk = ids[len(sequence.tokens) : end]
            sequence.caches[0].feed(chunk)
            cache.record_chunk(sequence, chunk, keep_state=end in positions)
        sequence.caches[0].feed(ids[len(sequence.tokens) :])
        cache.close(sequence, sequence.caches, ids)
        cache.tidy(_ALL_OF_IT_S)
    return computed


def budgets(
    _: Path,
    *,
    sessions: int = 40,
    requests: int = 120,
    together: Sequence[int] = (1, 4),
    kept: Sequence[int] = (2_000_000, 1_000_000, 200_000),
    block: int = 256,
    network: Annotated[Sequence[str], ALL_NETWORKS] = ("attention", "hybrid", "windows"),
    every: int = 1,
    file: Path | None = None,
) -> Iterator[str]:
    """What a cache that keeps so many tokens has to compute of recorded sessions, and what ours does.

    Counted in blocks of the recording, without a server: requests one after the other, in the order of
    `traces`. Figures are what no cache of any size can avoid over what is computed: by the best cache of that
    size, which knows the future; by one that evicts what was not used for the longest time; and by the
    server's own, which computes nothing here, with the budget in memory and the recording's times.

    Args:
        sessions: how many
        requests: most of each
        together: sessions that run at the same time
        kept: recorded tokens that the cache may keep
        block: recorded tokens of a block
        network: what is kept of a token, of a state, or both
        every: of so many sessions one is played
        file: recorded sessions in their first form, all of them, in place of the 40 that are at hand
    """
    recorded = recorded_sessions(file, sessions, requests, every)
    caches = " | ".join(("best", "oldest goes", "entered / new", *(f"ours, {name}" for name in network)))
    table(f"at once | requests | prompt tokens | unavoidable | kept | {caches}")
    for running in together:
        prompts = prompts_of(recorded, running, block)
        least, new = unavoidable(prompts), _count(prompts)
        for tokens in kept:
            most = tokens // block
            oldest, best = least_recently_used(prompts, most), best_possible(prompts, most)
            row(
                f"{running}",
                f"{len(prompts):,}",
                f"{sum(prompt.length for prompt in prompts) * block:,}",
                f"{least * block:,}",
                f"{tokens:,}",
                f"{least / best.computed:.3f}",
                f"{least / oldest.computed:.3f}",
                f"{oldest.entered / new:.2f}",
                *(f"{least / ours(prompts, most, name):.3f}" for name in network),
            )
            if best.computed > oldest.computed:
                yield f"{tokens} tokens: the best cache computes more than another"
