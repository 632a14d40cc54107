"""Paths of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO_MODEL = ROOT / "models" / "demo"


def from_root(path: str) -> Path:
    """Return a path that the settings name, as seen from the repository."""
    return ROOT / Path(path).expanduser()
