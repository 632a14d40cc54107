"""Launched clients ask before they act, and are never less strict than their user's own settings."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from start_llm.core.errors import LaunchError
from start_llm.launch.clients import CLIENTS
from start_llm.launch.files import deep_merge, write_all
from start_llm.launch.own_settings import lenient_json
from start_llm.launch.setup import Setup, as_script
from tests.launch.user import FOLDER, User


@pytest.fixture
def user(tmp_path) -> User:
    return User(tmp_path)


# ------------------------------------------------------------------------------------ a user without settings


def test_claude_starts_in_its_manual_mode_and_offers_no_other(user):
    assert user.file("claude", "settings.json") == {
        "permissions": {"defaultMode": "default", "disableAutoMode": "disable"}
    }


def test_codex_starts_in_its_read_only_sandbox(user):
    config = user.file("codex", "config.toml")
    assert config["approval_policy"] == "on-request"
    assert config["sandbox_mode"] == "read-only"
    assert config["approvals_reviewer"] == "user"


def test_pi_gets_an_extension_that_asks(user):
    assert user.file("pi", "settings.json")["defaultProjectTrust"] == "ask"
    assert 'pi.on("tool_call"' in user.file("pi", "extensions/ask-first.js")


def test_openclaw_refuses_commands_and_says_so(user):
    assert user.file("openclaw", "openclaw.json")["tools"] == {
        "elevated": {"enabled": False},
        "exec": {"mode": "ask"},
        "fs": {"workspaceOnly": True},
    }
    (note,) = user.setup("openclaw").notes
    assert "refuses commands" in note


def test_qwen_starts_in_the_mode_that_asks_and_trusts_no_folder_unasked(user):
    settings = user.file("qwen", "settings.json")
    assert settings["tools"] == {"approvalMode": "default"}
    assert settings["security"]["folderTrust"] == {"enabled": True}
    assert "permissions" not in settings


def test_cline_approves_nothing_by_itself(user):
    assert user.file("cline", "data/settings/global-settings.json")["toolAutoApprove"] is False


def test_continue_asks_where_its_own_rules_would_not(user):
    assert user.file("continue", "permissions.yaml") == {
        "ask": ["Bash", "Edit", "MultiEdit", "Write", "Fetch"]
    }


@pytest.mark.parametrize("client", sorted({*CLIENTS} - {"openclaw"}))
def test_without_own_settings_there_is_nothing_to_say(client, user):
    assert not user.setup(client).notes


# ----------------------------------------------------------------------------------------------- Claude Code

CLAUDE: dict[str, Any] = {
    "$schema": "https://json.schemastore.org/claude-code-settings.json",
    "model": "opus",
    "permissions": {
        "allow": ["Bash(npm run *)", "Bash(rm *)"],
        "ask": ["Bash(git push *)"],
        "deny": ["Read(./.env)", "Bash(curl *)", "Edit(/agents/**)"],
        "defaultMode": "acceptEdits",
        "additionalDirectories": ["../docs"],
    },
}


def test_what_claude_is_forbidden_stays_forbidden_and_what_it_is_allowed_is_a_question(user):
    user.has(".claude/settings.json", json.dumps(CLAUDE))
    assert user.file("claude", "settings.json")["permissions"] == {
        "defaultMode": "default",
        "disableAutoMode": "disable",
        "ask": ["Bash(git push *)"],
        "deny": [
            *CLAUDE["permissions"]["deny"],
            f"Edit(/{user.home}/.claude/agents/**)",  # from the folder of the settings on
        ],
    }


@pytest.mark.parametrize(
    ("theirs", "mode"),
    [
        ("plan", "plan"),
        ("dontAsk", "dontAsk"),
        ("default", "default"),
        ("manual", "default"),
        ("acceptEdits", "default"),
        ("auto", "default"),
        ("bypassPermissions", "default"),
        (7, "default"),
    ],
)
def test_the_stricter_mode_of_claude_wins(theirs, mode, user):
    user.has(".claude/settings.json", json.dumps({"permissions": {"defaultMode": theirs}}))
    assert user.file("claude", "settings.json")["permissions"]["defaultMode"] == mode


def test_restrictions_of_claude_stay_and_its_sandbox_does_not_answer_for_the_user(user):
    restrictions = {"disableBypassPermissionsMode": "disable", "blockWritesOutsideWorkingDirectories": True}
    sandbox = {
        "enabled": True,
        "autoAllowBashIfSandboxed": True,
        "excludedCommands": ["docker"],
        "allowUnsandboxedCommands": False,
        "network": {"allowedDomains": ["docs.example.org"], "deniedDomains": ["example.org"]},
        "filesystem": {"denyRead": ["~/.ssh"], "denyWrite": ["/etc"], "allowWrite": ["/tmp"]},
    }
    user.has(".claude/settings.json", json.dumps({"permissions": restrictions, "sandbox": sandbox}))
    settings = user.file("claude", "settings.json")
    assert restrictions.items() <= settings["permissions"].items()
    assert settings["sandbox"] == {
        "enabled": True,
        "autoAllowBashIfSandboxed": False,
        "allowUnsandboxedCommands": False,
        "network": {"deniedDomains": ["example.org"]},
        "filesystem": {"denyRead": ["~/.ssh"], "denyWrite": ["/etc"]},
    }


def test_claudes_settings_are_where_the_user_says_and_hooks_are_reported(user, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    theirs = {"permissions": {"deny": ["WebFetch"]}, "hooks": {"PreToolUse": [{"matcher": "Bash"}]}}
    (elsewhere / "settings.json").write_text(json.dumps(theirs))
    setup = user.setup("claude", CLAUDE_CONFIG_DIR=str(elsewhere))
    assert setup.files[FOLDER / "settings.json"]["permissions"]["deny"] == ["WebFetch"]
    assert setup.notes == [f"The hooks in {elsewhere}/settings.json do not run here."]
    assert f"# {setup.notes[0]}\n" in as_script("claude", setup)


def test_rules_that_were_given_inside_of_the_launched_client_stay(user, tmp_path):
    user.has(".claude/settings.json", json.dumps(CLAUDE))
    folder = tmp_path / "private"
    folder.mkdir()
    given = {"permissions": {"deny": ["Bash(ssh *)", "Read(./.env)"], "defaultMode": "auto"}, "theme": "dark"}
    (folder / "settings.json").write_text(json.dumps(given))
    setup = user.setup_in(folder, "claude")
    for _ in range(2):
        write_all(folder, setup.files)
        written = json.loads((folder / "settings.json").read_text())
        assert written["theme"] == "dark"
        assert written["permissions"]["defaultMode"] == "default"
        assert written["permissions"]["deny"] == [
            "Bash(ssh *)",
            *CLAUDE["permissions"]["deny"],
            f"Edit(/{user.home}/.claude/agents/**)",
        ]


# ------------------------------------------------------------------------------------------------------ Codex


@pytest.mark.parametrize(
    ("theirs", "policy"),
    [
        ('approval_policy = "on-request"\nsandbox_mode = "workspace-write"', "on-request"),
        ('approval_policy = "never"\nsandbox_mode = "danger-full-access"', "on-request"),
        ('approval_policy = "never"\nsandbox_mode = "read-only"', "never"),
        ('approval_policy = "never"\nsandbox_mode = "workspace-write"', "never"),
        ('approval_policy = "untrusted"', "untrusted"),
        ('approval_policy = "on-failure"', "on-request"),
        ("approval_policy = {granular = {rules = true}}", {"granular": {"rules": True}}),
        ('profile = "quick"\n[profiles.quick]\napproval_policy = "untrusted"', "untrusted"),
    ],
)
def test_the_stricter_policy_of_codex_wins_in_the_read_only_sandbox(theirs, policy, user):
    user.has(".codex/config.toml", f'model = "gpt-5"\napprovals_reviewer = "auto_review"\n{theirs}\n')
    config = user.file("codex", "config.toml")
    assert config["approval_policy"] == policy
    assert config["sandbox_mode"] == "read-only"
    assert config["approvals_reviewer"] == "user"
    assert config["model"] == "m"


def test_a_codex_that_never_asks_says_so(user):
    user.has(".codex/config.toml", 'approval_policy = "never"\nsandbox_mode = "read-only"\n')
    (note,) = user.setup("codex").notes
    assert "With --ask-for-approval on-request it asks." in note


def test_rules_of_codex_that_forbid_or_ask_are_taken_over(user):
    user.has(
        ".codex/rules/default.rules",
        """# what I have said
prefix_rule(pattern=["git", "status"], decision="allow")
prefix_rule(
    pattern=["git", ["push", "fetch"]],
    decision="prompt",
    justification="It leaves the machine.",
)
prefix_rule(pattern=["rm"], decision="forbidden")
prefix_rule(pattern=["ls"])
""",
    )
    assert user.file("codex", "rules/own.rules") == (
        "prefix_rule(pattern=['git', ['push', 'fetch']], decision='prompt', "
        "justification='It leaves the machine.')\n"
        "prefix_rule(pattern=['rm'], decision='forbidden')\n"
    )


# --------------------------------------------------------------------------------------------------------- pi


def test_tools_that_pi_may_not_have_stay_away_and_own_extensions_are_reported(user):
    theirs = {"defaultTools": ["read", "grep"], "defaultProjectTrust": "never", "packages": ["npm:pi-gate"]}
    user.has(".pi/agent/settings.json", json.dumps(theirs))
    setup = user.setup("pi")
    settings = setup.files[FOLDER / "settings.json"]
    assert isinstance(settings, Mapping)
    assert settings["defaultTools"] == ["read", "grep"]
    assert settings["defaultProjectTrust"] == "never"
    assert setup.notes == [
        f"The extensions in {user.home}/.pi/agent do not run here, also not those that forbid something."
    ]


def test_a_project_that_pi_would_always_trust_is_a_question(user):
    user.has(".pi/agent/settings.json", '{"defaultProjectTrust": "always"}')
    assert user.file("pi", "settings.json")["defaultProjectTrust"] == "ask"


# --------------------------------------------------------------------------------------------------- OpenClaw

OPENCLAW = """// My own.
{
  agents: { defaults: { model: 'openai/gpt-5', } },
  tools: {
    deny: ["browser", 'web_fetch'],
    fs: { workspaceOnly: true },
    exec: { mode: "%s", strictInlineEval: true, },
  },
}
"""


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("deny", {"mode": "deny"}),
        ("allowlist", {"mode": "allowlist"}),
        ("ask", {"mode": "ask"}),
        ("auto", {"mode": "ask"}),
        ("full", {"mode": "ask"}),
    ],
)
def test_what_openclaw_is_forbidden_stays_forbidden(mode, kept, user):
    user.has(".openclaw/openclaw.json", OPENCLAW % mode)
    assert user.file("openclaw", "openclaw.json")["tools"] == {
        "elevated": {"enabled": False},
        "exec": kept | {"strictInlineEval": True},
        "deny": ["browser", "web_fetch"],
        "fs": {"workspaceOnly": True},
    }


@pytest.mark.parametrize(
    ("theirs", "kept"),
    [
        ({"security": "full", "ask": "always"}, {"security": "allowlist", "ask": "always"}),
        ({"security": "deny"}, {"mode": "deny"}),
        ({"security": "full", "ask": "off"}, {"mode": "ask"}),
    ],
)
def test_older_policies_of_openclaw_are_understood(theirs, kept, user, tmp_path):
    config = tmp_path / "mine.json5"
    config.write_text(json.dumps({"tools": {"exec": theirs}}))
    tools = user.file("openclaw", "openclaw.json", OPENCLAW_CONFIG_PATH=str(config))["tools"]
    assert tools["exec"] == kept


# --------------------------------------------------------------------------------------------------- opencode


def decision(setup: Setup, agent: str, tool: str, what: str, theirs: Mapping[str, Any] | None = None) -> str:
    """What opencode decides: the last rule that matches, of the agent's own with ours merged into them.

    Args:
        theirs: the agent's own rules.
    """
    ours = json.loads(setup.environment["OPENCODE_CONFIG_CONTENT"])["agent"][agent]["permission"]
    merged = {**(theirs or {})}
    for name, patterns in ours.items():
        merged[name] = deep_merge(merged.get(name), patterns)
    decided = "none"
    for name, patterns in merged.items():
        for pattern, action in (patterns if isinstance(patterns, Mapping) else {"*": patterns}).items():
            if fnmatch.fnmatchcase(tool, name) and fnmatch.fnmatchcase(what, pattern):
                decided = action
    return decided


def test_agents_of_opencode_read_and_ask_before_they_act(user):
    setup = user.setup("opencode")
    for agent in ("build", "general"):
        for tool in ("bash", "edit", "webfetch", "websearch", "github_merge", "external_directory"):
            assert decision(setup, agent, tool, "x") == "ask", tool
        for tool in ("glob", "grep", "list", "skill", "task"):
            assert decision(setup, agent, tool, "x") == "allow", tool
        assert decision(setup, agent, "read", "src/main.py") == "allow"
        assert decision(setup, agent, "read", ".env") == "ask"
    assert decision(setup, "plan", "edit", "src/main.py") == "deny"
    assert decision(setup, "plan", "bash", "rm -rf x") == "ask"
    assert decision(setup, "explore", "bash", "rm -rf x") == "ask"
    assert decision(setup, "explore", "edit", "x") == "none", "opencode's own rule denies it"


OPENCODE = """{
  "$schema": "https://opencode.ai/config.json",
  // broad rules first
  "permission": {
    "bash": {"*": "ask", "git *": "allow", "git push *": "deny", "npm *": "allow"},
    "edit": "allow",
    "webfetch": "deny",
    "github_*": "deny",
  },
}
"""


def test_the_stricter_rule_of_opencode_wins_for_each_command(user):
    user.has(".config/opencode/opencode.jsonc", OPENCODE)
    setup = user.setup("opencode")
    for agent in ("build", "general", "plan"):
        assert decision(setup, agent, "bash", "git status") == "ask"
        assert decision(setup, agent, "bash", "git push --force") == "deny"
        assert decision(setup, agent, "edit", "x") == "ask"
        assert decision(setup, agent, "webfetch", "https://example.org") == "deny"
        assert decision(setup, agent, "github_merge", "x") == "deny"
        assert decision(setup, agent, "read", "x") == "allow"


@pytest.mark.parametrize(
    ("permission", "bash", "reads"),
    [
        ("allow", "ask", "allow"),
        ("ask", "ask", "ask"),
        ("deny", "deny", "deny"),
        ({"*": "deny", "read": "allow", "bash": "allow"}, "ask", "allow"),
        ({"bash": "allow", "*": "deny"}, "deny", "deny"),
        ({"bash": "deny", "*": "allow"}, "ask", "allow"),
    ],
)
def test_a_rule_for_everything_makes_those_before_it_void(permission, bash, reads, user):
    user.has(".config/opencode/opencode.json", json.dumps({"permission": permission}))
    setup = user.setup("opencode")
    assert decision(setup, "build", "bash", "ls") == bash
    assert decision(setup, "build", "read", "x") == reads


def test_projects_variables_and_agents_of_opencode_are_read_too(user):
    (user.work.parent / "opencode.json").write_text('{"permission": {"bash": {"make *": "deny"}}}')
    dots = user.work / ".opencode" / "agent"
    dots.mkdir(parents=True)
    (dots / "reviewer.md").write_text(
        "---\nmode: primary\npermission:\n  bash:\n    'rm *': deny\n---\nReview.\n"
    )
    user.has(".config/opencode/opencode.json", '{"agent": {"build": {"permission": {"edit": "deny"}}}}')
    setup = user.setup("opencode", OPENCODE_PERMISSION='{"webfetch": "deny"}')
    assert decision(setup, "build", "edit", "x", {"edit": "deny"}) == "deny"
    assert decision(setup, "general", "edit", "x") == "ask"
    for agent, theirs in (("build", {"edit": "deny"}), ("reviewer", {"bash": {"rm *": "deny"}})):
        assert decision(setup, agent, "bash", "make all", theirs) == "deny"
        assert decision(setup, agent, "webfetch", "x", theirs) == "deny"
        assert decision(setup, agent, "bash", "ls", theirs) == "ask"
    assert decision(setup, "reviewer", "bash", "rm x", {"bash": {"rm *": "deny"}}) == "deny"


def test_tools_that_are_off_in_an_older_form_stay_off(user):
    user.has(".config/opencode/opencode.json", '{"tools": {"bash": false, "write": false, "grep": true}}')
    setup = user.setup("opencode")
    assert decision(setup, "build", "bash", "ls") == "deny"
    assert decision(setup, "build", "edit", "x") == "deny"
    assert decision(setup, "build", "grep", "x") == "allow"


# --------------------------------------------------------------------------------------------- what is read

BROKEN = {
    "claude": ".claude/settings.json",
    "codex": ".codex/config.toml",
    "pi": ".pi/agent/settings.json",
    "openclaw": ".openclaw/openclaw.json",
    "opencode": ".config/opencode/opencode.json",
    "qwen": ".qwen/settings.json",
    "cline": ".cline/data/settings/global-settings.json",
    "continue": ".continue/permissions.yaml",
}


@pytest.mark.parametrize("client", BROKEN)
def test_settings_that_cannot_be_read_are_reported_and_nothing_starts(client, user):
    user.has(BROKEN[client], '{"permissions": {"deny": ')
    with pytest.raises(LaunchError, match=r"cannot be read .* so the permissions that you set there"):
        user.setup(client)


@pytest.mark.parametrize("client", BROKEN)
def test_own_settings_are_never_written(client, user, tmp_path):
    text = tomllib.loads("") if client == "codex" else {"permissions": {"deny": ["Bash"]}, "permission": {}}
    user.has(BROKEN[client], "" if client == "codex" else json.dumps(text))
    before = {path: path.read_bytes() for path in user.home.rglob("*") if path.is_file()}
    folder = tmp_path / "private"
    write_all(folder, user.setup_in(folder, client).files)
    assert {path: path.read_bytes() for path in user.home.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("", None),
        ('{"a": "// no comment", "b": "it\'s, }"} // one', {"a": "// no comment", "b": "it's, }"}),
        ("{/* two\nlines */ a: 1, 'b': [2, 3,],}", {"a": 1, "b": [2, 3]}),
        ("{a: 'say \"so\"', b: 'don\\'t'}", {"a": 'say "so"', "b": "don't"}),
        ('{"url": "http://x/", "end": ",}"}', {"url": "http://x/", "end": ",}"}),
    ],
)
def test_json_as_people_write_it_is_understood(text, content):
    assert lenient_json(text) == content


@pytest.mark.parametrize("text", ["{", "{a 1}", "nothing", "{'a': }"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        lenient_json(text)
