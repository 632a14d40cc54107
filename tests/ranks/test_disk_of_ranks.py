"""Ranks with a disk each: all give what the one with the least has. Both ranks are in this process."""

from __future__ import annotations

import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

from start_llm.cache.buffers import KVShape
from start_llm.cache.disk.disk_tier import DiskAccess, DiskTier
from start_llm.cache.disk.followed_restores import FollowedRestores
from start_llm.cache.disk.shared_restore import RestorePeers
from start_llm.cache.eviction import EvictionLimits
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.events import Restored
from start_llm.engine.inbox import DiskNews, StopRequest
from start_llm.engine.resources import EngineResources
from start_llm.engine.step_plan import PlanClock
from start_llm.ranks.follower import Follower, LeaderMessages, OutOfStep
from start_llm.ranks.wire import SentEnd, SentRestored
from start_llm.storage.disk_thread import DiskThread
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics
from tests.cache.conversations import PAGE, filled
from tests.cache.disk import ROOMY, settled
from tests.cache.integrity import check_cache
from tests.engine.harness import Stepper, Watched, engine_request, uncached_resources
from tests.engine.test_guards import Counting
from tests.engine.test_step_plans import kept
from tests.ranks.test_leader_and_follower import Pair

rng = random.Random(7)
PROMPT = tuple(rng.randrange(400) for _ in range(5 * PAGE + 9))
REPLY = 6
_CATCHES_UP_S = 5
NEXT = (*PROMPT, *((PROMPT[-1] + place) % 400 for place in range(1, REPLY + 1)), 399, 1, 2)
"""The next turn: the network counts."""


class Shard:
    """A rank's cache, with a disk of its own."""

    def __init__(self, rank: int, folder: Path, peers: RestorePeers, *, has_state: bool, budget: int) -> None:
        self.clock, self.disk, self.metrics = PlanClock(), DiskMetrics(), CacheMetrics()
        self.errors: list[Exception] = []
        self.lines: list[str] = []
        network = Counting(has_state=has_state)
        layers = Layers(network)
        self.cache = PromptCache(
            layers,
            limits=EvictionLimits(budget_bytes=budget),
            page_size=PAGE,
            metrics=self.metrics,
            identity=f"rank {rank}".encode(),
            clock=self.clock,
        )
        self.thread = DiskThread(self.errors.append)
        self.tier = DiskTier(folder, ROOMY, self.thread, self.disk, self.lines.append)
        shape = KVShape.of(layers, filled(layers, network))
        self.cache.attach_disk(DiskAccess(self.tier, shape, peers=peers, is_shared=True))
        self.thread.start()
        assert self.tier.start()
        plain = uncached_resources(network, lambda token: b"a", frozenset(), max_sequences=3, batches=True)
        self.resources: EngineResources = replace(plain, cache=self.cache, clock=self.clock)

    def close(self) -> None:
        assert self.thread.close(10)
        self.tier.close()
        assert not self.errors


@dataclass
class Ranks:
    """Rank 0 with its engine, and a follower that does what was sent whenever it is asked to."""

    pair: Pair
    ours: Shard
    theirs: Shard
    engine: Stepper
    follower: Follower
    incoming: LeaderMessages

    def step(self) -> None:
        with mx.stream(generation_stream):
            self.engine.step()
            self.catch_up()

    def catch_up(self) -> None:
        with mx.stream(generation_stream):
            while (message := self.incoming.next(0.005)) is not None:
                self.follower.do(message)
                self.follower.keep_on_disk(self.incoming.reply)
            self.follower.keep_on_disk(self.incoming.reply)

    def say(self, prompt: tuple[int, ...]) -> Watched:
        reply = self.engine.submit(engine_request(prompt, REPLY, boundaries=(len(prompt),)))
        for _ in range(2000):
            self.step()
            if reply.look() and reply.ending:
                break
        assert reply.tokens == [(prompt[-1] + place) % 400 for place in range(1, REPLY + 1)]
        end = time.monotonic() + _CATCHES_UP_S
        while kept(self.theirs.cache) != kept(self.ours.cache) and time.monotonic() < end:
            self.catch_up()  # on a busy machine the last message may still be on its way
        for shard in (self.ours, self.theirs):
            check_cache(shard.cache)
        assert kept(self.theirs.cache) == kept(self.ours.cache)
        assert self.theirs.cache.free_bytes == self.ours.cache.free_bytes
        return reply

    def stop(self) -> None:
        """End as a service does, with what is not on the disks yet."""
        self.engine.inbox.put(StopRequest(10))
        with mx.stream(generation_stream):
            self.engine.loop.step()
            self.engine.loop.finish()
            self.pair.leader.close()
            while not isinstance(message := self.incoming.next(5), SentEnd):
                if message:
                    self.follower.do(message)
                self.follower.keep_on_disk(self.incoming.reply)


@contextmanager
def ranks(folder: Path, *, has_state: bool = False, budget: int = 10**9) -> Generator[Ranks]:
    pair = Pair()
    ours = Shard(0, folder / "ours", pair.leader, has_state=has_state, budget=budget)
    theirs = Shard(1, folder / "theirs", RestorePeers(), has_state=has_state, budget=budget)
    try:
        pair.watch()
        engine = Stepper(ours.resources, clock=ours.clock, followers=pair.leader, agree=pair.say)

        def note_disk() -> None:
            engine.inbox.put(DiskNews())

        ours.tier.traffic.notify = note_disk
        follower = Follower(replace(theirs.resources, agree=pair.hear))
        incoming = LeaderMessages(pair.far, lambda: None)
        yield Ranks(pair, ours, theirs, engine, follower, incoming)
    finally:
        ours.close()
        theirs.close()
        pair.near.close()
        pair.far.close()


def restored(reply: Watched) -> int:
    return next(event.tokens for event in reply.seen if isinstance(event, Restored))


def files(folder: Path, kind: str = "pages") -> list[Path]:
    """The files of a folder, the beginning of a conversation first."""
    by_parent = {path.stem[:32]: path for path in (folder / kind).rglob("*.safetensors")}
    keys = {path.stem[33:] for path in by_parent.values()}
    (key,) = set(by_parent) - keys
    chain: list[Path] = []
    while key in by_parent:
        chain.append(by_parent[key])
        key = by_parent[key].stem[33:]
    return chain


@pytest.fixture(params=[False, True], ids=["plain", "state"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    """A folder with a conversation that both ranks have written, and whether its network has a state."""
    with ranks(tmp_path, has_state=request.param) as both:
        both.say(PROMPT)
        both.stop()
    return tmp_path, request.param


def test_after_a_restart_both_go_on_from_their_disks(stored):
    folder, has_state = stored
    with ranks(folder, has_state=has_state) as both:
        reply = both.say(NEXT)
        assert restored(reply) == len(PROMPT) + REPLY
        for shard in (both.ours, both.theirs):
            assert shard.disk.restored_tokens == restored(reply)
            assert not shard.disk.rejected
        both.stop()


def test_keys_of_ranks_are_their_own(stored):
    folder, _ = stored
    ours, theirs = (
        {path.name for path in (folder / name).rglob("*.safetensors")} for name in ("ours", "theirs")
    )
    assert len(ours) == len(theirs) > 0
    assert not ours & theirs


def damage_end(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [Path.unlink, damage_end])
@pytest.mark.parametrize("rank", ["ours", "theirs"])
@pytest.mark.sample(2)
def test_what_one_lacks_all_compute_and_write_again(tmp_path, rank, damage):
    with ranks(tmp_path) as both:
        both.say(PROMPT)
        both.stop()
    before = tmp_path / "before"
    before.hardlink_to(files(tmp_path / "ours")[3])
    damage(files(tmp_path / rank)[3])
    with ranks(tmp_path) as both:
        assert restored(both.say(NEXT)) == 3 * PAGE
        both.stop()
    assert len(files(tmp_path / "ours")) == len(files(tmp_path / "theirs"))
    assert not files(tmp_path / "ours")[3].samefile(before), "it is worth nothing alone, so it is new"
    with ranks(tmp_path) as both:
        assert restored(both.say((*NEXT, 5, 6))) >= len(NEXT)
        both.stop()


def test_where_a_follower_lacks_the_first_file_all_compute_and_go_on(tmp_path):
    with ranks(tmp_path) as both:
        both.say(PROMPT)
        both.stop()
    files(tmp_path / "theirs")[0].unlink()
    with ranks(tmp_path) as both:
        assert restored(both.say(NEXT)) == 0
        both.stop()
    assert len(files(tmp_path / "ours")) == len(files(tmp_path / "theirs"))


@pytest.mark.thorough
def test_a_state_that_one_lacks_gives_way_to_an_earlier_one(tmp_path):
    with ranks(tmp_path, has_state=True) as both:
        both.say(PROMPT)
        both.say(NEXT)
        both.stop()
    newest = max(
        (tmp_path / "theirs" / "states").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns
    )
    alone = len(list((tmp_path / "theirs" / "states").rglob("*.safetensors")))
    assert alone > 1
    newest.unlink()
    with ranks(tmp_path, has_state=True) as both:
        reply = both.say((*NEXT, 8, 9))
        assert 0 < restored(reply) < len(NEXT) + REPLY
        both.stop()


@pytest.mark.thorough
def test_what_a_disk_has_does_not_decide_what_is_evicted(tmp_path, monkeypatch):
    """One disk may be slower, or have lost files: ranks would evict something else."""
    with ranks(tmp_path, budget=200_000) as both:
        write_back = both.ours.cache.disk.write_back
        assert write_back
        monkeypatch.setattr(write_back, "has", lambda item: len(item.tokens) % 2 == 0)
        for place in range(8):
            both.say((*PROMPT[: 20 * place + 3], *(399 - token for token in PROMPT[: 150 - 7 * place])))
        assert both.ours.metrics.evictions > 4
        both.stop()


class Silence:
    """A follower whose disk does not answer until it is asked to."""

    def __init__(self, followed: FollowedRestores, monkeypatch: pytest.MonkeyPatch) -> None:
        self._real = followed.go_on
        self._kept: dict[int, int] = {}
        self.is_over = False
        monkeypatch.setattr(followed, "go_on", self.go_on)

    def go_on(self) -> dict[int, int]:
        self._kept |= self._real()
        answers, self._kept = ({}, self._kept) if not self.is_over else (self._kept, {})
        return answers


@pytest.mark.thorough
def test_nobody_waits_for_the_disk_of_another_rank_that_does_not_answer(stored, monkeypatch):
    folder, has_state = stored
    monkeypatch.setattr("start_llm.engine.disk_waits._LEAST_PATIENCE_S", 0.05)
    monkeypatch.setattr("start_llm.engine.disk_waits._LAST_FILE_S", 0.05)
    with ranks(folder, has_state=has_state) as both:
        followed, restorer = both.theirs.cache.disk.followed, both.ours.cache.disk.restorer
        assert followed and restorer
        silence = Silence(followed, monkeypatch)
        assert restored(both.say(NEXT)) == 0
        assert restorer._running[0].read.is_over
        assert both.ours.tier.is_hanging(), "the next one computes at once"
        silence.is_over = True
        both.catch_up()
        settled(lambda: both.pair.leader.least_restored(1, 9) is not None)
        both.engine.inbox.put(DiskNews())
        both.step()
        assert not restorer._running
        assert not both.ours.tier.is_hanging()
        assert kept(both.theirs.cache) == kept(both.ours.cache)
        both.stop()


def test_a_follower_without_a_disk_does_not_restore_what_rank_0_does():
    resources = uncached_resources(
        Counting(has_state=False), lambda token: b"a", frozenset(), 1, batches=True
    )
    with pytest.raises(OutOfStep, match="this rank has none"):
        Follower(resources).do(SentRestored(1, 2, 0.5))
