"""Read YAML, which the standard library cannot."""

from __future__ import annotations

from typing import Any


def parse_yaml(text: str) -> Any:
    """Return what a text says; None if it is empty.

    Raises:
        ValueError: it is no YAML.
    """
    import yaml  # noqa: PLC0415 - takes time that only users with such files need to spend

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {error}".partition("\n")[0]) from None
