"""Clients that leave: the engine is free again within a chunk or a step, and nothing of them stays behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.chaos.state import Held
from tests.server.client import TEXT, Client, engine_is_free, stats, wait_until
from tests.server.conftest import LONG_PROMPT
from tests.serving import Server, serving

Leave = Callable[[Client], None]
WAYS_TO_LEAVE: list[Leave] = [Client.close, Client.reset]
FREE_WITHIN_S = 8.0
"""A chunk lasts a second, and while the pacer learns what long ones cost, one may last four."""
STATM = Path("/proc/self/statm")
READING = {"prompt": LONG_PROMPT}
SHORTER_READING = {"prompt": LONG_PROMPT[:6000]}
WRITING = {"prompt": [1, 2, 3]}

streamed = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
drain = pytest.mark.parametrize("leave", WAYS_TO_LEAVE, ids=["closes", "resets"])


def asking(server: Server, stack: ExitStack, body: dict[str, Any], stream: bool) -> Client:
    client = stack.enter_context(Client(server.port))
    client.request("POST", TEXT, body | {"stream": stream})
    return client


def is_reading(server: Server) -> bool:
    return stats(server.port)["engine"]["prefill"] is not None


def is_writing(server: Server) -> bool:
    return stats(server.port)["batch"]["active_rows"] > 0


def is_waiting(server: Server) -> bool:
    return stats(server.port)["engine"]["waiting"] > 0


def cancelled(server: Server) -> int:
    return stats(server.port)["requests"]["endings"].get("cancelled", 0)


def wait_until_free(server: Server) -> None:
    wait_until(lambda: engine_is_free(server.port), within_s=FREE_WITHIN_S)


@pytest.mark.thorough
@pytest.mark.checked(2)
@drain
@streamed
@pytest.mark.parametrize(("body", "has_begun"), [(READING, is_reading), (WRITING, is_writing)])
def test_who_leaves_while_served_frees_the_engine(
    endless: Server, body: dict[str, Any], has_begun: Callable[[Server], bool], stream: bool, leave: Leave
):
    before = cancelled(endless)
    with ExitStack() as stack:
        client = asking(endless, stack, body, stream)
        wait_until(lambda: has_begun(endless), within_s=5)
        leave(client)
        wait_until_free(endless)
    assert cancelled(endless) == before + 1


@pytest.mark.thorough
@drain
@streamed
def test_who_leaves_while_waiting_is_forgotten_and_holds_nobody_up(
    endless: Server, stream: bool, leave: Leave
):
    before = cancelled(endless)
    with ExitStack() as stack:
        served = asking(endless, stack, READING, stream=True)
        wait_until(lambda: is_reading(endless), within_s=5)
        waiting = asking(endless, stack, READING, stream)
        wait_until(lambda: is_waiting(endless), within_s=5)
        leave(waiting)
        wait_until(lambda: not is_waiting(endless), within_s=FREE_WITHIN_S)
        assert is_reading(endless)
        assert cancelled(endless) == before + 1
        leave(served)
        wait_until_free(endless)


@pytest.mark.sample(2)
@streamed
def test_who_leaves_a_batch_leaves_the_others_in_it(endless: Server, stream: bool):
    with ExitStack() as stack:
        leaver, stayer = (asking(endless, stack, WRITING, is_streamed) for is_streamed in (stream, True))
        wait_until(lambda: stats(endless.port)["batch"]["active_rows"] == 2, within_s=5)
        leaver.close()
        wait_until(lambda: stats(endless.port)["batch"]["active_rows"] == 1, within_s=FREE_WITHIN_S)
        stayer.head()
        events = stayer.events()
        assert all(next(events)["choices"] for _ in range(20))
        stayer.close()
        wait_until_free(endless)


@pytest.mark.thorough
def test_the_next_request_is_served_at_once_when_the_one_before_has_left(endless: Server):
    with ExitStack() as stack:
        leaver = asking(endless, stack, READING, stream=False)
        wait_until(lambda: is_reading(endless), within_s=5)
        leaver.close()
        client = asking(endless, stack, WRITING | {"max_tokens": 3}, stream=False)
        client.socket.settimeout(FREE_WITHIN_S)
        assert client.reply().json["usage"]["completion_tokens"] == 3


# --------------------------------------------------------------------------------------- nothing stays behind


def five_leave(server: Server, leave: Leave) -> None:
    """Two whose replies are being written, one whose prompt is being read, and two who wait."""
    with ExitStack() as stack:
        clients = [asking(server, stack, WRITING, stream) for stream in (True, False)]
        wait_until(lambda: stats(server.port)["batch"]["active_rows"] == 2, within_s=5)
        clients += [asking(server, stack, SHORTER_READING, stream) for stream in (True, False, True)]
        wait_until(lambda: stats(server.port)["engine"]["waiting"] == 2, within_s=5)
        wait_until(lambda: is_reading(server), within_s=5)
        for client in clients:
            leave(client)
        wait_until_free(server)


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def held() -> Counter[str]:
    """Threads and descriptors of this process, by their names and kinds."""
    now = Held.now()
    return Counter(now.threads) + Counter(now.descriptors)


def fifty_leave(server: Server) -> int:
    """Returns the most memory that was held after any five.

    The allocator keeps pages and gives them back as it likes: of many fifties the highest was 8 % above the
    lowest, without a trend.
    """
    others = set(threading.enumerate())
    held_after: list[int] = []
    for turn in range(10):
        five_leave(server, WAYS_TO_LEAVE[turn % 2])
        held_after.append(resident_bytes())
    wait_until(lambda: set(threading.enumerate()) <= others, within_s=FREE_WITHIN_S)
    gc.collect()
    return max(held_after)


@pytest.mark.skipif(not STATM.exists(), reason="reads /proc, which this system does not have")
@pytest.mark.long
def test_fifty_who_leave_in_a_row_leave_nothing_after(endless_model: Path):
    """Without a cache, which would keep what was computed, and know the prompt that the others wait for.

    What the servers of other tests held in this process may go meanwhile.
    """
    with serving(endless_model, batch=3, cache_is_on=False) as server:
        resident = max(fifty_leave(server) for _ in range(2))
        before, active = held(), mx.get_active_memory()
        assert min(fifty_leave(server) for _ in range(2)) <= resident * 1.02
        wait_until(lambda: not held() - before, within_s=FREE_WITHIN_S)
        assert mx.get_active_memory() <= active * 1.02
