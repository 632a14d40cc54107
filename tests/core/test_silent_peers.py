"""Connections end when the other machine is silent. That it ends was tried with a link that is taken down."""

from __future__ import annotations

import socket
import sys

import pytest

from start_llm.core.silent_peers import end_when_silent


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has other names for the same")
def test_a_connection_is_given_up_three_seconds_after_the_first_question():
    with socket.socket() as connection:
        end_when_silent(connection, 12)
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        values = {
            name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        }
    assert values == {
        "TCP_KEEPIDLE": 12,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": 15_000,
    }
