"""Run a benchmark: `.venv/bin/python -m benchmarks PROGRAM [--only PART ...]`; without PROGRAM, list all."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # so that `python /any/where/benchmarks` works too

from benchmarks.harness import main  # noqa: E402 - found through the line above
from start_llm.core.openblas import run_with_openblas  # noqa: E402

if __name__ == "__main__":
    if "install" not in sys.argv[1:2]:  # it starts the installer as a newcomer does, who preloads nothing
        run_with_openblas()
    sys.exit(main(sys.argv[1:]))
