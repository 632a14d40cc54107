"""Announces steps of a start that take long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

MOMENT_S = 3.0


@contextmanager
def announced_if_slow(say: Callable[[str], None], step: str) -> Generator[None]:
    """Say what the block does if it takes longer than a moment.

    Args:
        say: called on a thread of its own.
        step: a sentence.
    """
    timer = threading.Timer(MOMENT_S, say, [step])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
