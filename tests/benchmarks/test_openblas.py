"""Benchmarks compute with the BLAS that the server computes with, however they are started."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(
    path.name for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()
)
COMPUTES_NOTHING = {"install.py"}
"""It starts the installer as a newcomer does, whose variables name no library."""


def first_call(name: str) -> str:
    """What a benchmark does first as a program."""
    block = ast.parse((BENCHMARKS / name).read_text()).body[-1]
    assert isinstance(block, ast.If)
    return ast.unparse(block.body[0])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_starts_itself_again_with_openblas_before_it_does_anything(name: str) -> None:
    assert (first_call(name) == "run_with_openblas()") != (name in COMPUTES_NOTHING)
