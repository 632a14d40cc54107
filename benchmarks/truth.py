"""Replies from the prompt cache, from batches and beside other models, and those of an engine without."""

import os
import random
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import truth_real, truth_types
from benchmarks.harness import Part, row, table
from benchmarks.networks import World, build_world
from scripts import tiny_vision_models
from start_llm.core.events import Finished
from tests.cache.conversations import (
    PLENTY,
    Cached,
    Talkers,
    Turn,
    chunked,
    memory_for,
    nearest_difference,
    reference,
    restored_difference,
    says_too,
    talk,
)
from tests.cache.disk import OnDisk
from tests.cache.integrity import check_cache
from tests.engine.harness import Stepper
from tests.ties import Tally

os.environ["MLX_ENABLE_TF32"] = "0"  # the limits are those of float32, not of a GPU's shorter matrices

FAMILIES = (
    *("qwen3", "llama", "qwen3_moe", "qwen3_5", "qwen3_next"),
    *("gemma3_text", "gpt_oss", "glm4_moe_lite"),
)
"""Plain twice, experts, recurrent layers twice, windows twice, latent."""
CHUNK = 512
TIGHT_TOKENS = 300
FRESH_LOOP = 0.5
RESTART = 0.25
MAX_DIFFERENCE = 1e-4


@dataclass
class Account:
    """The result of the conversations of one family.

    Attributes:
        prompt_tokens, restored_tokens: of requests that were answered to their end.
        disk_tokens: restored from the disk, for these requests and for others.
    """

    family: str
    conversations: int = 0
    requests: int = 0
    left_in_prompt: int = 0
    left_in_reply: int = 0
    replies: int = 0
    tally: Tally = field(default_factory=Tally)
    prompt_tokens: int = 0
    restored_tokens: int = 0
    disk_tokens: int = 0
    evictions: int = 0
    reused_in_place: int = 0
    difference: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list[str])

    def add(self, turn: Turn) -> None:
        self.requests += 1
        match turn.watched.ending:
            case Finished(usage=usage):
                self.prompt_tokens += usage.prompt
                self.restored_tokens += usage.cached
            case _ if turn.watched.tokens:
                self.left_in_reply += 1
            case _:
                self.left_in_prompt += 1

    def print(self) -> None:
        row(
            self.family,
            *(self.conversations, self.requests, f"{self.left_in_prompt} + {self.left_in_reply}"),
            *(self.replies, f"{self.tally.tokens:,}", self.tally.ties, len(self.wrong)),
            f"{self.restored_tokens / max(self.prompt_tokens, 1):.0%}",
            *(f"{count:,}" for count in (self.disk_tokens, self.evictions, self.reused_in_place)),
            *(f"{self.difference:.1e}", f"{self.seconds:.0f}"),
        )


class Conversation:
    """One cache, its clients, and an engine without a cache beside it.

    Args:
        folder: of the disk tier; None without one.
    """

    def __init__(
        self, world: World, rng: random.Random, budget: int, account: Account, folder: Path | None
    ) -> None:
        self._resources = world.resources
        self._rng = rng
        self._budget = budget
        self._account = account
        self._folder = folder
        self._talkers = Talkers(rng, world.pictures)
        self._engine = self._start()
        self._plain = Stepper(self._resources, longest_chunk=CHUNK)

    def _start(self) -> Cached:
        if self._folder is None:
            return Cached(self._resources, self._budget, longest_chunk=CHUNK)
        return OnDisk(self._resources, self._folder, budget=self._budget, idle_s=0, longest_chunk=CHUNK)

    def play(self, rounds: int) -> None:
        """Raises whatever breaks."""
        for _ in range(rounds):
            if self._rng.random() < FRESH_LOOP:
                self._engine.start_loop()
            for turn in talk(self._engine, self._talkers):
                self._account.add(turn)
                self._check(turn)
            self._check_logits()
            if self._folder and self._rng.random() < RESTART:
                self.end(writes=self._rng.random() < 0.5)
                self._engine = self._start()
        check_cache(self._engine.cache)

    def end(self, *, writes: bool = True) -> None:
        """Stop the engine and count what it did.

        Args:
            writes: what is not on the disk yet is written first, if there is one.
        """
        engine = self._engine
        if isinstance(engine, OnDisk):
            engine.stop() if writes else engine.kill()
            self._account.disk_tokens += engine.disk.restored_tokens
        self._account.evictions += engine.cached.evictions
        self._account.reused_in_place += engine.cached.reused_in_place
        if engine.metrics.failures:
            raise RuntimeError(f"the engine failed {engine.metrics.failures} times")

    def _check(self, turn: Turn) -> None:
        tokens = turn.watched.tokens
        if not turn.watched.generation.cancelled and len(tokens) != turn.length:
            raise RuntimeError(f"{len(tokens)} tokens instead of {turn.length}; {turn.watched.ending}")
        if not tokens:
            return
        self._account.replies += 1
        theirs = reference(self._plain, turn.prompt, turn.length, turn.images)
        ids = (*turn.prompt, *tokens)

        def plain_says_too(place: int) -> bool:
            begun = ids[: len(turn.prompt) + place]
            if turn.images:
                asked = replace(turn, prompt=begun, length=1)
                return any(tokens[place] in other.tokens for other in chunked(self._resources, asked))
            return says_too(self._resources.network, begun, tokens[place])

        if difference := self._account.tally.difference(tokens, theirs, plain_says_too):
            raise RuntimeError(f"a prompt of {len(turn.prompt)} tokens: {difference}")

    def _check_logits(self) -> None:
        ids = self._talkers.prompt()
        boundaries, images = self._talkers.boundaries(ids), self._talkers.images_of(ids)
        if images:
            turn = Turn(ids, boundaries, 1, None, images)
            difference = nearest_difference(self._resources, self._engine, turn)
        else:
            network = self._resources.network
            difference = restored_difference(network, self._engine.cache, ids, boundaries)
        self._account.difference = max(self._account.difference, difference)
        if not difference < MAX_DIFFERENCE:
            raise RuntimeError(f"logits of a prompt of {len(ids)} tokens differ by {difference:.1e}")


def replies(
    _: Path,
    *,
    conversations: int = 200,
    first: int = 0,
    rounds: int = 12,
    family: Sequence[str] = (),
    images: bool = False,
    restarts: bool = False,
    seed: int = 0,
) -> Iterator[str]:
    """An engine with a prompt cache says what one without says, in many random conversations.

    Tiny random float32 models of each family play with an engine that has a prompt cache: new chats, turns
    that go on, branches, edits in the middle, the same prompt again, clients that leave while their prompt is
    computed or their reply is written; one to four requests at once. Every second conversation has memory for
    about one prompt, so that something goes all the time. The cache is checked against itself after every
    step.

    Each reply is compared with what an engine without a cache says to the same prompt. They have to be equal
    token by token, but for near-ties: where the two highest logits of the reference are less than 0.001
    apart, either may win, and the rest of that reply is not compared. The same holds where the tie is inside
    of the network, of two experts for instance: where an engine without a cache says the other token too if
    it computes the same tokens in other pieces. At most one tie for each 5,000 tokens is allowed. After each
    round one more prompt is restored, and its logits may differ from those of a fresh computation by less
    than 0.0001: of the nearest of several, since computing a prompt in other pieces changes them too.

    What is wrong is printed with the number of its conversation; `--first` with that number plays it again.
    Chunks follow the measured speed, so a second run is not the same in every detail.

    Args:
        conversations: of each family
        first: number of the first conversation
        rounds: of each conversation
        images: models that see; most prompts have images, and log-probabilities of likely tokens are compared
        restarts: the cache has a disk tier; one round of four ends with a cache that is stopped, or killed
    """
    table(
        "family | conversations | requests | left in prompt + in reply | replies compared | "
        "tokens compared | ties | wrong | restored tokens | from the disk | evictions | hand-overs | "
        "largest logit difference | seconds"
    )
    for name in family or (tiny_vision_models.VISION_FAMILIES if images else FAMILIES):
        account, began = Account(name), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            world = build_world(name, Path(folder), images=images)
        for number in range(first, first + conversations):
            _play(world, account, number, rounds=rounds, restarts=restarts, seed=seed)
        if not account.tally.has_rare_ties:
            account.wrong.append(f"{name}: {account.tally.ties} near-ties in {account.tally.tokens} tokens")
        account.seconds = time.perf_counter() - began
        account.print()
        yield from account.wrong


def _play(world: World, account: Account, number: int, *, rounds: int, restarts: bool, seed: int) -> None:
    """One conversation. What goes wrong ends it, not the others."""
    rng = random.Random(f"{seed} {account.family} {number}")
    with tempfile.TemporaryDirectory() as folder:
        budget = memory_for(world.resources, TIGHT_TOKENS) if number % 2 else PLENTY
        conversation = Conversation(world, rng, budget, account, Path(folder) if restarts else None)
        try:
            try:
                conversation.play(rounds)
            finally:
                conversation.end()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and the others are played
            traceback.print_exc()
            account.wrong.append(f"{account.family}, conversation {number}: {type(error).__name__}: {error}")
        account.conversations += 1


PARTS: Mapping[str, Part] = {
    "replies": replies,
    "types": truth_types.types,
    "real": truth_real.real,
}
