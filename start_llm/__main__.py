"""Run the command line: `python -m start_llm`, or the program `start_llm` of an installed package."""

import signal
import sys

# The imports take seconds. Ctrl-C during them must not print a traceback.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from start_llm.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
