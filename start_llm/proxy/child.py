"""The proxy's own process: `python -m start_llm.proxy.child CONFIG PORT`.

LiteLLM runs inside uvicorn here. The process ends with its parent, however that ends: the parent holds the
other end of standard input, and never writes to it.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from start_llm.core.door import Door
from start_llm.proxy.door import ProxyDoor
from start_llm.proxy.wording import Application

_GRACE_S = 3
_LAST_MOMENT_S = 6.0


def main(config_path: str, port: int) -> None:
    """Serve until standard input closes or a signal comes."""
    servers: list[Any] = []
    is_orphan = threading.Event()
    threading.Thread(target=_end_with_parent, args=(servers, is_orphan), daemon=True).start()
    os.environ["CONFIG_FILE_PATH"] = config_path

    import uvicorn  # noqa: PLC0415 - both take seconds, and the parent is watched before
    from litellm.proxy.proxy_server import app  # noqa: PLC0415

    from start_llm.proxy.backend import Backend  # noqa: PLC0415
    from start_llm.proxy.direct import Direct  # noqa: PLC0415
    from start_llm.proxy.retry_after import RetryAfter  # noqa: PLC0415
    from start_llm.proxy.wording import OwnWords  # noqa: PLC0415

    backend = Backend()
    config = uvicorn.Config(
        _behind_the_door(Direct(OwnWords(RetryAfter(app), backend), backend)),
        host="127.0.0.1",
        port=port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    servers.append(uvicorn.Server(config))
    servers[0].run()
    if is_orphan.is_set():
        _vanish()


def _behind_the_door(inside: Application) -> ProxyDoor:
    keys, hosts = (_listed(f"START_LLM_PROXY_{name}") for name in ("KEYS", "HOSTS"))
    door = Door(keys, frozenset(name.lower() for name in hosts))
    return ProxyDoor(inside, door, int(os.environ["START_LLM_PROXY_MOST_BYTES"]))


def _listed(name: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ[name].split(",")))


def _end_with_parent(servers: list[Any], is_orphan: threading.Event) -> None:
    sys.stdin.buffer.read()
    is_orphan.set()
    for server in servers:
        server.should_exit = True
    threading.Event().wait(_LAST_MOMENT_S if servers else 0)
    _vanish()


def _vanish() -> NoReturn:
    """The parent removes the folder of the configuration, unless it was killed."""
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)
    # Not by returning: the interpreter would wait for LiteLLM's threads (lesson 33).
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
