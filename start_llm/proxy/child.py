"""Run LiteLLM in uvicorn, in the proxy's own process: `python -m start_llm.proxy.child CONFIG PORT`.

The parent holds the write end of this process's standard input and never writes to it. Standard input closes
when the parent ends, even after `kill -9`, and then this process ends too.
"""

import gc
import math
import os
import shutil
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from start_llm.access.loopback import bound_socket, loopback_addresses

_GRACE_S = 3
LAST_MOMENT_S = 6.0
"""Seconds after the end of its parent by which the process has ended, whatever still runs in it."""


def main(config_path: str, port: int) -> None:
    """Serve until standard input closes or a signal arrives."""
    servers: list[Any] = []
    is_orphan = threading.Event()
    threading.Thread(target=_end_with_parent, args=(servers, is_orphan), daemon=True).start()
    os.environ["CONFIG_FILE_PATH"] = config_path

    import uvicorn  # noqa: PLC0415 - LiteLLM takes seconds, and the parent must be watched before

    from start_llm.proxy.around_litellm import application  # noqa: PLC0415
    from start_llm.proxy.config import HEADER_S, IDLE_S  # noqa: PLC0415
    from start_llm.proxy.half_open import KeptHalfOpen  # noqa: PLC0415

    idle_s, header_s = (float(os.environ[name]) for name in (IDLE_S, HEADER_S))
    protocol: Any = partial(KeptHalfOpen, idle_s, header_s)
    config = uvicorn.Config(
        application(),
        http=protocol,
        timeout_keep_alive=math.ceil(idle_s),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    servers.append(uvicorn.Server(config))
    # A collection would go through all of LiteLLM each time: a tenth of a second (lesson 330).
    gc.collect()
    gc.freeze()
    servers[0].run(sockets=[bound_socket(address, port) for address in loopback_addresses()])
    if is_orphan.is_set():
        _vanish()


def _end_with_parent(servers: list[Any], is_orphan: threading.Event) -> None:
    sys.stdin.buffer.read()
    is_orphan.set()
    for server in servers:
        server.should_exit = True
    threading.Event().wait(LAST_MOMENT_S if servers else 0)
    _vanish()


def _vanish() -> NoReturn:
    """Delete the configuration's folder and exit. The parent deletes it too, unless it was killed."""
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    # A normal return would wait for LiteLLM's threads (lesson 33).
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
