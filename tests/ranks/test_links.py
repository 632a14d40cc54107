"""Only who knows the secret is a follower, and an end that is gone is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from start_llm.core.errors import RanksApart, StartupError
from start_llm.ranks.links import PLACE, Link, LinkClosed, Meeting, MeetingPlace, meet
from start_llm.ranks.wire import SentBudget, SentEnd, SentTrimming

HERE = "127.0.0.1"


@contextmanager
def meeting(ranks: int = 2, patience_s: float = 5.0) -> Generator[tuple[MeetingPlace, Future[list[Link]]]]:
    """A meeting at which rank 0 waits, on a thread of its own."""
    opened = Meeting(HERE)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(opened.wait_for, ranks, patience_s)
        yield opened.place, waited
        if waited.exception() is None:
            for link in waited.result():
                link.close()


def stranger(place: MeetingPlace) -> socket.socket:
    return socket.create_connection((HERE, place.port), timeout=5)


def test_messages_arrive_in_their_order_at_both_ends():
    with meeting() as (place, waited):
        follower = meet(HERE, place, 1)
        (leader,) = waited.result()
        assert (leader.rank, follower.rank) == (1, 0)
        for number in range(3):
            leader.send(SentTrimming(number))
        leader.send(SentBudget(10**12, 0.5))
        assert [follower.receive() for _ in range(4)] == [
            *(SentTrimming(number) for number in range(3)),
            SentBudget(10**12, 0.5),
        ]
        follower.send(SentEnd())
        assert leader.receive() == SentEnd()


def test_followers_are_known_by_their_ranks_in_whatever_order_they_come():
    with meeting(ranks=3) as (place, waited):
        later = meet(HERE, place, 2)
        first = meet(HERE, place, 1)
        assert [link.rank for link in waited.result()] == [1, 2]
        waited.result()[0].send(SentTrimming(1))
        assert first.receive() == SentTrimming(1)
        later.close()


def test_who_does_not_know_the_secret_is_no_follower():
    with meeting() as (place, waited):
        wrong = MeetingPlace(place.port, bytes(32))
        with pytest.raises(RanksApart, match="cannot reach rank 0"):
            meet(HERE, wrong, 1)
        meet(HERE, place, 1)
        assert len(waited.result()) == 1


def test_who_comes_twice_is_no_follower():
    with meeting(ranks=3) as (place, waited):
        meet(HERE, place, 1)
        with pytest.raises(LinkClosed):
            meet(HERE, place, 1).receive()
        meet(HERE, place, 2)
        assert [link.rank for link in waited.result()] == [1, 2]


def test_a_stranger_that_says_nothing_or_leaves_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr("start_llm.ranks.links._GREETING_S", 0.5)
    with meeting() as (place, waited), stranger(place):
        stranger(place).close()
        meet(HERE, place, 1)
        assert len(waited.result()) == 1


def test_a_follower_does_not_believe_who_does_not_know_the_secret():
    with socket.create_server((HERE, 0)) as listener:

        def lie() -> None:
            connection, _ = listener.accept()
            connection.sendall(bytes(32))
            connection.recv(100)
            connection.sendall(bytes(32))

        threading.Thread(target=lie, daemon=True).start()
        with pytest.raises(RanksApart, match="is not rank 0"):
            meet(HERE, MeetingPlace(listener.getsockname()[1], b"x" * 32), 1)


def test_a_rank_that_does_not_come_is_named():
    with meeting(ranks=3, patience_s=0.1) as (place, waited), pytest.raises(RanksApart, match="Rank 2"):
        meet(HERE, place, 1)
        waited.result()


def test_nobody_listens_once_all_are_there():
    with meeting() as (place, waited):
        meet(HERE, place, 1)
        waited.result()
        with pytest.raises(ConnectionRefusedError):
            stranger(place)


def test_rank_0_listens_at_its_own_address_alone():
    opened = Meeting(HERE)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", opened.place.port), timeout=5)
    with pytest.raises(StartupError, match=r"cannot listen at 192\.0\.2\.1"):
        Meeting("192.0.2.1")


def test_an_end_that_is_gone_is_noticed():
    with meeting() as (place, waited):
        follower = meet(HERE, place, 1)
        (leader,) = waited.result()
        leader.close()
        with pytest.raises(LinkClosed):
            follower.receive()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02{]", b"\x00\x00\x00\x09{}"])
def test_what_is_no_message_ends_the_link(data):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        listener = socket.create_server((HERE, 0))
        connection = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        link = Link(accepted, 1)
        connection.sendall(data)
        connection.close()
        with pytest.raises(LinkClosed):
            link.receive()
        link.close()
        listener.close()


def test_what_is_sent_to_an_end_that_is_gone_is_an_error():
    with meeting() as (place, waited):
        follower = meet(HERE, place, 1)
        (leader,) = waited.result()
        follower.close()
        with pytest.raises(LinkClosed):
            for _ in range(1000):
                leader.send(SentTrimming(1))


def test_a_meeting_place_is_sent_in_bytes():
    place = MeetingPlace(65535, bytes(range(32)))
    assert MeetingPlace(*PLACE.unpack(PLACE.pack(*place))) == place
