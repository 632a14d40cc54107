"""Responses are kept for a while, for their tenant, in so many bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.errors import NotFound
from start_llm.protocols.response_store import ResponseStore, StoredResponse
from start_llm.storage.database import DatabaseTable
from tests.databases import Twice, WallClock, opened, twice
from tests.slices import examples

ME, OTHER = b"me", b"other"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(text: str = "x", *, more: list[Any] | None = None) -> StoredResponse:
    question = {"type": "message", "role": "user", "content": text}
    output: Any = [{"type": "message", "id": f"msg_{text}", "role": "assistant", "content": []}]
    return StoredResponse(input=[*(more or []), question], instructions=None, body={"output": output})


def size(response: StoredResponse) -> int:
    content = [response.input, response.made_ids, response.instructions, response.body]
    return len(json.dumps(content, separators=(",", ":")))


def test_a_response_is_kept_for_its_tenant():
    store, response = ResponseStore(), kept()
    store.keep(ME, "resp_1", response)
    assert store.get(ME, "resp_1") == response
    for tenant, name in ((OTHER, "resp_1"), (b"", "resp_1"), (ME, "resp_2"), (ME, "")):
        with pytest.raises(NotFound) as missing:
            store.get(tenant, name, param="previous_response_id")
        assert missing.value.param == "previous_response_id"


def test_what_goes_on_from_it_has_its_input_and_its_output():
    assert [item.get("id", item.get("content")) for item in kept("a").items] == ["a", "msg_a"]


def test_a_response_is_gone_when_its_time_is_over_however_often_it_was_used():
    clock = Clock()
    store = ResponseStore(kept_s=10, clock=clock)
    store.keep(ME, "a", kept())
    clock.now = 9.9
    assert store.get(ME, "a")
    clock.now = 10
    assert store.counts()["entries"] == store.counts()["bytes"] == 0
    with pytest.raises(NotFound):
        store.get(ME, "a")


def test_the_least_recently_used_goes_first():
    space = size(kept())
    store = ResponseStore(3 * space)
    for name in "abc":
        store.keep(ME, name, kept())
    assert store.counts() == {"entries": 3, "bytes": 3 * space, "max_bytes": 3 * space, "ttl_ms": 3_600_000}
    store.get(ME, "a")
    store.keep(ME, "d", kept())
    assert store.counts()["entries"] == 3
    assert [name for name in "abcd" if has(store, name)] == ["a", "c", "d"]


def has(store: ResponseStore, name: str, tenant: bytes = ME) -> bool:
    try:
        return bool(store.get(tenant, name))
    except NotFound:
        return False


def test_one_that_is_too_large_is_not_kept_and_displaces_none():
    store = ResponseStore(size(kept()))
    store.keep(ME, "a", kept())
    store.keep(ME, "b", kept("longer"))
    assert (has(store, "a"), has(store, "b")) == (True, False)


def test_one_that_is_deleted_is_gone_with_its_bytes():
    store = ResponseStore()
    store.keep(ME, "a", kept())
    with pytest.raises(NotFound):
        store.delete(OTHER, "a")
    store.delete(ME, "a")
    assert store.counts()["entries"] == store.counts()["bytes"] == 0
    with pytest.raises(NotFound):
        store.delete(ME, "a")


def test_an_item_is_found_by_its_id_among_those_of_its_tenant():
    store = ResponseStore()
    more = [{"type": "message", "id": "made", "role": "user", "content": "q"}]
    store.keep(ME, "a", replace(kept("a", more=more), made_ids=["made"]))
    store.keep(OTHER, "b", kept("b"))
    assert store.item(ME, "msg_a", param="input[0].id")["role"] == "assistant"
    assert store.item(ME, "made", param="input[0].id")["content"] == "q"
    with pytest.raises(NotFound) as missing:
        store.item(ME, "msg_b", param="input[0].id")
    assert missing.value.param == "input[0].id"


def test_an_item_that_its_client_has_given_an_id_is_not_found_by_it():
    store = ResponseStore()
    for text in ("mine", "another chat's"):
        store.keep(ME, text, kept(text, more=[{"id": "msg_1", "content": text}, {"id": "msg_mine"}]))
    with pytest.raises(NotFound):
        store.item(ME, "msg_1", param="input[0].id")
    assert store.item(ME, "msg_mine", param="input[0].id")["role"] == "assistant", "not what was sent later"


def test_many_threads_leave_the_counts_right():
    store, names = ResponseStore(10 * size(kept())), [str(number) for number in range(200)]

    def work(name: str) -> None:
        store.keep(ME, name, kept())
        if has(store, name):
            try:
                store.delete(ME, name)
            except NotFound:
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, names))
    assert (store.counts()["entries"], store.counts()["bytes"]) == (0, 0)


# ------------------------------------------------------------------------------------------- after a restart

texts = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=9)
owners = st.tuples(st.sampled_from([ME, OTHER, b""]), st.sampled_from(["a", "b", "\ud83d"]))


steps = st.one_of(
    st.tuples(st.just("keep"), owners, texts, st.none() | texts),
    st.tuples(st.just("delete"), owners),
    st.tuples(st.just("get"), owners),
    st.tuples(st.just("wait"), st.integers(0, 20)),
    st.tuples(st.just("restart")),
)


def make_responses(clock: WallClock, table: DatabaseTable) -> ResponseStore:
    return ResponseStore(3 * 200, 30, clock=lambda: clock.now - 10**9, table=table)


def do(stores: Twice[ResponseStore], step: tuple[Any, ...]) -> None:
    match step:
        case ("keep", (tenant, name), text, instructions):
            entry = StoredResponse(input=kept(text).input, instructions=instructions, body=kept(text).body)
            stores.same(lambda store: store.keep(tenant, name, entry))
        case ("delete", owner):
            stores.same(lambda store: deleted(store, *owner))
        case ("get", owner):
            stores.same(lambda store: stored(store, *owner))
        case ("wait", seconds):
            stores.clock.now += seconds
        case _:
            stores.restart()


@examples(40, few=15)
@given(st.lists(steps, max_size=20))
def test_responses_are_the_same_after_a_restart(steps):
    with twice(make_responses) as stores:
        for step in (*steps, ("restart",)):
            do(stores, step)
            stores.same(ResponseStore.counts)
        for tenant in (ME, OTHER, b""):
            for name in ("a", "b", "\ud83d"):
                do(stores, ("get", (tenant, name)))


def stored(store: ResponseStore, tenant: bytes, name: str) -> StoredResponse | None:
    return store.get(tenant, name) if has(store, name, tenant) else None


def deleted(store: ResponseStore, tenant: bytes, name: str) -> bool:
    is_there = has(store, name, tenant)
    if is_there:
        store.delete(tenant, name)
    return is_there


def test_a_response_expires_as_long_after_it_was_made_although_it_was_used_and_the_server_stood_still(
    tmp_path,
):
    clock = WallClock()
    for waited, is_there in ((0, True), (20, True), (9, True), (2, False)):
        clock.now += waited
        with opened(tmp_path / "a.db", wall_clock=clock) as database:
            store = ResponseStore(kept_s=30, clock=lambda: clock.now, table=database.table("responses"))
            if not waited:
                store.keep(ME, "a", kept())
            assert has(store, "a") == is_there
    with opened(tmp_path / "a.db", wall_clock=clock) as database:
        assert database.metrics.loaded == 0


def test_a_response_that_was_used_outlives_others_after_a_restart_too(tmp_path):
    with opened(tmp_path / "a.db") as database:
        store = ResponseStore(3 * size(kept()), table=database.table("responses"))
        for name in "abc":
            store.keep(ME, name, kept())
        store.get(ME, "a")
    with opened(tmp_path / "a.db") as database:
        store = ResponseStore(3 * size(kept()), table=database.table("responses"))
        store.keep(ME, "d", kept())
        assert [name for name in "abcd" if has(store, name)] == ["a", "c", "d"]


def test_a_deleted_response_does_not_come_back(tmp_path):
    with opened(tmp_path / "a.db") as database:
        store = ResponseStore(table=database.table("responses"))
        store.keep(ME, "a", kept())
    with opened(tmp_path / "a.db") as database:
        ResponseStore(table=database.table("responses")).delete(ME, "a")
    with opened(tmp_path / "a.db") as database:
        assert not has(ResponseStore(table=database.table("responses")), "a")
    assert b"msg_x" not in (tmp_path / "a.db").read_bytes()


def test_responses_that_no_longer_fit_or_cannot_be_read_are_not_loaded(tmp_path):
    with opened(tmp_path / "a.db") as database:
        table = database.table("responses")
        store = ResponseStore(table=table)
        for name in "abc":
            store.keep(ME, name, kept())
        for number, value in enumerate((b"", b"[]", b"[[],null]", b"[" * 100_000, b"\xff")):
            table.put(b"%d" % number, value)
        table.put(b'["6d65","d"]', b"[")
    for _ in range(2):
        with opened(tmp_path / "a.db") as database:
            store = ResponseStore(2 * size(kept()), table=database.table("responses"))
            assert [name for name in "abcd" if has(store, name)] == ["b", "c"]
    assert database.metrics.rejected == 0
