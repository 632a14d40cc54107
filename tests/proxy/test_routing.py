"""Each conversation stays with its server; those of one that goes, and no others, move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from start_llm.access.tenants import TENANT_HEADER
from start_llm.core.errors import Overloaded
from start_llm.proxy.backend import Backend, WholeAnswer
from start_llm.proxy.bodies import Bodies, body_of
from start_llm.proxy.chosen_server import chosen_api_base
from start_llm.proxy.refusals import ProxyRefusal, message_in, refuse
from start_llm.proxy.routing import Routing
from start_llm.proxy.server_group import ServerGroup

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "Be brief."}
A, B, C = URLS = tuple(f"http://{name}:8080" for name in "abc")
OF_KINDS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Go on"}]},
    "/v1/messages": {"messages": [{"role": "assistant", "content": "Good morning"}]},
    "/v1/responses": {"input": [{"type": "message", "role": "assistant", "content": "Good evening"}]},
}
EXPLAINED = {CHAT: "/v1/cache/explain"} | {
    path: f"/v1/cache/explain/{path.rpartition('/')[2]}" for path in ("/v1/messages", "/v1/responses")
}


def answer(status: int, body: Any, *, is_own: bool = False) -> WholeAnswer:
    return WholeAnswer(status, json.dumps(body).encode(), is_own)


@dataclass
class FakeServer:
    """A server as the proxy sees it, and what it answers besides replies.

    Attributes:
        health: the status and the word of its `/health`; None: nothing listens.
        fails_with: the status of replies, if it is not 200.
        is_unreachable: the proxy itself answers that the server does not.
        cached: of 100 tokens of any prompt.
        asked: the paths that were asked for, and the bodies of requests that it was to reply to.
    """

    url: str
    health: tuple[int, str] | None = (200, "ok")
    models: tuple[str, ...] = ("m",)
    models_status: int = 200
    has_the_secret: bool = True
    fails_with: int = 200
    is_unreachable: bool = False
    cached: int = 0
    responses: set[str] = field(default_factory=set[str])
    metrics: str = ""
    asked: list[str] = field(default_factory=list[str])
    replied: list[Any] = field(default_factory=list[Any])

    async def whole(
        self, method: str, path: str, headers: Any = (), body: bytes = b"", *, within_s: float
    ) -> WholeAnswer | None:
        del method, headers, body, within_s
        if self.health is None:
            return None
        if path == "/health":
            return answer(self.health[0], {"status": self.health[1]})
        self.asked.append(path)
        return self._answer(path)

    def _answer(self, path: str) -> WholeAnswer:
        if path == "/v1/models":
            listed = [{"id": name, "aliases": [f"{name}-alias"]} for name in self.models]
            return answer(
                self.models_status,
                {"object": "list", "data": listed},
                is_own=self.has_the_secret and self.models_status == 200,
            )
        if path == "/stats":
            counts = {"computed_tokens": 8, "reused_tokens": 2, "unavoidable_tokens": 6}
            return answer(200, {"prompt_cache": counts})
        if path == "/metrics":
            return WholeAnswer(200, self.metrics.encode())
        if path.startswith("/v1/responses/"):
            return WholeAnswer(200 if path.rpartition("/")[2] in self.responses else 404)
        return answer(200, {"cached_tokens": self.cached, "prompt_tokens": 100})


@dataclass
class Door:
    """A proxy in front of fake servers. Requests are awaited one after another unless a test says else."""

    servers: dict[str, FakeServer]
    notices: list[str] = field(default_factory=list[str])
    group: ServerGroup = field(init=False)
    routing: Routing = field(init=False)
    gate: asyncio.Event | None = None

    def __post_init__(self) -> None:
        backends = cast("list[Backend]", list(self.servers.values()))
        self.group = ServerGroup(backends, self.notices.append)
        self.routing = Routing(self._reply, self.group)

    async def _reply(self, scope: Any, receive: Any, send: Any) -> None:
        server = self.servers[chosen_api_base().removesuffix("/v1")]
        server.replied.append(body_of(scope).fields.data or scope["path"])
        if self.gate:
            await self.gate.wait()
        if server.is_unreachable:
            await refuse(scope, send, Overloaded(f"{server.url} does not answer."))
            return
        status = 500 if server.health is None else server.fails_with
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": server.url.encode()})

    async def ask(
        self, path: str = CHAT, body: Any = None, *, method: str = "", tenant: str = "", **headers: str
    ) -> tuple[int, str]:
        """Return the status, and the body: which server has replied."""
        sent: list[Any] = []
        waiting = [{"type": "http.request", "body": json.dumps(body).encode() if body else b""}]

        async def receive() -> Any:
            return waiting.pop() if waiting else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        fields = {TENANT_HEADER: tenant, **{name.replace("_", "-"): value for name, value in headers.items()}}
        scope = {
            "type": "http",
            "method": method or ("POST" if body else "GET"),
            "path": path,
            "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        }
        await Bodies(self.routing, 10**6, 60)(scope, receive, send)
        return sent[0]["status"], b"".join(event.get("body", b"") for event in sent).decode()

    async def server_of(self, *words: str, **more: Any) -> str:
        """Ask with these words, in turn the user's and the assistant's. Returns who has replied."""
        status, server = await self.ask(body=conversation(*words), **more)
        assert status == 200
        return server


def conversation(*words: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": word} for at, word in enumerate(words)]
    return {"model": "m", "messages": [SYSTEM, *messages], **more}


def played(story: Callable[[Door], Any], **changes: dict[str, Any]) -> Door:
    """Run a story in front of three servers. `changes` are those of servers a, b and c."""
    servers = {url: FakeServer(url, **changes.get(url[7], {})) for url in URLS}
    door = Door(servers)

    async def run() -> None:
        watched: AbstractAsyncContextManager[None] = door.group.watched()
        async with watched:
            await story(door)

    asyncio.run(run())
    return door


def test_new_conversations_are_shared_out_and_each_one_stays_where_it_is():
    async def story(door: Door) -> None:
        first = {task: await door.server_of(task) for task in ("one", "two", "three", "four")}
        assert [*first.values()] == [A, B, C, A]
        for task in (*reversed(first), *first):
            assert await door.server_of(task, "Yes", "Go on") == first[task]
        assert await door.server_of("two", "Yes", "Go on", "Done", "Thanks") == B

    played(story)


def test_a_long_conversation_is_known_again_too():
    async def story(door: Door) -> None:
        long = "word " * 30_000
        assert [await door.server_of(text) for text in ("one", f"{long}2", f"{long}3", f"{long}2")] == [
            A,
            B,
            C,
            B,
        ]

    played(story)


def test_a_session_stays_though_its_messages_change():
    async def story(door: Door) -> None:
        assert [await door.server_of("one"), await door.server_of("two", x_session_id="s-2")] == [A, B]
        assert await door.server_of("another clock", "Yes", "Go on", x_session_id="s-2") == B

    played(story)


def test_the_least_busy_server_gets_a_new_conversation():
    async def story(door: Door) -> None:
        door.gate = asyncio.Event()
        running = [asyncio.create_task(door.server_of(task)) for task in ("one", "two")]
        await asyncio.sleep(0.01)
        again = asyncio.create_task(door.server_of("one"))  # at a: it has two now
        await asyncio.sleep(0.01)
        assert [server.in_flight for server in door.group.servers] == [2, 1, 0]
        more = [asyncio.create_task(door.server_of(task)) for task in ("three", "four")]
        await asyncio.sleep(0.01)
        door.gate.set()
        assert await asyncio.gather(*running, again, *more) == [A, B, A, C, B]
        assert [server.in_flight for server in door.group.servers] == [0, 0, 0]

    played(story)


def test_equal_words_of_two_tenants_are_two_conversations():
    async def story(door: Door) -> None:
        assert [await door.server_of("one", tenant=name) for name in ("ann", "ben", "ann")] == [A, B, A]

    played(story)


@pytest.mark.parametrize("path", OF_KINDS)
def test_a_conversation_that_the_proxy_has_not_seen_goes_where_most_of_it_is_cached(path: str):
    async def story(door: Door) -> None:
        assert await door.ask(path, OF_KINDS[path]) == (200, C)
        for server in door.servers.values():
            server.asked.clear()
        assert await door.ask(path, OF_KINDS[path]) == (200, C)
        assert not any(server.asked for server in door.servers.values()), "now it is known"

    door = played(story, b={"cached": 60}, c={"cached": 90})
    assert all(len(server.replied) == (2 if server.url == C else 0) for server in door.servers.values())


def test_servers_are_asked_in_the_form_of_the_body():
    async def story(door: Door) -> None:
        for path, body in OF_KINDS.items():
            door.servers[A].asked.clear()
            await door.ask(path, body)
            assert door.servers[A].asked == [EXPLAINED[path]]

    played(story)


def test_instructions_that_are_cached_are_no_conversation():
    async def story(door: Door) -> None:
        assert await door.server_of("one") == A
        assert await door.server_of("two", "Yes", "Go on") == B

    played(story, a={"cached": 49})


def test_a_new_conversation_is_explained_by_nobody():
    async def story(door: Door) -> None:
        await door.server_of("one")
        assert door.servers[B].asked == ["/v1/models"]

    played(story)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/responses", {"input": "Go on", "previous_response_id": "resp_1"}),
        ("GET", "/v1/responses/resp_1", None),
        ("GET", "/v1/responses/resp_1/input_items", None),
        ("DELETE", "/v1/responses/resp_1", None),
    ],
)
@pytest.mark.parametrize("others_model", ["m", "small"])
def test_a_stored_response_is_found_where_it_is(method: str, path: str, body: Any, others_model: str):
    """Whether or not the others have its model: the request names none."""

    async def story(door: Door) -> None:
        assert await door.ask(path, body, method=method) == (200, B)

    played(story, a={"models": (others_model,)}, b={"responses": {"resp_1"}})


def test_equal_words_behind_two_responses_go_to_two_servers():
    async def story(door: Door) -> None:
        for response, server in (("resp_1", B), ("resp_2", C), ("resp_1", B)):
            body = {"model": "m", "input": "Go on", "previous_response_id": response}
            assert await door.ask("/v1/responses", body) == (200, server)
        gone = {"model": "m", "input": "Go on", "previous_response_id": "resp_0"}
        assert await door.ask("/v1/responses", gone) == (200, A), "who tells that there is none"

    played(story, b={"responses": {"resp_1"}}, c={"responses": {"resp_2"}})


GONE = {"dead": None, "stopping": (503, "draining"), "stuck": (503, "stuck")}


@pytest.mark.parametrize("health", GONE.values(), ids=GONE)
def test_the_conversations_of_a_server_that_goes_move_once_and_no_others(health: Any):
    async def story(door: Door) -> None:
        first = {task: await door.server_of(task) for task in ("one", "two", "three", "four", "five")}
        door.servers[B].health = health
        door.servers[B].fails_with = 503
        moved = {task: await door.server_of(task, "Yes", "Go on") for task in first}
        assert {task for task in first if moved[task] != first[task]} == {"two", "five"}
        assert {moved["two"], moved["five"]} == {A, C}, "not all of them to one"
        door.servers[B].health, door.servers[B].fails_with = (200, "ok"), 200
        await door.group.look_at(door.group.servers[1])
        for task in first:
            assert await door.server_of(task, "Yes", "Go on", "Done", "Thanks") == moved[task]
        assert await door.server_of("six") == B, "new ones go to it again"

    door = played(story)
    assert [line.partition(B)[2].split(".")[0] for line in door.notices if B in line][:2] == [
        " takes requests",
        f" is {'unreachable' if health is None else health[1]}",
    ]


def test_the_request_that_finds_its_server_gone_is_answered_by_another_one_with_the_same_body():
    async def story(door: Door) -> None:
        await door.server_of("one")
        door.servers[A].health = None
        assert await door.server_of("one", "Yes", "Go on") == B

    door = played(story)
    assert door.servers[A].replied[-1] == door.servers[B].replied[-1] == conversation("one", "Yes", "Go on")


@pytest.mark.parametrize("gone", ["a", "abc"])
def test_the_user_learns_of_no_refusal_that_its_client_was_not_sent(
    gone: str, capsys: pytest.CaptureFixture[str]
):
    async def story(door: Door) -> None:
        for url in URLS:
            if url[7] in gone:
                door.servers[url].health, door.servers[url].is_unreachable = None, True
        answers.append(await door.ask(body=conversation("one")))

    answers: list[tuple[int, str]] = []
    played(story)
    messages = map(message_in, capsys.readouterr().out.splitlines())
    reasons = [refusal.reason for refusal in messages if isinstance(refusal, ProxyRefusal)]
    if gone == "a":
        assert (answers, reasons) == ([(200, B)], [])
    else:
        assert (answers[0][0], reasons) == (503, [f"{C} does not answer."])


@pytest.mark.parametrize("status", [500, 503])
def test_an_error_of_a_server_that_is_well_is_the_answer(status: int):
    async def story(door: Door) -> None:
        assert await door.ask(body=conversation("one")) == (status, A)

    door = played(story, a={"fails_with": status})
    assert not door.servers[B].replied


def test_the_error_of_the_last_server_is_passed_on():
    async def story(door: Door) -> None:
        for server in door.servers.values():
            server.health = None
        status, answer = await door.ask(body=conversation("one"))
        assert (status, answer) == (500, C)

    played(story)


def test_where_no_server_answers_the_client_may_come_again():
    async def story(door: Door) -> None:
        status, answer = await door.ask(body=conversation("one"))
        assert status == 503
        assert "No server that has this model" in json.loads(answer)["error"]["message"]
        assert (await door.ask("/v1/models"))[0] == 503

    played(story, **{name: {"health": None} for name in "abc"})


def test_a_model_is_asked_for_where_it_is():
    async def story(door: Door) -> None:
        for name, server in (("n", C), ("n-alias", C), ("m", A), ("unknown", B)):
            assert await door.ask(body={**conversation(name), "model": name}) == (200, server)
        assert await door.ask("/v1/models/n") == (200, C)
        door.servers[C].health = None
        await door.group.look_at(door.group.servers[2])
        status, _ = await door.ask(body={**conversation("two"), "model": "n"})
        assert status == 503, "no other model answers in its name"

    played(story, c={"models": ("n",)})


def test_models_of_all_servers_are_listed_once():
    async def story(door: Door) -> None:
        status, text = await door.ask("/v1/models")
        assert (status, [model["id"] for model in json.loads(text)["data"]]) == (200, ["m", "n"])

    played(story, c={"models": ("m", "n")})


def test_counters_are_reported_by_server_and_summed():
    async def story(door: Door) -> None:
        await door.server_of("one")
        counters = json.loads((await door.ask("/stats"))[1])
        assert [(server["url"], server["state"]) for server in counters["servers"]] == [
            (A, "ok"),
            (B, "unreachable"),
            (C, "ok"),
        ]
        assert counters["prompt_cache"] == {
            "computed_tokens": 16,
            "reused_tokens": 4,
            "unavoidable_tokens": 12,
            "efficiency": 0.75,
        }
        assert counters["known_prefixes"] == 1
        assert counters["servers"][1]["stats"] is None

    played(story, b={"health": None})


def test_metrics_have_the_label_of_their_server():
    text = '# HELP x_total Things.\n# TYPE x_total counter\nx_total{model_name="m"} 3.0\n'

    async def story(door: Door) -> None:
        lines = (await door.ask("/metrics"))[1].splitlines()
        for name, up in (("a", 1.0), ("b", 1.0), ("c", 0.0)):
            assert f'start_llm_backend_up{{backend="{name}:8080"}} {up}' in lines
        assert 'x_total{backend="a:8080",model_name="m"} 3.0' in lines
        assert 'x_total{backend="b:8080",model_name="m"} 3.0' in lines
        assert lines.count("# TYPE x_total counter") == 1

    played(story, a={"metrics": text}, b={"metrics": text}, c={"health": None})


@pytest.mark.parametrize("change", [{"has_the_secret": False}, {"models_status": 401}], ids=str)
def test_a_server_without_the_proxys_secret_gets_nothing_and_the_user_is_warned(change: dict[str, Any]):
    """It would take all clients of the proxy for one tenant."""

    async def story(door: Door) -> None:
        assert [await door.server_of(task) for task in ("one", "two", "three")] == [A, C, A]

    door = played(story, b=change)
    assert any(B in line and "BACKEND_SECRET" in line for line in door.notices)


def test_pages_are_those_of_the_first_server_that_answers():
    async def story(door: Door) -> None:
        assert await door.ask("/health") == (200, B)

    played(story, a={"health": (503, "draining")})
