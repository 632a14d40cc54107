"""The agents: a row for each says how it is called for a turn, and how its next turn goes on.

They are programs of others, installed by `scripts/install_clients.sh` into folders below CLIENTS_HOME. Each
gets a home and a working folder of its own, so it meets no configuration but what is written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

MODEL = "agents-model"
KEY = "sk-local"
WINDOW = 131_072
REPLY = 8_192
_LAUNCHER = Path(__file__).resolve().parents[2] / "scripts" / "start_llm"

type Words = Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder in which a client runs, and the server it talks to."""

    home: Path
    work: Path
    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One client.

    Attributes:
        folder: below CLIENTS_HOME.
        program: of its package.
        first, later: words after the program, for the first turn and for those that go on with it.
        environment: besides what every client gets.
        files: what is written before it starts: texts by their path in its home.
        has_asides: its requests end with a message that is gone in the next one. What the model said after
            it has to be read again, without it.
        launched_as: its name for the launcher, which then says where the server is and what it has.
        folder_of_its_tools: where its commands run.
        asks_its_maker: it asks its maker's service about something at each start, and has no switch for that.
    """

    folder: str
    program: str
    first: Callable[[Place, str], Words]
    later: Callable[[Place, str], Words]
    environment: Callable[[Place], Mapping[str, str]]
    files: Callable[[Place], Mapping[str, str]] = lambda _: {}
    has_asides: bool = False
    launched_as: str | None = None
    folder_of_its_tools: Callable[[Place], Path] = lambda place: place.work
    asks_its_maker: bool = False

    def path(self, clients_home: Path) -> Path:
        return clients_home / self.folder / "node_modules" / ".bin" / self.program

    def command(self, clients_home: Path, place: Place) -> Words:
        """Return the arguments before the words of a turn."""
        if self.launched_as is None:
            return (str(self.path(clients_home)),)
        return (str(_LAUNCHER), "launch", "--base-url", place.url, self.launched_as)


# -------------------------------------------------------------------------------------------- Claude Code

_UNASKED = ("--dangerously-skip-permissions",)


def _claude_environment(place: Place) -> Mapping[str, str]:
    models = (
        "MODEL",
        "SMALL_FAST_MODEL",
        "DEFAULT_HAIKU_MODEL",
        "DEFAULT_SONNET_MODEL",
        "DEFAULT_OPUS_MODEL",
    )
    switches = (
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL",
        "DISABLE_AUTOUPDATER",
        "DISABLE_ERROR_REPORTING",
        "DISABLE_TELEMETRY",
        "IS_SANDBOX",  # without it, root may not skip permissions
    )
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        **{f"ANTHROPIC_{name}": MODEL for name in models},
        **dict.fromkeys(switches, "1"),
    }


def _claude(folder: str) -> Agent:
    return Agent(
        folder=folder,
        program="claude",
        first=lambda _, prompt: (*_UNASKED, "-p", prompt),
        later=lambda _, prompt: (*_UNASKED, "--continue", "-p", prompt),
        environment=_claude_environment,
    )


# ----------------------------------------------------------------------------------------------------- pi

_PI = ("--provider", "local", "--model", MODEL)
_FREE = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
_CARD = {
    "id": MODEL,
    "name": MODEL,
    "reasoning": True,
    "input": ["text"],
    "cost": _FREE,
    "contextWindow": WINDOW,
    "maxTokens": REPLY,
}


def _pi_files(place: Place) -> Mapping[str, str]:
    provider = {"baseUrl": place.v1, "api": "openai-completions", "apiKey": KEY, "models": [_CARD]}
    return {
        "agent/models.json": json.dumps({"providers": {"local": provider}}),
        "agent/settings.json": json.dumps({"quietStartup": True}),
    }


# -------------------------------------------------------------------------------------------------- Codex

_CODEX = ("--skip-git-repo-check",)
_CODEX_SETTINGS = """
model = {model}
model_provider = "local"
model_context_window = {window}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.local]
name = "local"
base_url = {url}
env_key = "LOCAL_KEY"
wire_api = "responses"
[features]
plugins = false
[analytics]
enabled = false
[feedback]
enabled = false
[otel]
exporter = "none"
[projects.{work}]
trust_level = "trusted"
"""


def _codex_files(place: Place) -> Mapping[str, str]:
    values = {"model": MODEL, "window": WINDOW, "url": place.v1, "work": str(place.work)}
    quoted = {name: json.dumps(value) for name, value in values.items()}
    return {".codex/config.toml": _CODEX_SETTINGS.format(**quoted)}


# ----------------------------------------------------------------------------------------------- OpenClaw


_OPENCLAW = ("agent", "--local", "--agent", "main", "--session-id", "notes", "--message")


def _openclaw_words(_: Place, prompt: str) -> Words:
    return (*_OPENCLAW, prompt)


def _openclaw_files(place: Place) -> Mapping[str, str]:
    provider = {"baseUrl": place.v1, "api": "openai-completions", "apiKey": KEY, "models": [_CARD]}
    settings = {
        "models": {"mode": "replace", "providers": {"local": provider}},
        "agents": {"defaults": {"model": {"primary": f"local/{MODEL}"}, "workspace": str(place.work)}},
        "update": {"checkOnStart": False},
        "telemetry": {"enabled": False},
        "gateway": {"mode": "local"},
    }
    return {"state/openclaw.json": json.dumps(settings)}


def _openclaw_environment(place: Place) -> Mapping[str, str]:
    switches = ("NO_RESPAWN", "NO_AUTO_UPDATE", "DISABLE_BONJOUR", "SKIP_CHANNELS")
    state = place.home / "state"
    return {
        "OPENCLAW_STATE_DIR": str(state),
        "OPENCLAW_CONFIG_PATH": str(state / "openclaw.json"),
        **{f"OPENCLAW_{name}": "1" for name in switches},
    }


# ----------------------------------------------------------------------------------------------- opencode

_OPENCODE = ("run", "--pure", "--model", f"local/{MODEL}")


def _opencode_files(place: Place) -> Mapping[str, str]:
    limits = {"context": WINDOW, "output": REPLY}
    model = {"name": MODEL, "limit": limits, "tool_call": True, "reasoning": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": place.v1, "apiKey": KEY},
        "models": {MODEL: model},
    }
    off = ("autoupdate", "lsp", "formatter", "snapshot")
    settings = {
        **dict.fromkeys(off, False),
        "share": "disabled",
        "plugin": [],
        "permission": {"*": "allow"},
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "enabled_providers": ["local"],
        "provider": {"local": provider},
    }
    return {".config/opencode/opencode.json": json.dumps(settings)}


def _opencode_environment(_: Place) -> Mapping[str, str]:
    """It installs a package for plugins in the background, with npm's code and settings."""
    switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS", "SHARE")
    return {"npm_config_offline": "true", **{f"OPENCODE_DISABLE_{name}": "1" for name in switches}}


AGENTS: Mapping[str, Agent] = {
    "claude": _claude("claude"),
    "pi": Agent(
        folder="pi",
        program="pi",
        first=lambda _, prompt: (*_PI, "-p", prompt),
        later=lambda _, prompt: (*_PI, "--continue", "-p", prompt),
        environment=lambda place: {
            "PI_CODING_AGENT_DIR": str(place.home / "agent"),
            **dict.fromkeys(("PI_OFFLINE", "PI_SKIP_VERSION_CHECK"), "1"),
            "PI_TELEMETRY": "0",
        },
        files=_pi_files,
    ),
    "codex": Agent(
        folder="codex",
        program="codex",
        first=lambda _, prompt: ("exec", *_CODEX, prompt),
        later=lambda _, prompt: ("exec", "resume", "--last", *_CODEX, prompt),
        environment=lambda place: {"CODEX_HOME": str(place.home / ".codex"), "LOCAL_KEY": KEY},
        files=_codex_files,
    ),
    "openclaw": Agent(
        folder="openclaw",
        program="openclaw",
        first=_openclaw_words,
        later=_openclaw_words,
        environment=_openclaw_environment,
        files=_openclaw_files,
        has_asides=True,
    ),
    "claude-2.1.126": _claude("claude-2.1.126"),
    "opencode": Agent(
        folder="opencode",
        program="opencode",
        first=lambda _, prompt: (*_OPENCODE, prompt),
        later=lambda _, prompt: (*_OPENCODE, "--continue", prompt),
        environment=_opencode_environment,
        files=_opencode_files,
    ),
}

_EXEC = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def _launched(name: str, first: Words, later: Words, **environment: str) -> Agent:
    """As its user starts it.

    Args:
        environment: what the user sets besides.
    """
    return replace(
        AGENTS[name],
        launched_as=name,
        first=lambda _, prompt: (*first, prompt),
        later=lambda _, prompt: (*later, prompt),
        environment=lambda place: {"STATE_ROOT": str(_state(place)), **environment},
        files=lambda _: {},
    )


def _state(place: Place) -> Path:
    return place.home / "state"


def _launched_only(name: str, program: str, first: Words, later: Words) -> Agent:
    """As its user starts it; these tests do not configure it themselves."""
    return Agent(
        folder=name,
        program=program,
        launched_as=name,
        first=lambda _, prompt: (*first, prompt),
        later=lambda _, prompt: (*later, prompt),
        environment=lambda place: {"STATE_ROOT": str(_state(place))},
    )


_OPENCLAW_RUNS = {"agents": {"entries": {"main": {"tools": {"exec": {"mode": "full"}}}}}}
"""The word of its user that commands may run."""
_APPROVED = ("--auto-approve", "true")


def _qwen_trusts(place: Place) -> Mapping[str, str]:
    """The word of its user that what is in this folder may run."""
    return {"state/clients/qwen/trustedFolders.json": json.dumps({str(place.work): "TRUST_FOLDER"})}


LAUNCHED: Mapping[str, Agent] = {
    "claude": _launched("claude", (*_UNASKED, "-p"), (*_UNASKED, "--continue", "-p"), IS_SANDBOX="1"),
    "pi": _launched("pi", (*_UNASKED, "-p"), ("--continue", *_UNASKED, "-p")),
    "codex": _launched("codex", ("exec", *_EXEC), ("exec", "resume", "--last", *_EXEC)),
    "openclaw": replace(
        _launched("openclaw", _OPENCLAW, _OPENCLAW),
        folder_of_its_tools=lambda place: _state(place) / "clients" / "openclaw" / "workspace",
        files=lambda _: {"state/clients/openclaw/openclaw.json": json.dumps(_OPENCLAW_RUNS)},
    ),
    "opencode": _launched(
        "opencode", ("run", *_UNASKED), ("run", *_UNASKED, "--continue"), npm_config_offline="true"
    ),
    "qwen": replace(
        _launched_only("qwen", "qwen", ("--yolo",), ("--yolo", "--continue")), files=_qwen_trusts
    ),
    # Without a terminal Cline goes on with no conversation: each turn begins one.
    "cline": replace(_launched_only("cline", "cline", _APPROVED, _APPROVED), asks_its_maker=True),
    "continue": replace(
        _launched_only("continue", "cn", ("--auto", "-p"), ("--auto", "--resume", "-p")),
        asks_its_maker=True,
    ),
}
"""The clients of the launcher, which meet no configuration but its own."""
HELD: Mapping[str, Agent] = {
    **{name: agent for name, agent in LAUNCHED.items() if name not in ("cline", *AGENTS)},
    **AGENTS,
}
"""Each client that goes on with a conversation without a terminal."""
