"""Whether the client of the request that a thread works on is still there.

A request is prepared by the thread of its connection, in a dozen places that know nothing of sockets: they
ask here, before each piece of work that takes long. Threads without a client never give up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from start_llm.core.errors import ClientGone

LOOK_S = 0.05
"""Seconds between two looks of a thread that waits."""


def _never() -> bool:
    return False


_HAS_LEFT: ContextVar[Callable[[], bool]] = ContextVar("has_left", default=_never)


@contextmanager
def client_watched(has_left: Callable[[], bool]) -> Generator[None]:
    """Name, for this thread and this block, who knows whether the client has left. It must not wait."""
    token = _HAS_LEFT.set(has_left)
    try:
        yield
    finally:
        _HAS_LEFT.reset(token)


@contextmanager
def work_for_all() -> Generator[None]:
    """Go on with what this block does when the client leaves, because others wait for it too."""
    with client_watched(_never):
        yield


def check_client() -> None:
    """Give up if nobody waits for the work of this thread any more.

    Raises:
        ClientGone: the client has left.
    """
    if _HAS_LEFT.get()():
        raise ClientGone("the client hung up")


@contextmanager
def held_in_turn(lock: threading.Lock | threading.Semaphore) -> Generator[None]:
    """Hold a lock while the block runs. Who waits for it looks for the client meanwhile.

    Raises:
        ClientGone: the client has left.
    """
    check_client()
    while not lock.acquire(timeout=LOOK_S):
        check_client()
    try:
        yield
    finally:
        lock.release()
