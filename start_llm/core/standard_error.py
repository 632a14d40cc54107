"""Print to the standard error, which may be a terminal or a pipe that has gone.

Whoever prints what nobody expected has more to do than that: an error of the output must not keep it from it.
"""

import sys
import traceback
from contextlib import suppress


def print_traceback() -> None:
    """Print the error that is being handled, if anybody can read it."""
    with suppress(OSError, ValueError):
        traceback.print_exc()


def print_message(message: str) -> None:
    """Print a line, if anybody can read it."""
    with suppress(OSError, ValueError):
        print(message, file=sys.stderr)
