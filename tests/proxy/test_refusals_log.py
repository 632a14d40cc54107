"""A refused request takes a line of the proxy's log; anything else keeps its traceback."""

import io
import logging
from collections.abc import Iterator

import pytest

from start_llm.proxy.refusals import shorten_refusals


class Refused(Exception):
    def __init__(self, status: object) -> None:
        super().__init__("'top_p' must be\nfrom 0 to 1.")
        self.status_code = status


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What LiteLLM's log gets."""
    logger, stream = logging.getLogger("LiteLLM Proxy"), io.StringIO()
    before = list(logger.filters)
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    shorten_refusals()
    yield stream
    logger.removeHandler(handler)
    for one in set(logger.filters) - set(before):
        logger.removeFilter(one)


def fail_with(error: Exception) -> None:
    try:
        raise error
    except Exception:
        logging.getLogger("LiteLLM Proxy").exception("It failed: %s %s", "a", "b")


@pytest.mark.parametrize("status", [400, 404, 429])
def test_a_refusal_is_one_line(written: io.StringIO, status: int):
    fail_with(Refused(status))
    assert written.getvalue() == f"A request was refused with {status}: 'top_p' must be from 0 to 1.\n"


@pytest.mark.parametrize("error", [Refused(500), ValueError("else"), Refused("400")], ids=repr)
def test_a_failure_keeps_its_traceback(written: io.StringIO, error: Exception):
    fail_with(error)
    assert written.getvalue().startswith("It failed: a b\nTraceback")
