"""The progress of a download, and its line on a terminal."""

import io

import pytest

from start_llm.library.progress import Progress, ProgressLine


class Clock:
    """Shows what it is set to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_speed_is_that_of_the_last_five_seconds(clock):
    progress = Progress(clock)
    assert progress.bytes_per_sec == 0
    for _ in range(20):
        progress.receive(1000)
        clock.now += 1
    assert progress.bytes_per_sec == 1000
    progress.receive(21_000)
    assert progress.bytes_per_sec == (5 * 1000 + 21_000) // 5
    clock.now += 5.1
    assert progress.bytes_per_sec == 0


def test_a_screen_has_one_line_that_changes(clock):
    progress, screen = Progress(clock), Screen()
    line = ProgressLine(progress, screen, clock)
    progress.begin(2, 10_000_000)
    progress.current_file = "model.safetensors"
    progress.have(5_000_000)
    line.update()
    line.update()
    clock.now += 0.3
    line.update()
    line.end()
    assert screen.getvalue().count("\r") == 2
    assert "\r   50%  5 of 10 MB  0.0 MB/s  model.safetensors" in screen.getvalue()
    assert screen.getvalue().endswith("\n")


def test_a_file_gets_a_line_every_ten_seconds(clock):
    progress, file = Progress(clock), io.StringIO()
    line = ProgressLine(progress, file, clock)
    for _ in range(21):
        line.update()
        clock.now += 1
    line.end()
    assert file.getvalue().count("\n") == 3
    assert "\r" not in file.getvalue()
    assert "100%  0 of 0 MB" in file.getvalue()
