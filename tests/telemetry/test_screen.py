"""The terminal's thread: real pipes and pseudo-terminals, read or not."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

import pytest

from start_llm.telemetry.screen import Line, is_lively
from start_llm.telemetry.terminal import Terminal
from tests.server.client import wait_until
from tests.telemetry.ttys import ERASED, LIVELY, a_tty


class Counter:
    """A view of as many rows as it counts to."""

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows

    def state(self) -> int:
        return self.rows

    def frame(self, state: int, size: os.terminal_size) -> Sequence[str]:
        return [f"\x1b[2mrow {number} of {state}\x1b[0m".ljust(size.columns - 1) for number in range(state)]

    def painted(self, line: str) -> str:
        return f"<{line}>"


@contextmanager
def following(stream: TextIO, view: Any, environment: dict[str, str]) -> Generator[Terminal]:
    terminal = Terminal(stream)
    terminal.follow(view, environment)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("environment", "is_live"),
    [
        (LIVELY, True),
        (LIVELY | {"NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({}, False),
    ],
)
def test_a_terminal_gets_escape_codes_if_it_understands_them_and_the_user_wants_them(environment, is_live):
    with a_tty() as tty:
        assert is_lively(tty.writer, environment) is is_live
        with following(tty.stream, Counter(), environment) as terminal:
            assert terminal.is_live is is_live
            terminal.say("hello")
            tty.until("hello")
        assert ("\x1b" in tty.text) is is_live


def test_a_pipe_gets_plain_lines(tmp_path):
    with (tmp_path / "log").open("w") as stream, following(stream, Counter(), LIVELY) as terminal:
        terminal.say("first")
        terminal._print(Line(("second", "in parts")))
    assert (tmp_path / "log").read_text() == "first\nsecond  in parts\n"


@pytest.mark.thorough
def test_the_view_stays_below_the_lines_and_is_gone_at_the_end():
    with a_tty() as tty:
        view = Counter(2)
        with following(tty.stream, view, LIVELY) as terminal:
            tty.until("row 1 of 2")
            terminal.say("hello")
            tty.until("<hello>")
            view.rows = 1
            tty.until("row 0 of 1")
        tty.until(ERASED.format(1))
        drawn = re.sub(r" +(?=\n)", "", tty.text)
    assert drawn.endswith(ERASED.format(1)), "nothing is left of the view"
    assert f"{ERASED.format(2)}<hello>\n\x1b[2mrow 0 of 2" in drawn
    assert "\x1b[?25l" not in drawn, "a killed process leaves a cursor"


def test_a_line_that_is_too_long_for_the_terminal_is_folded_between_its_parts():
    with a_tty() as tty, following(tty.stream, Counter(), LIVELY) as terminal:
        terminal._print(Line(("12:00:00 chat", "  7 cached 9 read", "because of that")))
        tty.until("because")
        assert "<12:00:00 chat    7 cached 9 read>\n<     because of that>\n" in tty.text


@pytest.mark.thorough
def test_rows_that_a_narrower_terminal_has_wrapped_are_removed_too():
    with a_tty() as tty, following(tty.stream, Counter(2), LIVELY) as terminal:
        tty.until("row 1 of 2")
        tty.resize(20)
        terminal.say("hello")
        tty.until("<hello>")
        assert f"{ERASED.format(4)}<hello>" in tty.text


def test_a_terminal_that_is_not_read_holds_nobody_up_and_what_it_missed_is_counted():
    with a_tty(is_read=False) as tty:
        terminal = Terminal(tty.stream)
        terminal.follow(Counter(), LIVELY)
        began = time.monotonic()
        for number in range(5000):
            terminal.say(f"line {number} {'x' * 100}")
        assert time.monotonic() - began < 1
        tty.read()
        terminal.close()
        wait_until(lambda: sum(shown_and_dropped(tty.text)) == 5000, within_s=5)
        assert shown_and_dropped(tty.text)[0] < 3500


def shown_and_dropped(text: str) -> tuple[int, int]:
    """Return how many lines a terminal got, and of how many others it read."""
    dropped = re.findall(r"([\d,]+) lines were not shown", text)
    return len(re.findall(r"<line \d+ ", text)), sum(int(count.replace(",", "")) for count in dropped)


@pytest.mark.thorough
def test_the_end_does_not_wait_for_a_terminal_that_is_not_read():
    with a_tty(is_read=False) as tty:
        terminal = Terminal(tty.stream)
        terminal.follow(Counter(), LIVELY)
        for _ in range(500):
            terminal.say("x" * 200)
        began = time.monotonic()
        terminal.abandon()
        terminal.close()
        assert time.monotonic() - began < 2
        tty.read()  # so that the thread ends before its terminal is closed
        tty.until(ERASED.format(1))


def test_who_ends_at_once_still_removes_the_view():
    with a_tty() as tty, following(tty.stream, Counter(3), LIVELY) as terminal:
        tty.until("row 2 of 3")
        terminal.abandon()
        tty.until(ERASED.format(3))


def test_a_terminal_that_was_closed_stops_nobody():
    with a_tty(is_read=False) as tty, following(tty.stream, Counter(), LIVELY) as terminal:
        os.close(tty.reader)
        for _ in range(10):
            terminal.say("nobody reads this")
        tty.reader = os.open(os.devnull, os.O_RDONLY)


def test_errors_are_lines_while_the_view_is_shown(monkeypatch):
    with a_tty() as tty:
        monkeypatch.setattr(sys, "stderr", tty.stream)
        with following(tty.stream, Counter(), LIVELY):
            sys.stderr.write("Traceback\n  File")
            sys.stderr.write(" x\n")
            tty.until("<Traceback>")
            tty.until("<  File x>")


@pytest.mark.thorough
def test_a_flood_of_lines_is_drawn_in_few_frames():
    with a_tty() as tty:
        with following(tty.stream, Counter(), LIVELY) as terminal:
            tty.until("row")
            for number in range(100):
                terminal.say(f"line {number}")
                time.sleep(0.005)
        tty.until("<line 99>")
        assert tty.text.count("row 0 of 1") < 10
        assert len(re.findall(r"<line \d+>", tty.text)) == 100


@pytest.mark.long
@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="macOS does not tell a thread's time")
def test_an_idle_view_costs_next_to_nothing():
    with a_tty() as tty, following(tty.stream, Counter(), LIVELY) as terminal:
        tty.until("row")
        screen = terminal._screen
        assert screen
        assert screen._thread.ident
        clock, before = time.pthread_getcpuclockid(screen._thread.ident), len(tty.text)
        began = time.clock_gettime(clock)
        time.sleep(2)
        assert time.clock_gettime(clock) - began < 0.02, "1 % of a core"
        assert len(tty.text) == before, "nothing is drawn that has not changed"
