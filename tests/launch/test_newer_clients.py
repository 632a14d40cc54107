"""Qwen Code, Cline and Continue are never less strict than their user's own settings."""

from __future__ import annotations

import json

import pytest

from start_llm.launch.files import parse_yaml, write_all
from tests.launch.user import FOLDER, User


@pytest.fixture
def user(tmp_path) -> User:
    return User(tmp_path)


@pytest.mark.parametrize(
    ("theirs", "mode"),
    [
        ("plan", "plan"),
        ("default", "default"),
        ("auto-edit", "default"),
        ("auto", "default"),
        ("yolo", "default"),
    ],
)
def test_the_stricter_mode_of_qwen_wins(theirs, mode, user):
    user.has(".qwen/settings.json", json.dumps({"tools": {"approvalMode": theirs}}))
    assert user.file("qwen", "settings.json")["tools"]["approvalMode"] == mode


def test_what_qwen_is_forbidden_stays_forbidden_and_what_it_is_allowed_is_a_question(user):
    theirs = {
        "tools": {
            "allowed": ["run_shell_command"],
            "core": ["read_file"],
            "exclude": ["web_fetch"],
            "executionSandbox": {"filesystem": "read-only", "network": "closed"},
            "sandbox": False,
        },
        "permissions": {"allow": ["Bash"], "ask": ["Read"], "deny": ["Bash(rm *)"]},
        "security": {"folderTrust": {"enabled": False}},
        "hooks": {"PreToolUse": []},
    }
    user.has(".qwen/settings.json", json.dumps(theirs))
    setup = user.setup("qwen")
    settings = setup.files[FOLDER / "settings.json"]
    assert settings["tools"] == {
        "approvalMode": "default",
        "core": ["read_file"],
        "exclude": ["web_fetch"],
        "executionSandbox": {"filesystem": "read-only", "network": "closed"},
    }
    assert settings["permissions"] == {"ask": ["Read"], "deny": ["Bash(rm *)"]}
    assert settings["security"]["folderTrust"] == {"enabled": True}
    assert setup.notes == [f"The hooks in {user.home}/.qwen/settings.json do not run here."]


def test_tools_that_cline_may_not_have_stay_away_wherever_its_settings_are(user, tmp_path):
    theirs = {"toolAutoApprove": True, "disabledTools": ["run_commands"], "planActMode": "plan"}
    kept = {"toolAutoApprove": False, "disabledTools": ["run_commands"], "planActMode": "plan"}
    for place, variables in (
        (user.home / ".cline/data", {}),
        (tmp_path / "mine/data", {"CLINE_DIR": str(tmp_path / "mine")}),
        (tmp_path / "data", {"CLINE_DATA_DIR": str(tmp_path / "data")}),
    ):
        (place / "settings").mkdir(parents=True)
        (place / "settings/global-settings.json").write_text(json.dumps(theirs))
        settings = user.file("cline", "data/settings/global-settings.json", **variables)
        assert kept.items() <= settings.items()


def test_tools_that_continue_may_not_have_stay_away(user):
    user.has(".continue/permissions.yaml", "allow: [Bash]\nask:\n  - Read\nexclude:\n  - Write\n")
    assert user.file("continue", "permissions.yaml") == {
        "ask": ["Bash", "Edit", "MultiEdit", "Write", "Fetch", "Read"],
        "exclude": ["Write"],
    }


def test_what_is_allowed_inside_of_a_launched_continue_stays(user, tmp_path):
    """It writes the file anew, as YAML with a comment."""
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "permissions.yaml").write_text("# managed\nallow:\n  - Bash(ls*)\nask:\n  - Bash\n")
    for _ in range(2):
        write_all(folder, user.setup_in(folder, "continue").files)
        assert parse_yaml((folder / "permissions.yaml").read_text()) == {
            "allow": ["Bash(ls*)"],
            "ask": ["Bash", "Edit", "MultiEdit", "Write", "Fetch"],
        }
