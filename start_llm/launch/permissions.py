"""Give each client a mode in which it asks before it acts, or a stricter one that the user has set.

Every function takes the user's own settings and the client's private folder. What the user allows without a
question is not taken over; what the user forbids, or wants to be asked about, is.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from start_llm.core.chat import Json
from start_llm.core.errors import LaunchError
from start_llm.launch.files import Contents, Joined
from start_llm.launch.own_settings import OwnSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What makes a client ask.

    Attributes:
        files: by their names in the private folder; merged into the client's other files.
        inline: merged into the JSON that variables hold, by the variable's name.
        notes: sentences for the user, about own settings that could not be taken over.
    """

    files: Contents = field(default_factory=dict)
    inline: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    notes: Sequence[str] = ()


type PermissionRule = Callable[[OwnSettings, Path], Permissions]


# --------------------------------------------------------------------------------------------- Claude Code

_CLAUDE_STRICTER_MODES = ("plan", "dontAsk")
_CLAUDE_RESTRICTIONS: Mapping[str, Json] = {
    "disableBypassPermissionsMode": "disable",
    "blockReadsOutsideWorkingDirectories": True,
    "blockWritesOutsideWorkingDirectories": True,
    "denyInsteadOfPrompting": True,
}
_CLAUDE_SANDBOX_LISTS = (
    ("network", "deniedDomains"),
    ("filesystem", "denyRead"),
    ("filesystem", "denyWrite"),
)
_FROM_THE_SETTINGS = re.compile(r"(?P<tool>\w+)\(/(?!/)(?P<path>.*)\)", re.DOTALL)


def claude(own: OwnSettings, _folder: Path) -> Permissions:
    """Return Claude Code's manual mode.

    Its auto mode asks a classifier behind Anthropic's API what may run. No other server has one, so the mode
    is off: otherwise each start offers it, with "Yes" as the answer that is marked.
    """
    place = own.place("CLAUDE_CONFIG_DIR", ".claude")
    theirs = own.read(place / "settings.json")
    rules = table(theirs, "permissions")
    permissions: dict[str, Json] = {
        "defaultMode": next(
            (mode for mode in _CLAUDE_STRICTER_MODES if mode == rules.get("defaultMode")), "default"
        ),
        "disableAutoMode": "disable",
    }
    permissions |= {name: value for name, value in _CLAUDE_RESTRICTIONS.items() if rules.get(name) == value}
    for name in ("deny", "ask"):
        if listed := texts(rules.get(name)):
            permissions[name] = Joined(_wherever(listed, place))
    settings: dict[str, Json] = {"permissions": permissions}
    if sandbox := _claude_sandbox(table(theirs, "sandbox")):
        settings["sandbox"] = sandbox
    notes = [f"The hooks in {place / 'settings.json'} do not run here."] if theirs.get("hooks") else []
    return Permissions(files={"settings.json": settings}, notes=notes)


def _wherever(rules: Sequence[str], place: Path) -> list[str]:
    """Return the rules, and those whose path begins at the settings' folder also with that folder."""
    named = (
        f"{rule['tool']}(/{place.absolute()}/{rule['path']})"
        for rule in map(_FROM_THE_SETTINGS.fullmatch, rules)
        if rule
    )
    return [*rules, *named]


def _claude_sandbox(theirs: Mapping[str, Any]) -> dict[str, Json]:
    """Return what a sandbox of the user forbids. Inside of it Claude Code would not ask, by its default."""
    if theirs.get("enabled") is not True:
        return {}
    sandbox: dict[str, Json] = {"enabled": True, "autoAllowBashIfSandboxed": False}
    if theirs.get("allowUnsandboxedCommands") is False:
        sandbox["allowUnsandboxedCommands"] = False
    if theirs.get("failIfUnavailable") is True:
        sandbox["failIfUnavailable"] = True
    for group, name in _CLAUDE_SANDBOX_LISTS:
        if listed := texts(table(theirs, group).get(name)):
            sandbox[group] = {**table(sandbox, group), name: Joined(listed)}
    return sandbox


# --------------------------------------------------------------------------------------------------- Codex

_CONFINED = ("read-only", "workspace-write")


def codex(own: OwnSettings, _folder: Path) -> Permissions:
    """Return Codex's read-only sandbox: commands that need more are a question to the user.

    Codex's reviewer, a model that answers in the user's place, is off.
    """
    place = own.place("CODEX_HOME", ".codex")
    theirs = own.read(place / "config.toml")
    chosen = {**theirs, **table(table(theirs, "profiles"), str(theirs.get("profile")))}
    policy, notes = _codex_policy(chosen), []
    if policy == "never":
        notes.append(
            f'{place / "config.toml"} has approval_policy = "never": here Codex changes nothing and does not '
            "ask. With --ask-for-approval on-request it asks."
        )
    if chosen.get("default_permissions"):
        notes.append(f"The permission profiles in {place / 'config.toml'} do not hold here.")
    config: dict[str, Json] = {
        "approval_policy": policy,
        "approvals_reviewer": "user",
        "sandbox_mode": "read-only",
    }
    return Permissions(files={"config.toml": config, **_codex_rules(own, place)}, notes=notes)


def _codex_policy(theirs: Mapping[str, Any]) -> Json:
    """Return when to ask. A policy that is not stricter than asking becomes asking."""
    match theirs.get("approval_policy"):
        case "untrusted":
            return "untrusted"  # Only older versions have it, and their users.
        case "never" if theirs.get("sandbox_mode", "read-only") in _CONFINED:
            return "never"
        case {"granular": Mapping() as categories}:
            return {"granular": dict(categories)}
        case _:
            return "on-request"


def _codex_rules(own: OwnSettings, place: Path) -> Contents:
    """Return the user's rules for commands, but for those that allow something."""
    try:
        paths = sorted((place / "rules").glob("*.rules"))
        strict = [ast.unparse(rule) for path in paths for rule in _strict_rules(own.text(path))]
    except SyntaxError as error:
        raise LaunchError(f"The rules in {place / 'rules'} are not understood: {error.msg}.") from None
    return {"rules/own.rules": "\n".join(strict) + "\n"} if paths else {}


def _strict_rules(text: str) -> Iterator[ast.expr]:
    """Yield the calls that forbid, or ask. The language is a part of Python's."""
    for statement in ast.parse(text).body:
        match statement:
            case ast.Expr(value=ast.Call(keywords=keywords) as call):
                decisions = {
                    keyword.value.value
                    for keyword in keywords
                    if keyword.arg == "decision" and isinstance(keyword.value, ast.Constant)
                }
                if decisions & {"forbidden", "prompt"}:
                    yield call
            case _:
                pass


# ------------------------------------------------------------------------------------------------------ pi


def pi(own: OwnSettings, _folder: Path) -> Permissions:
    """Return an extension that asks, because pi has no permissions of its own."""
    place = own.place("PI_CODING_AGENT_DIR", ".pi/agent")
    theirs = own.read(place / "settings.json")
    settings: dict[str, Json] = {
        "defaultProjectTrust": "never" if theirs.get("defaultProjectTrust") == "never" else "ask"
    }
    if isinstance(theirs.get("defaultTools"), list):
        settings["defaultTools"] = texts(theirs["defaultTools"])
    has_extensions = theirs.get("extensions") or theirs.get("packages") or (place / "extensions").is_dir()
    notes = [f"The extensions in {place} do not run here, also not those that forbid something."]
    return Permissions(
        files={"extensions/ask-first.js": _gate("pi"), "settings.json": settings},
        notes=notes if has_extensions else (),
    )


# ------------------------------------------------------------------------------------------------ OpenClaw

_OPENCLAW_MODES = ("deny", "allowlist")
"""Those that are stricter than asking."""
_OPENCLAW_NOTE = (
    "OpenClaw cannot ask in a terminal: here it refuses commands. `start_llm launch openclaw approvals "
    "allowlist add --agent main /usr/bin/git` allows a program. Files in its own workspace it writes without "
    "a question."
)


def openclaw(own: OwnSettings, _folder: Path) -> Permissions:
    """Return a policy that asks about each command, and confines files to OpenClaw's own workspace.

    OpenClaw asks where approvals arrive: in its control page and in chats, not in its terminal (lesson 152).
    There it refuses what it would have to ask about.
    """
    place = own.place("OPENCLAW_STATE_DIR", ".openclaw")
    named = own.variables.get("OPENCLAW_CONFIG_PATH")
    theirs = table(own.read(Path(named) if named else place / "openclaw.json"), "tools")
    tools: dict[str, Json] = {
        "elevated": {"enabled": False},
        "exec": _openclaw_policy(table(theirs, "exec")),
        "fs": {"workspaceOnly": True},
    }
    if denied := texts(theirs.get("deny")):
        tools["deny"] = Joined(denied)
    return Permissions(files={"openclaw.json": {"tools": tools}}, notes=[_OPENCLAW_NOTE])


def _openclaw_policy(theirs: Mapping[str, Any]) -> dict[str, Json]:
    """Return the user's policy for commands if it is stricter than asking, or else asking."""
    strict: dict[str, Json] = {"strictInlineEval": True} if theirs.get("strictInlineEval") is True else {}
    if theirs.get("security") == "deny":
        return {"mode": "deny", **strict}
    if theirs.get("ask") == "always":
        return {"security": "allowlist", "ask": "always", **strict}
    mode = theirs.get("mode")
    return {"mode": mode if mode in _OPENCLAW_MODES else "ask", **strict}


# -------------------------------------------------------------------------------------------------- helpers


def _gate(client: str) -> str:
    return (resources(__package__) / "ask_first" / f"{client}.js").read_text(encoding="utf-8")


def table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what the name has in a table, if that is a table too, or else an empty one."""
    inner = content.get(name)
    return inner if isinstance(inner, Mapping) else {}


def texts(value: Any) -> list[Any]:
    """Return the texts of a list; none if it is no list."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []
