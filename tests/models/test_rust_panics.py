"""A panic is an error of a request; whatever else ends a thread is left alone."""

import pytest
from tokenizers import decoders

from start_llm.core.errors import InternalError
from start_llm.models.rust_panics import panics_as_errors


def panic() -> None:
    decoders.Strip("é", 1, 1).decode(["é"])


def test_a_panic_is_reported_as_an_error_of_the_request():
    with (
        pytest.raises(InternalError, match=r"The decoder has failed: .*slice"),
        panics_as_errors("The decoder"),
    ):
        panic()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, ValueError])
def test_whatever_else_is_raised_goes_on(kind: type[BaseException]):
    with pytest.raises(kind), panics_as_errors("The decoder"):
        raise kind
