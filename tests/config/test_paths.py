"""Where a package keeps what belongs to its user."""

from __future__ import annotations

import os
from pathlib import Path

from start_llm.config.paths import (
    IS_CHECKOUT,
    ROOT,
    disk_tier_folder,
    from_root,
    program,
    user_folders,
)
from start_llm.config.settings import SettingSource, load

HOME = Path("/home/ada")


def test_no_test_writes_into_the_users_state():
    settings = load(SettingSource("environment", os.environ))
    assert disk_tier_folder(settings.ssd.folder, settings.server.state_root) is None
    assert not from_root(settings.server.state_root).is_relative_to(ROOT)


def test_the_disk_tier_has_a_folder_unless_it_is_off(tmp_path: Path):
    assert disk_tier_folder(None, str(tmp_path)) == tmp_path / "prompt-cache"
    assert disk_tier_folder("/elsewhere", str(tmp_path)) == Path("/elsewhere")
    assert disk_tier_folder("off", str(tmp_path)) is None


def test_a_home_of_a_user_who_is_not_there_is_a_folder_of_that_name():
    assert from_root("~nobody-of-this-name/x") == ROOT / "~nobody-of-this-name/x"
    assert from_root("~/x") == Path.home() / "x"


def test_a_mac_has_one_folder():
    folder = HOME / "Library" / "Application Support" / "start_llm"
    assert user_folders("darwin", {"XDG_STATE_HOME": "/x"}, HOME) == (folder, folder)


def test_linux_has_the_folders_of_xdg():
    assert user_folders("linux", {}, HOME) == (HOME / ".config/start_llm", HOME / ".local/state/start_llm")
    moved = {"XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": "/s"}
    assert user_folders("linux", moved, HOME) == (Path("/c/start_llm"), Path("/s/start_llm"))


def test_a_relative_folder_of_xdg_does_not_count():
    assert user_folders("linux", {"XDG_STATE_HOME": "s"}, HOME).data == HOME / ".local/state/start_llm"


def test_a_checkout_keeps_everything_in_its_own_folder():
    assert IS_CHECKOUT
    assert from_root("logs") == ROOT / "logs"
    assert from_root("/elsewhere") == Path("/elsewhere")
    assert program() == str(ROOT / "scripts" / "start_llm")
