"""Receipts: where the tokens of each prompt came from, in three dialects, whole and streamed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.events import Event, Prefilling, Restored, Text
from start_llm.serving.prompt_account import PromptAccount
from tests.conftest import TinyModel
from tests.grammar import wire
from tests.http.test_conversations import system, user, words
from tests.server.client import Client, Reply, ask, wait_until
from tests.serving import Server, serving
from tests.slices import rounds

type Json = dict[str, Any]

REQUESTS = rounds(200, checked=60, few=40)
SOURCES = ("from_memory", "from_disk", "read", "told", "unread")
CHAT, TEXT, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)


def checked(usage: Json) -> Json:
    """Return the receipt in a usage, which has to agree with it."""
    receipt = usage["receipt"]
    read = "prompt_tokens" if "prompt_tokens" in usage else "input_tokens"
    details = usage.get(f"{read}_details", {})
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    prompt = usage[read] + usage.get("cache_read_input_tokens", 0)
    assert sum(receipt[source] for source in SOURCES) == receipt["prompt_tokens"] == prompt
    assert receipt["from_memory"] + receipt["from_disk"] == cached
    assert min(value for value in receipt.values() if isinstance(value, int)) >= 0
    check_ranges(receipt)
    assert receipt["drafted"] <= usage.get("completion_tokens", usage.get("output_tokens"))
    assert details.get("cache_write_tokens", receipt["read"] + receipt["told"]) == (
        receipt["read"] + receipt["told"]
    )
    return receipt


def check_ranges(receipt: Json) -> None:
    """They follow each other from the first token to the last, and have the lengths of the parts."""
    ranges = receipt["ranges"]
    ends = [0, *(span["end"] for span in ranges)]
    assert [span["start"] for span in ranges] == ends[:-1]
    assert ends[-1] == receipt["prompt_tokens"]
    lengths = dict.fromkeys(("restored", "read", "told", "unread"), 0)
    for span in ranges:
        lengths[span["source"]] += span["end"] - span["start"]
    assert lengths.pop("restored") == receipt["from_memory"] + receipt["from_disk"]
    assert lengths == {source: receipt[source] for source in lengths}
    assert receipt["read_ahead"] <= receipt["from_memory"] + receipt["from_disk"]


def last_usage(reply: Reply) -> Json:
    """The usage that a stream tells last."""
    usages: list[Json] = []
    for event in wire.events_in(reply.body):
        data = event if isinstance(event, dict) else {}
        holder = data.get("response") or data.get("message") or data
        usages += [holder["usage"]] if holder.get("usage") else []
    return usages[-1]


# ------------------------------------------------------------------------------------------------ the account


@st.composite
def courses(draw: st.DrawFn) -> tuple[int, range, list[Event]]:
    """A prompt, its note, and the events of a request that may end at any point."""
    tokens = draw(st.integers(1, 500))
    begins = draw(st.integers(0, tokens))
    note = range(begins, draw(st.integers(begins, tokens)))
    cached = draw(st.integers(0, tokens - 1))
    events: list[Event] = [
        Restored(cached, draw(st.sampled_from([None, "new", "off"])), disk_tokens=draw(st.integers(0, 600)))
    ]
    ends = draw(st.lists(st.integers(0, tokens - 1), max_size=5))  # a preempted prompt may begin anew
    events += [Prefilling(end, tokens) for end in ends]
    events += [Text("", (1, 2), drafted=draw(st.integers(0, 2))) for _ in range(draw(st.integers(0, 2)))]
    return tokens, note, events[: draw(st.integers(0, len(events)))]


@given(courses())
def test_the_parts_sum_to_the_prompt_wherever_a_request_ends(course: tuple[int, range, list[Event]]):
    tokens, note, events = course
    account = PromptAccount(range(tokens), note)
    for event in events:
        account.note(event)
        receipt = account.receipt()
        parts = receipt.from_memory, receipt.from_disk, receipt.read, receipt.note_tokens, receipt.unread
        assert sum(parts) == receipt.prompt == tokens
        assert min(parts) >= 0
        assert receipt.from_memory + receipt.from_disk == account.cached
        assert receipt.note_tokens <= len(note)
        assert receipt.written in (0, receipt.read + receipt.note_tokens)


def test_a_note_that_is_cached_already_is_not_written_again():
    for cached, noted in ((0, 10), (25, 5), (40, 0)):
        account = PromptAccount(range(50), range(20, 30))
        account.note(Restored(cached))
        account.note(Text("x", (1,)))
        receipt = account.receipt()
        assert (receipt.note_tokens, receipt.read) == (noted, 50 - cached - noted)


# -------------------------------------------------------------------------------------------- many requests


class Crowd:
    """Clients that ask many things at once, some of which they asked before.

    Args:
        patience_s: that a client waits for the next bytes of a reply.

    Attributes:
        receipts: of all requests that were answered.
    """

    def __init__(self, server: Server, seed: int, patience_s: float = 20) -> None:
        self._server = server
        self._patience_s = patience_s
        self._rng = random.Random(seed)
        self._talks: list[list[Json]] = []
        self.receipts: list[Json] = []

    def run(self, requests: int) -> None:
        with ThreadPoolExecutor(4) as clients:
            self.receipts += filter(None, clients.map(self._ask, [self._plan() for _ in range(requests)]))

    def _plan(self) -> tuple[str, Json]:
        rng = self._rng
        path = rng.choice([CHAT, TEXT, MESSAGES, RESPONSES])
        talk = self._talk()
        body: Json = {"temperature": 0, "return_receipt": True, "stream": rng.random() < 0.5}
        body |= {"session_id": rng.choice(["a", "b", "c"])} if rng.random() < 0.5 else {}
        limit = rng.choice([0, 1, 3, 6])
        match path:
            case "/v1/chat/completions":
                body |= {"messages": talk, "n_predict": limit}
            case "/v1/completions":
                body |= {"prompt": " ".join(message["content"] for message in talk), "max_tokens": limit}
            case "/v1/messages":
                first, *others = talk
                body |= {"system": first["content"], "messages": others, "max_tokens": limit}
            case _:
                body |= {"input": talk, "prompt_cache_options": {"prewarm": not limit}}
                body |= {"max_output_tokens": limit} if limit else {}
        return path, body

    def _talk(self) -> list[Json]:
        """One that goes on, begins anew, or has another time."""
        rng = self._rng
        if self._talks and rng.random() < 0.6:
            talk = list(rng.choice(self._talks))
            if rng.random() < 0.5:
                talk += [{"role": "assistant", "content": words(rng, 5)}, user(words(rng, 12))]
        else:
            talk = [system(words(rng, 1)), user(words(rng, rng.choice([3, 60])))]
        clock = f"\nCurrent date: 2026-11-27 10:{rng.randrange(60):02}\n"
        talk[0] = {"role": "system", "content": talk[0]["content"].partition("\nCurrent")[0] + clock}
        self._talks.append(talk)
        return talk

    def _ask(self, plan: tuple[str, Json]) -> Json:
        path, body = plan
        with Client(self._server.port, patience_s=self._patience_s) as client:
            reply = client.ask("POST", path, body)
        assert reply.status == 200, reply.body
        return checked(last_usage(reply) if body["stream"] else reply.json["usage"])


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_receipts_of_many_random_requests_sum_up(family: str, tiny_model: TinyModel):
    with serving(tiny_model(family, hidden=64, layers=2), thinking=False, batch=4) as server:
        crowd = Crowd(server, seed=1)
        crowd.run(REQUESTS)
        wait_until(lambda: server.get("/stats")["requests"]["in_flight"] == 0, within_s=5)
        stats = server.get("/stats")
    assert len(crowd.receipts) == REQUESTS
    total = {source: sum(receipt[source] for receipt in crowd.receipts) for source in SOURCES}
    assert min(total["from_memory"], total["read"], total["told"], total["unread"]) > 0, "all of it happens"
    assert stats["requests"]["cached_tokens"] == total["from_memory"]


@pytest.mark.thorough
def test_what_the_disk_gave_is_counted_apart(tiny_model: TinyModel, tmp_path: Path):
    body = {"prompt": "fish sea boat " * 200, "max_tokens": 4, "temperature": 0, "return_receipt": True}
    receipts: list[Json] = []
    for _ in range(2):
        with serving(tiny_model("qwen3"), ssd_folder=str(tmp_path), drain_s=10) as server:
            receipts += [checked(server.post(TEXT, body)["usage"]) for _ in range(2)]
    first, again, restarted, last = receipts
    assert (first["read"], again["read"], last["read"]) == (first["prompt_tokens"], 1, 1)
    assert restarted["from_disk"] > 100
    assert (again["from_disk"], last["from_disk"]) == (0, 0)


# ------------------------------------------------------------------------------------------------- the wire


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Iterable[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as instance:
        yield instance


BODIES: dict[str, Json] = {
    CHAT: {"messages": [user("How?")], "max_tokens": 3},
    TEXT: {"prompt": "How?", "max_tokens": 3},
    MESSAGES: {"messages": [user("How?")], "max_tokens": 3},
    RESPONSES: {"input": "How?", "max_output_tokens": 3},
}
ASKING: dict[str, Callable[[Json], tuple[Json, dict[str, str]]]] = {
    "field": lambda body: ({**body, "return_receipt": True}, {}),
    "header": lambda body: (body, {"X-Start-LLM-Receipt": "1"}),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("how", ASKING)
@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_gets_one_at_the_end(server: Server, path: str, how: str, stream: bool):
    body, headers = ASKING[how]({**BODIES[path], "stream": stream})
    reply = ask(server.port, "POST", path, body, headers)
    receipt = checked(last_usage(reply) if stream else reply.json["usage"])
    assert receipt["read"] >= 1
    assert receipt["unread"] == 0


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("headers", [{}, {"X-Start-LLM-Receipt": "0"}], ids=str)
@pytest.mark.sample(2)
def test_nobody_else_does(server: Server, path: str, headers: dict[str, str]):
    for stream in (False, True):
        body = {**BODIES[path], "stream": stream}
        assert b"receipt" not in ask(server.port, "POST", path, body, headers).body


@pytest.mark.parametrize("path", BODIES)
def test_the_field_is_a_boolean(server: Server, path: str):
    refused = ask(server.port, "POST", path, {**BODIES[path], "return_receipt": 1})
    assert refused.status == 400
    assert "'return_receipt'" in json.dumps(refused.json)


def test_a_server_that_keeps_nothing_writes_nothing(tiny_model: TinyModel):
    with serving(tiny_model("qwen3"), cache_is_on=False) as server:
        usage = server.post(CHAT, {**BODIES[CHAT], "return_receipt": True})["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert usage["receipt"]["read"] == usage["prompt_tokens"]
