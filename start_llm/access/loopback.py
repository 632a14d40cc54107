"""The loopback addresses of this machine. `localhost` means either, and some clients try only the first."""

import socket

IPV4_LOOPBACK, IPV6_LOOPBACK = "127.0.0.1", "::1"


def loopback_addresses() -> tuple[str, ...]:
    """Return the addresses of loopback: the second one only where the system has IPv6."""
    try:
        bound_socket(IPV6_LOOPBACK, 0).close()
    except OSError:
        return (IPV4_LOOPBACK,)
    return IPV4_LOOPBACK, IPV6_LOOPBACK


def bound_socket(address: str, port: int) -> socket.socket:
    """Return a TCP socket at this port of a loopback address.

    Raises:
        OSError: there is no such address, or another socket has the port.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address, port))
    except OSError:
        bound.close()
        raise
    return bound
