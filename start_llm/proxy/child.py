"""Run LiteLLM in uvicorn, in the proxy's own process: `python -m start_llm.proxy.child CONFIG PORT`.

The parent holds the write end of this process's standard input and never writes to it. Standard input closes
when the parent ends, even after `kill -9`, and then this process ends too.
"""

import gc
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.access.loopback import bound_socket, loopback_addresses
from start_llm.protocols.notices import Notices
from start_llm.proxy.control_fields import litellm_names
from start_llm.proxy.error_text import Application
from start_llm.proxy.proxy_access import ProxyAccessPolicy
from start_llm.proxy.refusals import tell_server

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

    from start_llm.proxy.half_open import KeptHalfOpen  # noqa: PLC0415

    config = uvicorn.Config(
        _application(),
        http=KeptHalfOpen,
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


def _application() -> ProxyAccessPolicy:
    """Return LiteLLM with everything around it, from the outside in."""
    from litellm.proxy.proxy_server import app  # noqa: PLC0415

    from start_llm.proxy.backend import SERVER, Backend  # noqa: PLC0415
    from start_llm.proxy.direct import Direct  # noqa: PLC0415
    from start_llm.proxy.error_text import ErrorRewriter  # noqa: PLC0415
    from start_llm.proxy.own_bodies import OwnBodies  # noqa: PLC0415
    from start_llm.proxy.refusals import shorten_refusals  # noqa: PLC0415
    from start_llm.proxy.relay import Relay, watch_replies  # noqa: PLC0415
    from start_llm.proxy.to_status_page import ToStatusPage  # noqa: PLC0415

    # LiteLLM can look up any variable of its environment.
    secret = BackendSecret(os.environ.pop("START_LLM_BACKEND_SECRET"))
    backend = Backend(secret)
    shorten_refusals()
    watch_replies()
    litellm = ErrorRewriter(Relay(app), backend)
    bodies = OwnBodies(
        ToStatusPage(Direct(litellm, backend), SERVER),
        control=litellm_names(),
        max_body_bytes=int(os.environ["START_LLM_PROXY_MOST_BYTES"]),
        default_name=backend.default_model,
        tell=Notices(tell_server).tell,
    )
    return _with_access_policy(bodies, secret)


def _with_access_policy(inside: Application, secret: BackendSecret) -> ProxyAccessPolicy:
    keys, hosts, origins = (_listed(f"START_LLM_PROXY_{name}") for name in ("KEYS", "HOSTS", "ORIGINS"))
    names = frozenset(name.lower() for name in hosts)
    access_policy = AccessPolicy(keys, names, AllowedOrigins(origins))
    return ProxyAccessPolicy(inside, access_policy, secret, int(os.environ["START_LLM_PROXY_MOST_BYTES"]))


def _listed(name: str) -> tuple[str, ...]:
    return tuple(filter(None, os.environ[name].split(",")))


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
