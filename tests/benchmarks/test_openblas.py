"""Benchmarks compute with the BLAS that the server computes with, however they are started."""

from __future__ import annotations

import ast
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
START = """\
if 'install' not in sys.argv[1:2]:
    run_with_openblas()"""
"""`install` starts the installer as a newcomer does, whose variables name no library."""


def block(path: Path) -> ast.If | None:
    """What a file does as a program."""
    last = ast.parse(path.read_text()).body[-1]
    return last if isinstance(last, ast.If) and ast.unparse(last.test) == "__name__ == '__main__'" else None


def test_benchmarks_have_one_start():
    assert [path.name for path in BENCHMARKS.glob("*.py") if block(path)] == ["__main__.py"]


def test_a_benchmark_starts_itself_again_with_openblas_before_it_does_anything():
    program = block(BENCHMARKS / "__main__.py")
    assert program
    assert ast.unparse(program.body[0]) == START
