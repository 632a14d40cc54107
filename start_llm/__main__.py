"""Run the command line: `python -m start_llm`, or the program `start_llm` of an installed package."""

import signal
import sys

# The imports take seconds. Ctrl-C during them must not print a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from start_llm.core.openblas import run_with_openblas  # noqa: E402

COMPUTING = ("serve", "doctor")
"""The commands that compute with MLX. They preload the same BLAS, however they are called."""


def main() -> int:
    """Run the command of the command line, and return its exit status."""
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        run_with_openblas()
    from start_llm.cli import main as run  # noqa: PLC0415 - nothing of it is needed before

    return run()


if __name__ == "__main__":
    sys.exit(main())
