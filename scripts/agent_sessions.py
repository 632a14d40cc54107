"""Reduce recorded agent sessions to the figures that `benchmarks/fleet.py` plays.

The traces are those of callanjfox/kv-cache-tester (Apache-2.0), one object a session, with `requests`:
seconds since its start, agent, prompt tokens, reply tokens, seconds of service, and the ids of its blocks as
ranges. Ids are chained: equal ids are equal prefixes. No text is in them, and none in what is written.

    python -m scripts.agent_sessions agent-traces.json.gz benchmarks/agent_sessions.json
"""

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SESSIONS, MOST_REQUESTS = 40, 120
"""How many sessions are kept, evenly out of all, and how many requests of each."""
_LONGEST_WAIT_S = 600.0
_NONE = -1


def reduced(session: Mapping[str, Any], most_requests: int = MOST_REQUESTS) -> dict[str, Any]:
    """Return the figures of a session, of its first requests.

    Returns:
        `instructions`: tokens of tools and system text, at the beginning of each prompt that has them;
        `requests`: `[wait_s, parent, shared, prompt, reply]` each: seconds behind the end of the one before,
        the earlier request with the longest common prefix (-1: none), tokens of that prefix, tokens of the
        prompt, tokens of the reply.
    """
    block = session["block"]
    every_range = [ids for *_, ranges in session["requests"] for ids in ranges]
    last_with = np.full(max((first + count for first, count in every_range), default=0), _NONE)
    requests: list[list[float]] = []
    ended = 0.0
    for number, (at, _, prompt, reply, took, ranges) in enumerate(session["requests"][:most_requests]):
        parent, shared = _NONE, 0
        ids = _ids(ranges)
        known = np.flatnonzero(last_with[ids] != _NONE)
        if len(known):
            parent, shared = int(last_with[ids[known[-1]]]), (int(known[-1]) + 1) * block
        last_with[ids] = number
        wait = min(max(at - ended, 0.0), _LONGEST_WAIT_S) if number else 0.0
        requests.append([round(wait, 1), parent, min(shared, prompt), prompt, reply])
        ended = at + took
    return {"instructions": session["tool_tokens"] + session["system_tokens"], "requests": requests}


def _ids(ranges: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate(
        [np.empty(0, np.int64), *(np.arange(first, first + count) for first, count in ranges)]
    )


def main(traces: str, written: str) -> None:
    with gzip.open(traces, "rt", encoding="utf-8") as file:
        sessions = json.load(file)
    kept = sessions[:: max(len(sessions) // SESSIONS, 1)][:SESSIONS]
    rows = ",\n".join(json.dumps(reduced(session), separators=(",", ":")) for session in kept)
    Path(written).write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
