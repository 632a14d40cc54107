"""Replies and what they mean: a table for each format, in a module of this package with `CASES`."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from tests.output.corpus.case import Case
from tests.output.corpus.common import common_cases


def _tables() -> Iterator[tuple[str, Case]]:
    for module in pkgutil.iter_modules(__path__):
        cases = getattr(importlib.import_module(f"{__name__}.{module.name}"), "CASES", ())
        yield from ((module.name, case) for case in cases)


def _all() -> Mapping[str, Case]:
    cases: dict[str, Case] = {}
    for table, case in [*common_cases(), *_tables()]:
        name = f"{table}: {case.name}"
        assert name not in cases, name
        cases[name] = case
    return cases


CORPUS = _all()
