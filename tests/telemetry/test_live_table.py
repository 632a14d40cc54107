"""The live table: what it shows of running requests, in the room that it has."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest

from start_llm.core.events import Restored
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.live_table import LiveTable, MemoryUse
from start_llm.telemetry.request_record import RequestFacts, RequestRecord
from tests.telemetry.test_terminal import facts
from tests.telemetry.ttys import COLOUR

WIDE = os.terminal_size((120, 24))


def table(activity: Activity) -> LiveTable:
    return LiveTable(activity, lambda: MemoryUse(3 * 2**29, 2**33))


def rows(activity: Activity, size: os.terminal_size = WIDE) -> list[str]:
    live = table(activity)
    return [COLOUR.sub("", row) for row in live.frame(live.state(), size)]


def reading(activity: Activity, asked: RequestFacts | None = None) -> RequestRecord:
    """A request of which 1,000 tokens were cached, and 500 more were read in five seconds."""
    running = RequestRecord(asked or facts(prompt_tokens=2000))
    activity.begin(running)
    running.note_restored(Restored(1000, at=time.perf_counter() - 5))
    running.done = 1500
    return running


def test_without_requests_there_is_one_row_with_the_memory():
    assert [row.rstrip() for row in rows(Activity())] == [
        "waiting for requests  ·  memory 1.5 GiB of 8.0 GiB"
    ]


def test_a_request_that_is_read_shows_how_far_it_is_and_how_fast_tokens_are_computed():
    activity = Activity(lambda: 1000.0)
    reading(activity)
    row = next(row for row in rows(activity) if "claude-cli" in row)
    assert re.match(r"digest ersation-42 +claude-cli +chat +reading +2,000 +1,000 +500 +0 +(99|100) +0", row)


def test_a_request_that_is_written_shows_the_speed_of_its_reply():
    activity = Activity()
    running = reading(activity)
    running.note_text(1, time.perf_counter())
    running.written, running.first_text = 301, time.perf_counter() - 10
    row = next(row for row in rows(activity) if "claude-cli" in row)
    assert re.search(r"writing +2,000 +1,000 +1,000 +301 +30 ", row)


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_every_row_fits_the_terminal(columns: int):
    activity = Activity()
    for number in range(50):
        reading(activity, facts(name=f"session-{number}", prompt_tokens=10**6))
    shown = rows(activity, os.terminal_size((columns, 24)))
    assert len(shown) < 24
    assert max(map(len, shown)) < columns
    assert "and 31 more" in "\n".join(shown)


def test_equal_states_are_equal_and_others_are_not():
    activity = Activity(lambda: 1000.0)
    live = table(activity)
    assert live.state() == live.state()
    before = live.state()
    activity.begin(RequestRecord(facts()))
    assert live.state() != before


@pytest.mark.parametrize(
    "line",
    ["12:00:00 chat  a [bold]b[/] complete  7 cached 9 read", "  model  demo", "", "x" * 2000, "\n  Try:"],
)
def test_a_painted_line_has_colours_and_no_other_words(line: Any):
    painted = table(Activity()).painted(line)
    assert COLOUR.sub("", painted) == line
    assert ("\x1b" in painted) == (line.startswith(("12", "  model")))
