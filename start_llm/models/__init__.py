"""Loads and describes model folders. `library` finds and downloads them.

Import mlx_lm through this package. Its import sets the limit on open files to 2048, which is lower than the
limit of most machines, and an ordinary user cannot raise it again (lesson 2).
"""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

_WANTED_FILES = 8192


@contextmanager
def _file_limit_left_alone() -> Generator[None]:
    set_limit = resource.setrlimit

    def ignore(*_: Any) -> None:
        """Replaces `resource.setrlimit` while mlx_lm is imported."""

    resource.setrlimit = ignore
    try:
        yield
    finally:
        resource.setrlimit = set_limit


def _raise_file_limit() -> None:
    """Raise the limit on open files: a server needs one for each client, and some systems start with 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


with _file_limit_left_alone():
    import mlx_lm.utils as mlx_lm_utils
_raise_file_limit()

__all__ = ["mlx_lm_utils"]
