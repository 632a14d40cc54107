"""How a variable is declared: a field of a group, with its name, type, default and meaning."""

from dataclasses import field
from typing import Any, NamedTuple

from start_llm.config.setting_types import SettingKind


class SettingSpec(NamedTuple):
    """The description of one variable, for documents and error messages.

    Attributes:
        default: the default as it would be written in `.env`; empty if there is none.
        help: what it does; of a variable without effect, why it has nothing to do.
        section: the heading under which documents list it: that of its group.
        group, field: where in `Settings` its value is; empty if it has no effect.
    """

    name: str
    kind: SettingKind
    default: str
    help: str
    section: str = ""
    group: str = ""
    field: str = ""


def variable(
    name: str,
    kind: SettingKind,
    default: Any,
    help: str,  # noqa: A002 - as argparse calls it
    shown: str | None = None,
) -> Any:
    """Return a field of a group that the variable with this name sets.

    Args:
        default: None means unset; the help says what then happens.
        shown: the default as it would be written in `.env`, where that differs from its text.
    """
    text = _written(default) if shown is None else shown
    return field(default=default, metadata={"row": SettingSpec(name, kind, text, help)})


def _written(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default in (None, ()) else str(default)
