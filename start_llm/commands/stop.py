"""`start_llm stop`: end the running server as Ctrl-C would, and wait until it has ended."""

import os
import signal
import time
from collections.abc import Callable, Sequence

from start_llm.commands.server_status import NOT_RUNNING
from start_llm.core.errors import CommandError
from start_llm.proxy.ports import is_free, owner, user_of
from start_llm.storage.running_servers import RunningServer

_POLL_S = 0.1
_BETWEEN_SIGNALS_S = 0.5
_STILL_RUNNING = 1

type Servers = Callable[[], Sequence[RunningServer]]
type Say = Callable[[str], None]


def stop(
    servers: Servers, port: int | None, configured: int, say: Say, *, patience_s: float, at_once: bool
) -> int:
    """Stop a server. Return 0 if it has ended, 1 if it has not within the time, 3 if none runs.

    Args:
        servers: returns the servers of this user that run now.
        port: of the one to stop; None if there is only one.
        configured: the port that the settings have, to say who listens there.
        at_once: do not wait for running requests.

    Raises:
        CommandError: several run and none is chosen, or the server is another user's.
    """
    server = _chosen(servers(), port)
    if server is None:
        say(_nobody(port or configured))
        return NOT_RUNNING
    say(f"Stopping the server at {server.url} (process {server.pid}) ...")
    began = time.monotonic()
    _signal(server)
    if at_once and not _has_ended(servers, server, _BETWEEN_SIGNALS_S):
        _signal(server)
    if not _has_ended(servers, server, patience_s):
        say(f"It has not ended within {patience_s:g} s. `start_llm stop --now` ends it at once.")
        return _STILL_RUNNING
    say(f"Stopped after {time.monotonic() - began:.1f} s.")
    return 0


def _chosen(running: Sequence[RunningServer], port: int | None) -> RunningServer | None:
    if port is not None:
        return next((server for server in running if server.port == port), None)
    if len(running) > 1:
        ports = ", ".join(str(server.port) for server in running)
        raise CommandError(f"{len(running)} servers run, on the ports {ports}. Name one with --port.")
    return next(iter(running), None)


def _nobody(port: int) -> str:
    """Return why there is nothing to stop."""
    holder = owner(port)
    if holder is None:
        reason = "" if is_free(port) else f" A process of another user listens on port {port}."
        return f"No server of yours is running.{reason}"
    whose = user_of(holder.pid)
    return (
        f"No server of yours is running here. On port {port} listens process {holder.pid} of {whose}: "
        f"{holder.command}"
    )


def _signal(server: RunningServer) -> None:
    """Send SIGTERM.

    Raises:
        CommandError: the process belongs to another user.
    """
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        whose = user_of(server.pid)
        raise CommandError(
            f"The server at {server.url} (process {server.pid}) belongs to {whose}, who alone can stop it."
        ) from None


def _has_ended(servers: Servers, server: RunningServer, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(other.pid == server.pid for other in servers()):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
