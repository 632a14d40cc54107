"""Random requests, most of them wrong in one way or another: `benchmarks stress --only fuzz` in short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.bodies import SCRIPTS, STARTS, TRAIT, Expected
from tests.fuzz.judge import judge
from tests.fuzz.play import Fuzz
from tests.fuzz.requests import EVERY_NORMAL, PROTOCOL_AT, Request, request
from tests.grammar.wire import COMPLAINTS
from tests.http.scripts import write_model
from tests.server.client import Reply, engine_is_free, stats, wait_until
from tests.server.paths import POST_PATHS
from tests.serving import Server, serving

REQUESTS = 400
SEED = 9


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("fuzz"), TRAIT, scripts=SCRIPTS, starts=STARTS)
    with serving(folder, batch=4, cache_max_bytes=24 * 2**20) as server:
        yield server


def test_every_path_that_takes_a_body_is_asked():
    assert set(POST_PATHS) <= PROTOCOL_AT.keys()


@pytest.mark.long
def test_whatever_is_sent_every_tenth_request_is_served(server: Server):
    fuzz = Fuzz(server.port, SEED, REQUESTS)
    assert all(done <= REQUESTS for done in fuzz.play(connections=4))
    assert fuzz.failures == []
    assert fuzz.done == REQUESTS
    assert sum(count for kind, count in fuzz.kinds.items() if kind.startswith("normal")) == 40
    assert {200, 400, 404, 405, 411} <= fuzz.statuses.keys()
    wait_until(lambda: engine_is_free(server.port), within_s=20)
    assert stats(server.port)["engine"]["failures"] == 0


def test_a_request_comes_out_of_its_seed_and_its_number():
    kept = ["resp_a"]
    again = [[request(SEED, index, kept) for index in range(60)] for _ in range(2)]
    assert again[0] == again[1]
    assert [asked.is_normal for asked in again[0]] == [index % EVERY_NORMAL == 0 for index in range(60)]
    assert again[0] != [request(SEED + 1, index, kept) for index in range(60)]


NORMAL = Request(kind="normal chat", target="/v1/completions", expected=Expected(text="Yes."))
WRONG = Request(kind="wrong values", target="/v1/messages")
JSON = {"content-type": "application/json"}
ERROR = b'{"error": {"message": "The engine failed.", "type": "server_error", "param": null, "code": null}}'


@pytest.mark.parametrize(
    ("asked", "reply"),
    [
        (WRONG, Reply(500, JSON, ERROR)),
        (NORMAL, Reply(400, JSON, ERROR)),
        (NORMAL, Reply(503, {**JSON, "retry-after": "2"}, ERROR)),
        (WRONG, Reply(503, JSON, ERROR)),
        (WRONG, Reply(400, JSON, ERROR)),
        (WRONG, Reply(200, JSON, b'{"number": Infinity}')),
        (WRONG, Reply(200, JSON, b'{"text": "\xff"}')),
        (WRONG, Reply(200, JSON, b"")),
        (NORMAL, Reply(200, JSON, b'{"choices": [{"text": "No."}]}')),
    ],
    ids=["failed", "refused", "turned away", "no time", "words", "infinity", "bytes", "nothing", "wrong"],
)
def test_a_reply_that_may_not_be_is_seen(asked: Request, reply: Reply):
    with pytest.raises(COMPLAINTS):
        judge(asked, reply)
