"""TCP connections that end when the machine at the other end is silent: one that loses its power or its
network closes nothing.
"""

import socket
import sys

_PROBES = 3
"""Keepalive probes, a second apart, that the other machine leaves without an answer."""
_DARWIN_DROP_TIME = 0x80
"""TCP_RXT_CONNDROPTIME of macOS, for which Python has no name: seconds of vain repetitions."""


def end_when_silent(connection: socket.socket, silence_s: int) -> None:
    """Have the system end a TCP connection some seconds after the last sign of life.

    A process that is busy, or stopped, is not silent: its system answers.

    Args:
        silence_s: whole seconds before the first keepalive probe; three more pass until it is given up.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _options(silence_s):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _options(silence_s: int) -> list[tuple[int, int]]:
    """Return options for an end that is silent, and for one that does not acknowledge what is sent."""
    asked = [(socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, _PROBES)]
    if sys.platform == "darwin":
        return [*asked, (socket.TCP_KEEPALIVE, silence_s), (_DARWIN_DROP_TIME, silence_s + _PROBES)]
    return [
        *asked,
        (socket.TCP_KEEPIDLE, silence_s),
        (socket.TCP_USER_TIMEOUT, 1000 * (silence_s + _PROBES)),
    ]
