"""The beginnings of the agents that were used last outlive the process."""

from __future__ import annotations

from array import array
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from start_llm.transcripts.beginnings import Beginning, Beginnings
from tests.databases import opened


def of(number: int, tenant: bytes = b"us", program: str = "pi", length: int = 100) -> Beginning:
    return Beginning(tenant, program, array("I", range(number, number + length)))


@given(tenant=st.binary(max_size=40), program=st.text(max_size=20), ids=st.lists(st.integers(0, 2**32 - 1)))
def test_a_row_is_read_as_it_was_written(tenant: bytes, program: str, ids: list[int]):
    beginning = Beginning(tenant, program, array("I", ids))
    assert Beginning.decode(beginning.encode()) == beginning


def test_the_one_used_last_comes_first_and_the_oldest_are_forgotten():
    known = Beginnings()
    for number in range(20):
        known.note(of(number))
    known.note(of(10))
    latest = known.latest()
    assert len(latest) == 16
    assert latest[:2] == [of(10), of(19)]
    assert of(3) not in latest


def test_tenants_are_apart_and_short_ones_are_not_worth_it():
    known = Beginnings()
    known.note(of(1))
    known.note(of(1, tenant=b"them"))
    known.note(of(2, length=63))
    assert known.latest() == [of(1, tenant=b"them"), of(1)]
    assert of(1).key != of(1, tenant=b"them").key


def test_they_are_there_after_a_start_in_the_same_order(tmp_path: Path):
    path = tmp_path / "known.sqlite"
    with opened(path) as database:
        known = Beginnings(table=database.table("beginnings"))
        for number in range(3):
            known.note(of(number))
        known.note(of(0))
        known.note(of(1, program="codex"))
    for _ in range(2):
        with opened(path) as database:
            known = Beginnings(table=database.table("beginnings"))
            assert known.latest() == [of(1, program="codex"), of(0), of(2)]


def test_a_row_that_cannot_be_read_is_left_out(tmp_path: Path):
    path = tmp_path / "known.sqlite"
    with opened(path) as database:
        table = database.table("beginnings")
        damaged = (b"", b"\x02\x00\x00\x00{}", b"\x04\x00\x00\x00[1,2")
        for number, value in enumerate((*damaged, of(1).encode())):
            table.put(bytes([number]), value)
    with opened(path) as database:
        assert Beginnings(table=database.table("beginnings")).latest() == [of(1)]
        assert database.metrics.rejected == 3
