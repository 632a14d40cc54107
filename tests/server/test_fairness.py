"""No request keeps another one waiting: neither what cannot fit, nor what is large, nor who has left."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from scripts import tiny_models
from start_llm.cli import SWITCH_S
from tests.server.client import CHAT, TEXT, Client, Reply, ask, message, stats, wait_until
from tests.serving import Server, serving

pytestmark = pytest.mark.thorough

WINDOW = 32768
LONGEST = "<|" + "x" * 124 + "|>"
"""A token of 128 bytes, as real vocabularies have: a text of 4 MB might fit into the window."""
MEGABYTE = 2**20
SOON_S = 1.5
"""For a request that takes hundredths of a second alone. What others ask for here takes many seconds."""
LEAVERS = 4


def words(size: int, first: int = 0) -> str:
    lines = (
        f"def f{number}(x): return x * {number}  # {number} times\n"
        for number in range(first, first + size // 20)
    )
    return "".join(lines)[:size]


BEYOND = words(6 * MEGABYTE)
MAY_FIT = [words(MEGABYTE, first=10**6 * place) for place in range(LEAVERS + 2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = tiny_models.CHATML
    added = tiny_models.AddedTokens(special=own.special, markup=(*own.markup, LONGEST), ends=own.ends)
    folder = tiny_models.build("qwen3", tmp_path_factory.mktemp("wide"), hidden=64, layers=1, added=added)
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    with serving(folder, max_kv_size=WINDOW) as started:
        small_s(started)  # the first request of a server takes longer
        gc.freeze()  # a server's own process has no objects of earlier tests; examining them takes seconds
        yield started
        gc.unfreeze()
    sys.setswitchinterval(usual_s)


def talk(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}


def small_s(server: Server) -> float:
    """Seconds of a small request."""
    began = time.perf_counter()
    assert ask(server.port, "POST", CHAT, talk("Hi")).status == 200
    return time.perf_counter() - began


def beside(server: Server, path: str, body: object) -> tuple[Reply, list[float]]:
    """Send something large, and small requests until it is answered."""
    replies = list[Reply]()
    thread = threading.Thread(target=lambda: replies.append(ask(server.port, "POST", path, body)))
    thread.start()
    spent = list[float]()
    while thread.is_alive() or not spent:
        spent.append(small_s(server))
    thread.join()
    return replies[0], spent


TOO_LONG = {
    CHAT: talk(BEYOND),
    "/v1/messages": talk(BEYOND),
    "/v1/messages/count_tokens": talk(BEYOND),
    "/v1/responses": {"input": BEYOND, "store": False},
    TEXT: {"prompt": BEYOND, "max_tokens": 1},
    "/tokenize": {"prompt": BEYOND},
    "/v1/cache/explain": talk(BEYOND),
}


@pytest.mark.parametrize("path", TOO_LONG)
@pytest.mark.sample(2)
def test_what_cannot_fit_is_refused_at_once_and_keeps_nobody_waiting(server: Server, path: str):
    began = time.perf_counter()
    reply, spent = beside(server, path, TOO_LONG[path])
    assert reply.status == 400
    fewest = -(-len(BEYOND) // len(LONGEST))
    text = reply.json["error"]["message"]
    least, window = map(
        int, re.findall(r"\d+", text) if "messages" in path else reversed(re.findall(r"\d+", text))
    )
    assert fewest <= least < fewest + 100
    assert window in (WINDOW, WINDOW - 1), "Anthropic's maximum leaves room for a token"
    if "messages" not in path:
        field = next(name for name in ("prompt", "input", "messages") if name in TOO_LONG[path])
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", field)
        assert "resulted in at least" in text
    assert max(spent) < SOON_S
    assert time.perf_counter() - began < 5


def test_many_messages_that_cannot_fit_together_are_refused_too(server: Server):
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": BEYOND[300 * place : 300 * place + 300]}
        for place in range(20_001)
    ]
    reply, spent = beside(server, CHAT, {"messages": messages})
    assert "at least" in reply.error["message"]
    assert max(spent) < SOON_S


@pytest.mark.long
def test_more_token_ids_than_fit_are_counted_and_refused(server: Server):
    reply, spent = beside(server, TEXT, {"prompt": [5] * 2_000_000})
    assert "resulted in 2000000 tokens" in reply.error["message"]
    assert max(spent) < SOON_S


def test_what_might_fit_is_encoded_and_keeps_nobody_waiting(server: Server):
    reply, spent = beside(server, CHAT, talk(MAY_FIT[0]))
    assert "at least" not in reply.error["message"]
    tokens = int(reply.error["message"].partition("resulted in ")[2].partition(" ")[0])
    assert tokens > WINDOW
    assert max(spent) < SOON_S


def test_millions_of_values_are_refused_at_once(server: Server):
    reply, spent = beside(server, CHAT, talk("Hi", metadata=[[]] * 9_000_000))
    assert (reply.status, "values" in reply.error["message"]) == (400, True)
    assert max(spent) < SOON_S


# ------------------------------------------------------------------------------------------- who has left


def grammar(place: int) -> dict[str, Any]:
    properties = {f"p{place}_{at}": {"type": "string", "maxLength": at % 50 + 1} for at in range(4000)}
    form = {"name": "form", "schema": {"type": "object", "properties": properties}}
    return talk("Hi", response_format={"type": "json_schema", "json_schema": form})


def tools(place: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    made = [{"name": f"tool_{place}_{at}", "parameters": parameters} for at in range(5000)]
    return talk("Hi", tools=[{"type": "function", "function": tool} for tool in made])


LARGE: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "encoding": (CHAT, lambda place: talk(MAY_FIT[place])),
    "a text": (TEXT, lambda place: {"prompt": MAY_FIT[place], "max_tokens": 1}),
    "counting": ("/tokenize", lambda place: {"prompt": MAY_FIT[place]}),
    "a grammar": (CHAT, grammar),
    "tools": (CHAT, tools),
}


def in_flight(server: Server) -> int:
    return sum(model["in_flight"] for model in stats(server.port)["models"])


@pytest.mark.sample(2)
@pytest.mark.parametrize("phase", LARGE)
def test_what_four_asked_for_who_left_is_given_up(server: Server, phase: str):
    path, body = LARGE[phase]
    sent = [message("POST", path, body(place)) for place in range(LEAVERS + 1)]
    before = stats(server.port)["requests"]["endings"]
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(server.port)) for _ in sent]
        for client, data in zip(clients, sent, strict=True):
            client.send(data)
        wait_until(lambda: in_flight(server) > 0, within_s=5)
    left = time.perf_counter()
    while in_flight(server) and time.perf_counter() - left < 60:
        assert small_s(server) < SOON_S
    alone_s = time.perf_counter() - left
    after = stats(server.port)["requests"]["endings"]
    assert after.get("cancelled", 0) == before.get("cancelled", 0), "none of them reached the engine"
    never_asked = body(LEAVERS + 1)
    began = time.perf_counter()
    ask(server.port, "POST", path, never_asked)
    assert alone_s < 2 * (time.perf_counter() - began) + 1, (
        "one may end what it is at, and the others give up"
    )
