"""Paths of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
DEMO_MODEL = ROOT / "models" / "demo"
