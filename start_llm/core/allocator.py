"""What the C library does with memory that is free.

glibc gives threads heaps of their own, up to eight for each core, and once something large was freed it
keeps up to 64 MiB at the end of each. What an engine or a request has let go then stays with the process:
hundreds of megabytes, in steps, each the first time that a heap has seen a large piece of work.
"""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers that mallopt knows: malloc.h."""
_MIB = 2**20


def give_back_what_is_free() -> None:
    """Two heaps for all threads that come later, with 8 MiB free at their ends at most. Elsewhere: nothing.

    What computing takes and lets go again and again, up to the 32 MiB that glibc allows, stays within the
    heaps: taken from the system each time, every page of it would have to be cleared.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_ARENA_MAX, 2), (_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 8 * _MIB)):
        mallopt(option, value)
