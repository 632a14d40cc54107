"""Limit how much free memory glibc keeps in the process.

glibc gives threads heaps of their own, up to eight for each core. Once a large block has been freed, it keeps
up to 64 MiB at the end of each heap. So memory that an engine or a request has freed stays with the process:
hundreds of megabytes, in steps, each when a heap first sees a large piece of work.
"""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Option numbers of mallopt, from malloc.h."""
_MIB = 2**20


def give_back_free_memory() -> None:
    """Return to the system what glibc holds free in the middle of its heaps, too. No effect elsewhere.

    After a text of many megabytes was encoded, that is gigabytes. It takes some milliseconds for each.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def limit_malloc_retention() -> None:
    """Limit glibc to two heaps for later threads, with at most 8 MiB free at their ends. No effect elsewhere.

    Blocks of up to 32 MiB, the most that glibc allows, stay within the heaps when they are freed: computing
    allocates them again and again, and the system would have to clear every page of new memory.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_ARENA_MAX, 2), (_MMAP_THRESHOLD, 32 * _MIB), (_TRIM_THRESHOLD, 8 * _MIB)):
        mallopt(option, value)
