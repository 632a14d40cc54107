"""Prompts without messages, on each kind of model: repeated, extended, edited. A ledger counts beside."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from start_llm.core.common_beginning import common_length
from start_llm.models.loader import load
from tests.conftest import TinyModel
from tests.server.client import ask, events_in
from tests.serving import Server, serving
from tests.ties import Tally, greedy_reference

pytestmark = [pytest.mark.thorough, pytest.mark.sample(3)]

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite"]
"""Plain; windows; recurrent layers; latent attention."""
TO_THE_TOKEN = {"qwen3", "gemma3_text", "glm4_moe_lite"}
LENGTHS = [40, 300, 1144]
"""Less than a page, little more, several pages."""
STEP = 256
"""Tokens between two states of a text, of a model that can resume only there."""
REPLY_TOKENS = 6
SIZE = {"hidden": 64, "layers": 2}


@dataclass(frozen=True)
class Read:
    """What a prompt cost.

    Attributes:
        unavoidable: tokens that were never computed before, by the ledger.
        reply: its tokens.
    """

    computed: int
    unavoidable: int
    reply: tuple[int, ...]


@dataclass
class Client:
    """A client on a server, and a ledger of all that was ever computed there for it."""

    server: Server
    family: str
    ledger: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    read: list[Read] = field(default_factory=list[Read])

    def __post_init__(self) -> None:
        self._began = self._counts()

    def _counts(self) -> tuple[int, int]:
        counts = self.server.get("/stats")["prompt_cache"]
        return counts["computed_tokens"], counts["unavoidable_tokens"]

    def counted(self) -> tuple[int, int]:
        """Tokens computed, and those of them that were unavoidable, as `/stats` counts them."""
        now = self._counts()
        return now[0] - self._began[0], now[1] - self._began[1]

    def complete(self, ids: Sequence[int], *, streams: bool = False) -> Read:
        body = {"prompt": list(ids), "max_tokens": REPLY_TOKENS, "temperature": 0, "return_token_ids": True}
        complete = self._streamed if streams else self._whole
        reply, usage = complete(body)
        known = max((common_length(tuple(ids), entry) for entry in self.ledger), default=0)
        self.ledger.append((*ids, *reply))
        computed = len(ids) - usage["prompt_tokens_details"]["cached_tokens"]
        self.read.append(Read(computed, len(ids) - min(known, len(ids) - 1), tuple(reply)))
        return self.read[-1]

    def _whole(self, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        answer = self.server.post("/v1/completions", body)
        return answer["choices"][0]["token_ids"], answer["usage"]

    def _streamed(self, body: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reply = ask(self.server.port, "POST", "/v1/completions", body)
        *chunks, _ = events_in(reply.body)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        (usage,) = (chunk["usage"] for chunk in chunks if chunk.get("usage"))
        return [token for choice in choices for token in choice.get("token_ids", [])], usage

    def efficiency(self) -> float:
        return sum(read.unavoidable for read in self.read) / sum(read.computed for read in self.read)


@pytest.fixture(scope="module")
def client(tiny_model: TinyModel) -> Iterator[Callable[[str], Client]]:
    """`client("qwen3")` is a new client of a server with that model, which is the same for all of them."""
    with ExitStack() as servers:

        @cache
        def server(family: str) -> Server:
            return servers.enter_context(serving(tiny_model(family, **SIZE)))

        yield lambda family: Client(server(family), family)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(300, 1900) for _ in range(count)]


def edited(rng: random.Random, ids: Sequence[int], place: int) -> list[int]:
    return [*ids[:place], *random_ids(rng, 5), *ids[place + 5 :]]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.product
def test_a_text_that_is_repeated_or_extended_costs_what_is_new_in_it(client, family, length, streams):
    api, rng = client(family), random.Random(f"{length} {streams}")
    text = random_ids(rng, length)
    first = api.complete(text, streams=streams)
    assert api.complete(text, streams=streams) == Read(1, 1, first.reply)
    for _ in range(3):
        text += [*api.read[-1].reply, *random_ids(rng, 20)]
        read = api.complete(text, streams=streams)
        assert (read.computed, read.unavoidable) == (20, 20)
    assert api.complete(text[:length], streams=streams).computed == 1
    assert api.counted() == (sum(api.computed for api in api.read), sum(api.unavoidable for api in api.read))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("part", [1 / 2, 3 / 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.product
def test_an_edited_text_is_read_from_the_edit_on(client, family, part, length):
    """Where states cannot be taken back, the first edit at a place goes on from a state before it."""
    api, rng = client(family), random.Random(f"{length} {part}")
    text = random_ids(rng, length)
    api.complete(text)
    place = int(length * part)
    first, *others = [api.complete(edited(rng, text, place)) for _ in range(4)]
    least = 0 if family in TO_THE_TOKEN else STEP
    assert first.unavoidable <= first.computed <= first.unavoidable + least
    assert {read.computed - read.unavoidable for read in others} == {0}
    assert api.complete(text).computed == 1, "the text that was edited is still there"
    assert api.counted() == (sum(api.computed for api in api.read), sum(api.unavoidable for api in api.read))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_text_goes_on_from_changes_no_reply(client, family, tiny_model: TinyModel):
    api, rng, tally = client(family), random.Random(3), Tally()
    network = load(tiny_model(family, **SIZE)).network
    text = random_ids(rng, 700)
    asked = [text, text, edited(rng, text, 300), edited(rng, text, 300), edited(rng, text, 601)]
    asked += [text[:137], [*text[:650], *random_ids(rng, 9)]]
    for ids in asked:
        tally.compare(api.complete(ids).reply, greedy_reference(network, ids, REPLY_TOKENS))
    assert tally.ties <= 1
    assert sum(read.computed for read in api.read) < 2200


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_hours_over_a_text_cost_little_more_than_is_unavoidable(client, family):
    """0.97 is what the cache is held to, of 2,000 tokens that are repeated, extended and edited."""
    api, rng = client(family), random.Random(8)
    text = random_ids(rng, 2000)
    api.complete(text)
    for _ in range(3):
        api.complete(text)
        text += [*api.read[-1].reply, *random_ids(rng, 40)]
        api.complete(text)
    for place in (1100, 1600):
        for _ in range(4):
            text = edited(rng, text, place)
            api.complete(text)
    assert api.efficiency() >= 0.97
    counted = api.counted()
    assert counted[1] / counted[0] == pytest.approx(api.efficiency())


LINE = "The time is 10:41 on a Tuesday in May, says the clock in the hall.\n"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_line_that_comes_and_goes_is_read_once_each_way(client, family):
    """Everything after it changes with it, and is found again when it changes back."""
    api, text = client(family), "It was a quiet day by the sea, and nobody had anything to say of it.\n" * 20
    server, costs = api.server, list[int]()
    prompts = {True: LINE + text, False: text}
    for turn in range(6):
        prompts = {has_line: prompt + f"And then, {turn}.\n" for has_line, prompt in prompts.items()}
        body = {"prompt": prompts[turn % 2 == 1], "max_tokens": 2, "temperature": 0}
        usage = server.post("/v1/completions", body)["usage"]
        costs.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert min(costs[:2]) > 100
    assert max(costs[2:]) < 40


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_stats_tell_what_a_ledger_tells_whatever_is_asked_for(client, family, seed):
    api, rng = client(family), random.Random(f"{family} {seed}")
    texts = [random_ids(rng, rng.choice([3, 30, 250, 400]))]
    for _ in range(12):
        text = rng.choice(texts)
        place = rng.randrange(len(text))
        changed = [text, text[: place + 1], edited(rng, text, place), [*text, *random_ids(rng, 30)]]
        if api.read:
            changed.append([*api.ledger[-1], *random_ids(rng, rng.choice([1, 30]))])
        texts.append(rng.choice(changed))
        api.complete(texts[-1], streams=rng.random() < 0.5)
    assert api.counted() == (sum(api.computed for api in api.read), sum(api.unavoidable for api in api.read))
