"""Methods that belong to one thread say so, and in debug mode refuse another one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import start_llm
from start_llm.cache.disk.disk_folder import DiskFolder
from start_llm.cache.disk.disk_tier import DiskTier
from start_llm.cache.disk.disk_worker import DiskWorker
from start_llm.core.thread_owners import DISK, ENGINE, REQUEST, WrongThread, owned_by, owners, take_role

PACKAGE = Path(start_llm.__file__).parent
OF_ANY = {DiskTier: {"start", "close", "is_on"}, DiskFolder: {"limit"}, DiskWorker: {"begin", "end"}}
"""What the main thread calls while the others do not run, and what reads a single value."""


class Desk:
    @owned_by(ENGINE)
    def write(self) -> str:
        return "written"

    @property
    @owned_by(ENGINE, DISK)
    def is_full(self) -> bool:
        return True

    def look(self) -> None: ...


@owned_by(ENGINE)
class Store:
    def keep(self) -> str:
        return self._kept()

    @property
    def size(self) -> int:
        return 1

    def _kept(self) -> str:
        return "kept"


def on_thread_of(role: str | None, call: Callable[[], Any]) -> Any:
    outcome: list[Any] = []

    def run() -> None:
        if role:
            take_role(role)
        try:
            outcome.append(call())
        except WrongThread as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return outcome[0]


def test_a_method_refuses_a_thread_of_another_role_and_names_both():
    assert on_thread_of(ENGINE, Desk().write) == "written"
    assert on_thread_of(DISK, Desk().write) == "Desk.write belongs to engine, not to disk"


def test_a_property_may_belong_to_two_threads():
    assert on_thread_of(DISK, lambda: Desk().is_full) is True
    assert "not to request" in on_thread_of(REQUEST, lambda: Desk().is_full)


def test_all_public_methods_of_a_marked_class_belong_to_its_thread():
    assert on_thread_of(REQUEST, Store().keep) == "Store.keep belongs to engine, not to request"
    assert on_thread_of(REQUEST, lambda: Store().size) == "Store.size belongs to engine, not to request"
    assert on_thread_of(ENGINE, Store().keep) == "kept"


def test_a_thread_without_a_role_may_call_everything():
    assert on_thread_of(None, Desk().write) == "written"


def test_outside_of_debug_mode_nothing_is_wrapped():
    code = """
from start_llm.core.thread_owners import *
def plain(): ...
assert owned_by(ENGINE)(plain) is plain and owners(plain) == (ENGINE,)
"""
    subprocess.run([sys.executable, "-c", code], env={}, cwd=PACKAGE.parent, check=True)


@pytest.mark.parametrize("shared", OF_ANY)
def test_every_method_of_a_class_that_two_threads_use_says_whose_it_is(shared: type):
    silent = {
        name for name, member in public_members(shared) if not owners(member) and name not in OF_ANY[shared]
    }
    assert silent == set()


def test_what_says_that_the_engine_thread_owns_it_is_checked():
    """A class that a module or its own docstring gives to the engine thread is marked as a whole."""
    unmarked = [
        f"{module.__name__}.{name}"
        for module in modules()
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and is_given_to_the_engine(module, kind)
        if not all(owners(member) for _, member in public_members(kind))
    ]
    assert unmarked == []


def modules() -> list[ModuleType]:
    paths = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    texts = {path: (PACKAGE.parent / path).with_suffix(".py").read_text(encoding="utf-8") for path in paths}
    return [
        import_module(".".join(path.parts))
        for path, text in texts.items()
        if "Owned by the engine thread" in text and path.name != "__init__"
    ]


def is_given_to_the_engine(module: ModuleType, kind: type) -> bool:
    """Plain records, exceptions and protocols of such a module are only values."""
    is_owned = "Owned by the engine thread" in f"{module.__doc__} {kind.__doc__}"
    is_record = hasattr(kind, "__dataclass_fields__") or issubclass(kind, tuple)
    return is_owned and not is_record and not getattr(kind, "_is_protocol", False)


def public_members(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, member)
        for name, member in vars(kind).items()
        if re.match(r"[a-z]", name) and (callable(member) or isinstance(member, property))
    ]
