"""Repeats an action while another thread waits for something that takes long."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

from start_llm.core.errors import ClientGone


@contextmanager
def repeated(action: Callable[[], None], interval_s: float) -> Generator[None]:
    """Call `action` at intervals, on a thread of its own, while the block runs.

    Raises:
        ClientGone: the action raised it, and was not repeated then. Raised once the block has ended.
    """
    done = threading.Event()
    gone: list[ClientGone] = []

    def repeat() -> None:
        try:
            while not done.wait(interval_s):
                action()
        except ClientGone as error:
            gone.append(error)

    thread = threading.Thread(target=repeat, name="life signs", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if gone:
        raise gone[0]
