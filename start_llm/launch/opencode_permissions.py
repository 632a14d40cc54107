"""Make opencode's agents ask before they act.

opencode reads the user's configuration and the project's, and the last rule that matches decides: a rule for
all tools behind theirs would lift what they forbid. So each agent gets its rules again, behind all others,
with "ask" for each "allow" of a tool that acts.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from start_llm.core.chat import Json
from start_llm.core.errors import LaunchError
from start_llm.launch.files import deep_merge, parse_yaml
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.permissions import Permissions

type Rules = dict[str, dict[str, Json]]
"""Tool to pattern to "allow", "ask" or "deny". The last one that matches decides."""

_NAMES = ("opencode.json", "opencode.jsonc")
_ALL = "*"
_READS: Rules = {
    "read": {_ALL: "allow", "*.env": "ask", "*.env.*": "ask", "*.env.example": "allow"},
    **{name: {_ALL: "allow"} for name in ("glob", "grep", "list", "lsp", "skill", "task", "todowrite")},
}
_STAYS_FREE = frozenset({*_READS, "question", "plan_enter", "plan_exit"})
_PLANS = ".opencode/plans/*.md", "*opencode/plans/*.md"


def _base(**rules: Mapping[str, Json]) -> Rules:
    return {_ALL: {_ALL: "ask"}, **_READS, **{name: dict(patterns) for name, patterns in rules.items()}}


_SILENT = {name: {_ALL: "deny"} for name in ("question", "plan_enter", "plan_exit")}
_BASES: Mapping[str, Rules] = {
    "build": _base(**{**_SILENT, "question": {_ALL: "allow"}, "plan_enter": {_ALL: "allow"}}),
    "plan": _base(
        **{**_SILENT, "question": {_ALL: "allow"}, "plan_exit": {_ALL: "allow"}},
        task={_ALL: "allow", "general": "deny"},
        edit={_ALL: "deny", **dict.fromkeys(_PLANS, "ask")},
    ),
    "general": _base(**_SILENT, todowrite={_ALL: "deny"}),
    # The others of its tools read, or are denied.
    "explore": {name: {_ALL: "ask"} for name in ("bash", "webfetch", "websearch")},
}
"""What opencode's own agents may do, but with questions."""


def opencode(own: OwnSettings, _folder: Path) -> Permissions:
    """Return the agents' rules."""
    config = _configuration(own)
    everywhere = _rules_of(config)
    agents = _agents(own, config)
    permission: dict[str, Json] = {}
    for name in dict.fromkeys((*_BASES, *agents)):
        base, agents_own = _BASES.get(name, _base(**_SILENT)), _rules_of(agents.get(name, {}))
        rules = _behind(_behind(base, everywhere, base), agents_own, base)
        permission[name] = {"permission": _past(rules, agents_own)}
    return Permissions(inline={"OPENCODE_CONFIG_CONTENT": {"agent": permission}})


def _behind(rules: Rules, theirs: Rules, base: Rules) -> Rules:
    """Return the rules with those of the user behind them. One for everything makes those before it void."""
    rules = {tool: dict(patterns) for tool, patterns in rules.items()}
    for tool, patterns in theirs.items():
        for pattern, action in patterns.items():
            if tool == pattern == _ALL and action == "allow":
                rules = {tool: dict(patterns) for tool, patterns in base.items()}
                continue
            if pattern == _ALL:
                rules = {} if tool == _ALL else {name: rules[name] for name in rules if name != tool}
            before = rules.pop(tool, {})
            before.pop(pattern, None)
            rules[tool] = {**before, pattern: _asking(tool, action)}
    return rules


def _asking(tool: str, action: Json) -> Json:
    return "ask" if action == "allow" and tool not in _STAYS_FREE else action


def _past(rules: Rules, agents_own: Rules) -> dict[str, Json]:
    """Return the rules so that they come behind the agent's own.

    A tool that the agent's own rules name keeps its place when opencode merges ours into them. It gets the
    same rules once more at the end, under a name that matches it too.
    """
    again = {f"{tool}{_ALL}": rules[tool] for tool in rules if tool in agents_own and tool != _ALL}
    return {
        tool: patterns.get(_ALL) if [*patterns] == [_ALL] else patterns
        for tool, patterns in (rules | again).items()
    }


# ---------------------------------------------------------------------------------------- the user's settings


def _configuration(own: OwnSettings) -> Mapping[str, Any]:
    """Return what opencode makes of all configuration files, and of its variables."""
    merged: Mapping[str, Any] = {}
    for path in _configuration_files(own):
        merged = deep_merge(merged, own.read(path))
    for name in ("OPENCODE_CONFIG_CONTENT", "OPENCODE_PERMISSION"):
        value = _from_variable(own, name)
        merged = deep_merge(
            merged, {"permission": value} if name == "OPENCODE_PERMISSION" and value else value
        )
    return merged


def _configuration_files(own: OwnSettings) -> Iterator[Path]:
    """Yield the files in the order in which opencode reads them."""
    everywhere = _global_folder(own)
    yield from (everywhere / name for name in ("config.json", *_NAMES))
    if named := own.variables.get("OPENCODE_CONFIG"):
        yield Path(named)
    yield from (folder / name for folder in own.folders_around() for name in _NAMES)
    yield from (folder / name for folder in _dot_folders(own) for name in _NAMES)


def _global_folder(own: OwnSettings) -> Path:
    return own.place("XDG_CONFIG_HOME", ".config") / "opencode"


def _dot_folders(own: OwnSettings) -> Iterator[Path]:
    yield own.home / ".opencode"
    yield from (folder / ".opencode" for folder in own.folders_around())
    if named := own.variables.get("OPENCODE_CONFIG_DIR"):
        yield Path(named)


def _from_variable(own: OwnSettings, name: str) -> Any:
    try:
        return json.loads(own.variables.get(name) or "{}")
    except ValueError:
        raise LaunchError(f"{name} is not JSON, so the permissions in it cannot be kept.") from None


def _agents(own: OwnSettings, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the agents that are configured, also those in files of their own."""
    agents: Mapping[str, Any] = config.get("agent") or {}
    for folder in (_global_folder(own), *_dot_folders(own)):
        for kind in ("agent", "agents", "mode", "modes"):
            for path in sorted((folder / kind).rglob("*.md")):
                name = path.relative_to(folder / kind).with_suffix("").as_posix()
                agents = deep_merge(agents, {name: _front_matter(own.text(path), path)})
    agents = deep_merge(agents, config.get("mode") or {})
    return {name: agent for name, agent in agents.items() if isinstance(agent, Mapping)}


def _front_matter(text: str, path: Path) -> Mapping[str, Any]:
    """Return the settings at the top of an agent's file, between two lines of dashes."""
    _, dashes, rest = text.partition("---\n")
    head, end, _ = rest.partition("\n---")
    try:
        content = parse_yaml(head) if dashes and end else None
    except ValueError:
        raise LaunchError(
            f"{path} cannot be read, so the permissions of that agent cannot be kept."
        ) from None
    return content if isinstance(content, Mapping) else {}


def _rules_of(settings: Mapping[str, Any]) -> Rules:
    """Return the rules of a configuration or of an agent, which also has them in an older form: `tools`."""
    switches = settings.get("tools")
    older: dict[str, Any] = {}
    for tool, is_on in switches.items() if isinstance(switches, Mapping) else ():
        older["edit" if tool in ("write", "edit", "patch") else tool] = "allow" if is_on else "deny"
    permission = settings.get("permission")
    merged = deep_merge(
        older, permission if isinstance(permission, Mapping) else {_ALL: permission} if permission else {}
    )
    return {
        tool: dict(patterns) if isinstance(patterns, Mapping) else {_ALL: patterns}
        for tool, patterns in merged.items()
    }
