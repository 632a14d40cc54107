"""Paths of this installation: a checkout of the repository, or a package that pip, pipx or uv installed."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from start_llm.config.setting_types import OFF
from start_llm.core.named_paths import expanded

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent
"""The folder that contains the package: the repository, or `site-packages`."""
IS_CHECKOUT = not any(ROOT.glob("start_llm-*.dist-info"))


class UserFolders(NamedTuple):
    """Where a package keeps what belongs to its user.

    Attributes:
        settings: has the file `.env`.
        data: relative paths in settings are seen from here.
    """

    settings: Path
    data: Path


def user_folders(system: str, environment: Mapping[str, str], home: Path) -> UserFolders:
    """Return the folders of a package: Apple's on macOS, elsewhere those of the XDG specification."""
    if system == "darwin":
        support = home / "Library" / "Application Support" / "start_llm"
        return UserFolders(support, support)
    settings = _absolute(environment.get("XDG_CONFIG_HOME")) or home / ".config"
    data = _absolute(environment.get("XDG_STATE_HOME")) or home / ".local" / "state"
    return UserFolders(settings / "start_llm", data / "start_llm")


def _absolute(path: str | None) -> Path | None:
    """XDG's variables count only with absolute paths."""
    return Path(path) if path and Path(path).is_absolute() else None


_FOLDERS = UserFolders(ROOT, ROOT) if IS_CHECKOUT else user_folders(sys.platform, os.environ, Path.home())
ENV_FILE = _FOLDERS.settings / ".env"
DEMO_MODEL = ROOT / "models" / "demo" if IS_CHECKOUT else PACKAGE / "bundled_models" / "demo"


def from_root(path: str) -> Path:
    """Return a path that the settings name, as seen from the repository or from the user's folder."""
    return _FOLDERS.data / expanded(path)


def disk_tier_folder(chosen: str | None, state_root: str) -> Path | None:
    """Return the folder of the disk tier; None if it is off.

    Args:
        chosen: SSD_CACHE_DIR.
    """
    if chosen == OFF:
        return None
    return from_root(chosen) if chosen else from_root(state_root) / "prompt-cache"


def own_name(name: str, rank: int) -> str:
    """Return the name of what each of several ranks has for itself; they may be on one machine."""
    return f"{name}.rank{rank}" if rank else name


def servers_folder(state_root: str) -> Path:
    """Return the folder of the files that name running servers."""
    return from_root(state_root) / "servers"


def kernels_folder(state_root: str) -> Path:
    """Return the folder of the kernels that were compiled for this machine's device."""
    return from_root(state_root) / "kernels"


def program() -> str:
    """Return how this installation is called from a shell in any folder."""
    if IS_CHECKOUT:
        return str(ROOT / "scripts" / "start_llm")
    own, on_path = Path(sys.prefix) / "bin" / "start_llm", shutil.which("start_llm")
    is_own = on_path is not None and own.exists() and Path(on_path).samefile(own)
    return "start_llm" if is_own else str(own)
