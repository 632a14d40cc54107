"""Where a package keeps what belongs to its user."""

from __future__ import annotations

from pathlib import Path

from start_llm.config.paths import IS_CHECKOUT, ROOT, from_root, program, user_folders

HOME = Path("/home/ada")


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
