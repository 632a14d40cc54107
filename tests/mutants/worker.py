"""Runs pytest again and again, each time in a fork of this process, which has imported what takes long.

A line of standard input is a JSON list: the folder to run in, the file for the output, and the arguments of
pytest. For each line the exit status is written.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from pathlib import Path

import hypothesis
import pytest

SLOW = ["pytest_timeout"]
if sys.platform != "darwin":  # Metal does not survive a fork.
    SLOW.append("mlx_lm.models.cache")


def main() -> None:
    for name in SLOW:
        importlib.import_module(name)
    look_no_further()
    gc.collect()
    gc.freeze()  # or every fork copies and searches all that is imported here
    for line in sys.stdin:
        folder, output, *arguments = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_run(Path(folder), Path(output), arguments))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def look_no_further() -> None:
    """An example that turns a test red will do; a smaller one would take longer than all the rest."""
    phases = [
        phase
        for phase in hypothesis.Phase
        if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)
    ]
    hypothesis.settings.register_profile("mutants", deadline=None, phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")


def _run(folder: Path, output: Path, arguments: list[str]) -> int:
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    with output.open("w") as printed, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    status = int(pytest.main(arguments))
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    main()
