"""Memory that is free goes back to the system. In a process of its own: it is decided once."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORK = """
import ctypes, os, sys, threading
from start_llm.core.allocator import limit_malloc_retention

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "with":
    limit_malloc_retention()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def touched(size):
    place = libc.malloc(size)
    ctypes.memset(place, 1, size)
    return place

libc.free(touched(20 * 2**20))
before, together = resident(), threading.Barrier(8)

def work():
    together.wait()
    places = [touched(64 * 2**10) for _ in range(400)]
    together.wait()
    for place in places:
        libc.free(place)
    together.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print((resident() - before) // 2**20)
"""


def megabytes_left(how: str) -> int:
    """Of 200 that eight threads had at once."""
    return int(subprocess.check_output([sys.executable, "-c", WORK, how]))


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_threads_have_let_go_goes_back_to_the_system():
    assert megabytes_left("with") < 80
    assert megabytes_left("without") > 150
