"""One server for each family, started when a test first needs it, and what was heard from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.http.forms import FORMS, TOOLS, answers, reasoning_texts
from tests.http.reading import Heard, hear
from tests.http.scripts import asking, write_model
from tests.serving import Server, serving

FamilyServer = Callable[[str], Server]
Hearing = Callable[..., Heard]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyServer]:
    """`family("glm")` answers with any of the scripts of that form, token by token: drafts come at once."""
    with ExitStack() as servers:

        @cache
        def serve(name: str) -> Server:
            form = FORMS[name]
            scripts = {**reasoning_texts(form), **answers(form)}
            folder = write_model(tmp_path_factory.mktemp(name), form.trait, scripts=scripts)
            return servers.enter_context(serving(folder, speculation="off"))

        yield serve


@pytest.fixture(scope="session")
def hearing(family: FamilyServer) -> Hearing:
    """`hearing("glm", "pair")` is that script as a client hears it, which happens once.

    Tools are offered, and thinking is on for scripts with reasoning; other fields stand beside them.
    """
    heard: dict[str, Heard] = {}

    def of(name: str, script: str, **fields: Any) -> Heard:
        key = repr((name, script, fields))
        if key not in heard:
            thinking = script in reasoning_texts(FORMS[name])
            defaults = {"tools": TOOLS, "enable_thinking": thinking}
            heard[key] = hear(family(name), **{**asking(script), **defaults, **fields})
        return heard[key]

    return of
