"""How an installed package is upgraded: by the tool that installed it, from where it came."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def upgrade_lines(prefix: Path, python: str) -> list[str]:
    """Return commands that upgrade this package, or a sentence if there are none.

    Args:
        prefix: the folder of the environment.
        python: its interpreter.
    """
    return lines_for(_origin(), prefix, python)


def _origin() -> Mapping[str, Any]:
    """Return where the package came from, as pip and uv record it; empty for an index."""
    return json.loads(distribution("start_llm").read_text("direct_url.json") or "{}")


def lines_for(origin: Mapping[str, Any], prefix: Path, python: str) -> list[str]:
    """Return the commands for a package that came from `origin` (direct_url.json)."""
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        folder = Path(unquote(urlsplit(url).path))
        pull = [f"git -C {shlex.quote(str(folder))} pull --ff-only"] if (folder / ".git").exists() else []
        constraints = folder / "constraints.txt"
        held = str(constraints) if constraints.exists() else None
        return [*pull, _install(str(folder), held, prefix, python)]
    if vcs := origin.get("vcs_info"):
        return [_install(f"{vcs['vcs']}+{url}", None, prefix, python)]
    return [f"It came from {url or 'a package index'}: install a newer one from there, as you did before."]


def _install(source: str, constraints: str | None, prefix: Path, python: str) -> str:
    if (prefix / "uv-receipt.toml").exists():
        held = ["--constraints", constraints] if constraints else []
        return shlex.join(["uv", "tool", "install", "--force", "--python", "3.12", source, *held])
    if (prefix / "pipx_metadata.json").exists():
        held = ["--pip-args", f"--constraint {shlex.quote(constraints)}"] if constraints else []
        return shlex.join(["pipx", "install", "--force", "--python", "python3.12", source, *held])
    held = ["--constraint", constraints] if constraints else []
    return shlex.join([python, "-m", "pip", "install", "--upgrade", source, *held])
