"""Errors are printed where somebody reads them, and are no further errors where nobody does."""

import os
import sys
from collections.abc import Iterator

import pytest

from start_llm.core.standard_error import print_message, print_traceback


@pytest.fixture(params=["a pipe that nobody reads", "closed"])
def gone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    reads, writes = os.pipe()
    os.close(reads)
    output = os.fdopen(writes, "w", buffering=1)
    monkeypatch.setattr(sys, "stderr", output)
    if request.param == "closed":
        with pytest.raises(BrokenPipeError):
            output.write("lost\n")
        with pytest.raises(BrokenPipeError):
            output.close()
    yield
    monkeypatch.undo()


def fail() -> None:
    try:
        raise ArithmeticError("the second one")
    except ArithmeticError:
        print_traceback()


@pytest.mark.usefixtures("gone")
def test_an_output_that_has_gone_is_no_error():
    fail()
    print_message("a line")


def test_where_somebody_reads_the_whole_error_is_printed(capsys: pytest.CaptureFixture[str]):
    fail()
    print_message("a line")
    assert capsys.readouterr().err.endswith("ArithmeticError: the second one\na line\n")
