"""Limits that the user sets, and that parts keep."""

from dataclasses import dataclass

STALL_S = 0.23
"""Target for the longest pause of a running reply, in seconds. Its stream still appears to flow."""
DECODE_SHARE = 1 / 3
"""Share of the engine's time for running replies while a prompt is prefilled alone.

Short prompts that share a pass leave them one step behind it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits per client, and the number of connections.

    Attributes:
        max_connections: open sockets; beyond it the one is closed that has been without a whole request for
            longest.
        max_body_bytes: length of a request body.
        idle_s: silence between two requests. Longer than proxies pool connections, up to 120 s.
        header_s, body_s: time to send all headers, and then the whole body.
        write_s: time for which a client may read nothing.
        keep_alive_s: silence in a stream after which an empty data event is sent.
        load_wait_s: time for which a request without a stream waits for its model to be loaded.
    """

    max_connections: int
    max_body_bytes: int
    idle_s: float
    header_s: float
    body_s: float
    write_s: float
    keep_alive_s: float
    load_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of the engine, in seconds.

    Attributes:
        chunk_s: a prefill chunk, during which running replies pause.
        decode_share: share of the time for running replies while a prompt is prefilled alone; not seconds.
        preempt_after_s: a reply's run before it can be preempted for a waiting request.
        deadline_s: the total run time of a request, without the time that it was preempted; 0 is no limit.
        stall_s: time in one step after which the engine counts as stuck.
    """

    chunk_s: float = STALL_S
    decode_share: float = DECODE_SHARE
    preempt_after_s: float = 4.0
    deadline_s: float = 0.0
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits of one image, and of their number in a request."""

    max_bytes: int
    max_pixels: int
    max_count: int
