"""Responses are kept for a while, for their tenant, in so many bytes."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from start_llm.core.errors import NotFound
from start_llm.protocols.responses.store import ResponseStore, StoredResponse

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


def size(one: StoredResponse) -> int:
    return len(json.dumps([*one.input, one.instructions, one.body]))


def test_a_response_is_kept_for_its_tenant():
    store, one = ResponseStore(), kept()
    store.keep(ME, "resp_1", one)
    assert store.get(ME, "resp_1") == one
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
    one = size(kept())
    store = ResponseStore(3 * one)
    for name in "abc":
        store.keep(ME, name, kept())
    assert store.counts() == {"entries": 3, "bytes": 3 * one, "max_bytes": 3 * one, "ttl_ms": 3_600_000}
    store.get(ME, "a")
    store.keep(ME, "d", kept())
    assert store.counts()["entries"] == 3
    assert [name for name in "abcd" if has(store, name)] == ["a", "c", "d"]


def has(store: ResponseStore, name: str) -> bool:
    try:
        return bool(store.get(ME, name))
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
    store.keep(ME, "a", kept("a", more=[{"type": "message", "id": "own", "role": "user", "content": "q"}]))
    store.keep(OTHER, "b", kept("b"))
    assert store.item(ME, "msg_a", param="input[0].id")["role"] == "assistant"
    assert store.item(ME, "own", param="input[0].id")["content"] == "q"
    with pytest.raises(NotFound) as missing:
        store.item(ME, "msg_b", param="input[0].id")
    assert missing.value.param == "input[0].id"


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
