"""Which thread may call what: written down where it is defined, and checked in debug mode.

    @owned_by(ENGINE)
    class PageStore: ...           all its public methods

    class DiskTier:
        @owned_by(ENGINE)
        def write(self): ...       this one
        @owned_by(ENGINE, DISK)
        def has(self): ...         either; the class sees to it that both can

In debug mode (`python -X dev`, or START_LLM_CHECK_THREADS is set, as in the tests) such a method raises
`WrongThread` on a thread of another role. Threads without a role may call everything and are not checked: the
main thread, which starts and ends the others, and those that load models, listen and watch.
"""

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

ENGINE = "engine"
"""Owns MLX's arrays, and everything that decides about them."""
DISK = "disk"
"""Reads and writes files behind."""
REQUEST = "request"
"""Answers an HTTP request."""
IS_CHECKED = sys.flags.dev_mode or bool(os.environ.get("START_LLM_CHECK_THREADS"))

_own = threading.local()


class WrongThread(RuntimeError):
    """A method was called on a thread that must not call it: a mistake in this code."""


def take_role(role: str) -> None:
    """Give the current thread a role, for as long as it lives."""
    _own.role = role


def owned_by[Owned: Callable[..., Any]](*roles: str) -> Callable[[Owned], Owned]:
    """Mark a method, or all public methods of a class, as those of threads with these roles."""

    def mark(owned: Owned) -> Owned:
        if isinstance(owned, type):
            for name, member in list(vars(owned).items()):
                if not name.startswith("_") and (marked := _marked_member(member, roles)):
                    setattr(owned, name, marked)
            return cast("Owned", owned)
        return cast("Owned", _marked(owned, roles))

    return mark


def owners(method: Any) -> tuple[str, ...]:
    """Return the roles of a method or property; empty if it states none."""
    return getattr(method.fget if isinstance(method, property) else method, "__owners__", ())


def _marked_member(member: Any, roles: tuple[str, ...]) -> Any:
    """Return a member of a class with its mark; None for what has its own, and for what is called on none."""
    if owners(member):
        return None
    if isinstance(member, property) and member.fget:
        return member.getter(_marked(member.fget, roles))
    return _marked(member, roles) if callable(member) and not isinstance(member, type) else None


def _marked(method: Callable[..., Any], roles: tuple[str, ...]) -> Callable[..., Any]:
    method = _checked(method, roles) if IS_CHECKED else method
    vars(method)["__owners__"] = roles
    return method


def _checked(method: Callable[..., Any], roles: tuple[str, ...]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(*args: Any, **options: Any) -> Any:
        role = getattr(_own, "role", None)
        if role is not None and role not in roles:
            raise WrongThread(f"{method.__qualname__} belongs to {' and '.join(roles)}, not to {role}")
        return method(*args, **options)

    return checked
