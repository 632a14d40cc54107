"""The clients: one row each, with what it is told of a server.

What the names mean to each client was read in its documents and measured with the client itself. Idle limits
are lifted for what may stand between: clients give up after 300 s without a sign of life.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.chat import Json
from start_llm.launch.served import Served

PROVIDER = "start_llm"
KEY_VARIABLE = "START_LLM_API_KEY"
_IDLE_S = 3600
_IDLE_MS = _IDLE_S * 1000
_LEAST_CLAUDE_WINDOW = 100_000
_FREE: Json = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}

type Environment = Mapping[str, str]
type Files = Mapping[str, Mapping[str, Json]]
"""Name to content, which `files` writes as the ending says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client and its two questions: which variables, and which files, for a server and a private folder.

    Attributes:
        command: its program.
        install: how to get it.
        foreign: variables that would lead it to another server, and are taken away.
        own_place: where its user keeps what we keep in a private folder.
    """

    command: str
    install: str
    environment: Callable[[Served, Path], Environment]
    files: Callable[[Served, Path], Files]
    foreign: tuple[str, ...]
    own_place: str


# --------------------------------------------------------------------------------------------- Claude Code


def _claude_environment(served: Served, folder: Path) -> Environment:
    models = dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
        ),
        served.model,
    )
    return {
        "CLAUDE_CONFIG_DIR": str(folder),
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        **models,
        **_claude_limits(served),
        "API_TIMEOUT_MS": str(_IDLE_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }


def _claude_limits(served: Served) -> Environment:
    """Without them it takes an unknown model's window for a million tokens, and never compacts in time.

    It complains of a compaction window below 100,000; there the context alone has to do.
    """
    limits = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.reply),
    }
    if served.window >= _LEAST_CLAUDE_WINDOW:
        limits["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.window)
    return limits


def _claude_files(_served: Served, _folder: Path) -> Files:
    """It asks for a login otherwise."""
    return {".claude.json": {"hasCompletedOnboarding": True}}


# --------------------------------------------------------------------------------------------------- Codex


_CODEX_PROMPT = 12_000
"""Tokens of its own prompt: about 10,000, with other tokenizers more."""


def _codex_environment(served: Served, folder: Path) -> Environment:
    return {"CODEX_HOME": str(folder), KEY_VARIABLE: served.key}


def _codex_files(served: Served, _folder: Path) -> Files:
    provider: Json = {
        "name": PROVIDER,
        "base_url": f"{served.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
        # From 0.2 s on, each twice as long: 5 tries are over before a server that was started again is there.
        "request_max_retries": 9,
        "stream_max_retries": 9,
    }
    return {
        "config.toml": {
            "model": served.model,
            "model_provider": PROVIDER,
            "model_context_window": served.window,
            "model_auto_compact_token_limit": _codex_growth(served),
            "model_auto_compact_token_limit_scope": "body_after_prefix",
            "model_reasoning_effort": "medium",
            "check_for_update_on_startup": False,
            "model_providers": {PROVIDER: provider},
            "features": {"plugins": False},
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "otel": {"exporter": "none"},
        }
    }


def _codex_growth(served: Served) -> int:
    """Tokens that may come to a conversation before it is compacted, without those that it begins with.

    Its own prompt, and questions of 20,000 tokens, are there again behind a compaction (lesson 35).
    """
    return max(served.window - served.reply - _CODEX_PROMPT, served.window // 4)


# ------------------------------------------------------------------------------------------------ opencode


def _opencode_environment(served: Served, folder: Path) -> Environment:
    """The file comes before a project's own; what makes it ours comes after that."""
    name = f"{PROVIDER}/{served.model}"
    chosen: Json = {"model": name, "small_model": name, "enabled_providers": [PROVIDER]}
    return {
        "OPENCODE_CONFIG": str(folder / "opencode.json"),
        "OPENCODE_CONFIG_CONTENT": json.dumps(chosen, ensure_ascii=False),
        "OPENCODE_DB": str(folder / "opencode.db"),
        KEY_VARIABLE: served.key,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    }


def _opencode_files(served: Served, _folder: Path) -> Files:
    options: Json = {
        "baseURL": f"{served.url}/v1",
        "apiKey": f"{{env:{KEY_VARIABLE}}}",
        "headerTimeout": False,
        "chunkTimeout": _IDLE_MS,
    }
    model: Json = {
        "name": served.model,
        "limit": {"context": served.window, "output": served.reply},
        "tool_call": True,
        "reasoning": True,
    }
    provider: Json = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": options,
        "models": {served.model: model},
    }
    return {
        "opencode.json": {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "provider": {PROVIDER: provider},
        }
    }


# -------------------------------------------------------------------------------------------------- pi


_PI_MARGIN = 4096
"""Tokens that it leaves free besides those of the reply, which it asks for that many less of."""


def _pi_environment(served: Served, folder: Path) -> Environment:
    return {
        "PI_CODING_AGENT_DIR": str(folder),
        KEY_VARIABLE: served.key,
        # It names its session then.
        "PI_CACHE_RETENTION": "long",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }


def _pi_files(served: Served, _folder: Path) -> Files:
    """It counts four characters for a token of what it keeps, and there may be four tokens in them."""
    provider: Json = {
        "baseUrl": f"{served.url}/v1",
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "models": [_pi_model(served)],
    }
    return {
        "models.json": {"providers": {PROVIDER: provider}},
        "settings.json": {
            "defaultProvider": PROVIDER,
            "defaultModel": served.model,
            "httpIdleTimeoutMs": 0,
            # After 2 s, 4 s and so on; a server that is started again takes longer than the usual three.
            "retry": {"maxRetries": 6},
            "compaction": {
                "reserveTokens": served.reply + _PI_MARGIN,
                "keepRecentTokens": min(20_000, served.window // 8),
            },
        },
    }


def _pi_model(served: Served) -> dict[str, Json]:
    """OpenClaw, which is built on pi, has the same entry."""
    return {
        "id": served.model,
        "name": served.model,
        "reasoning": True,
        "input": ["text"],
        "contextWindow": served.window,
        "maxTokens": served.reply,
        "cost": _FREE,
    }


# ------------------------------------------------------------------------------------------------ OpenClaw


def _openclaw_environment(served: Served, folder: Path) -> Environment:
    return {
        "OPENCLAW_STATE_DIR": str(folder),
        "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json"),
        KEY_VARIABLE: served.key,
        "OPENCLAW_NO_AUTO_UPDATE": "1",
    }


def _openclaw_files(served: Served, folder: Path) -> Files:
    """Its workspace is private too: it writes notes of its own there, and not into a project."""
    # Without the flag nothing that it sends names its session.
    model: Json = {**_pi_model(served), "compat": {"supportsPromptCacheKey": True}}
    provider: Json = {
        "baseUrl": f"{served.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "api": "openai-completions",
        "timeoutSeconds": _IDLE_S,
        "models": [model],
    }
    defaults: Json = {
        "model": {"primary": f"{PROVIDER}/{served.model}"},
        "workspace": str(folder / "workspace"),
    }
    return {
        "openclaw.json": {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
            "agents": {"defaults": defaults},
            "gateway": {"mode": "local"},
            "update": {"checkOnStart": False},
            "telemetry": {"enabled": False},
        }
    }


CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        command="claude",
        install="npm install -g @anthropic-ai/claude-code",
        environment=_claude_environment,
        files=_claude_files,
        foreign=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_OAUTH_TOKEN",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_FOUNDRY",
            "CLAUDE_CODE_USE_VERTEX",
        ),
        own_place="~/.claude.json",
    ),
    "openclaw": Client(
        command="openclaw",
        install="npm install -g openclaw",
        environment=_openclaw_environment,
        files=_openclaw_files,
        foreign=("OPENCLAW_HOME", "OPENCLAW_AGENT_DIR"),
        own_place="~/.openclaw/openclaw.json",
    ),
    "pi": Client(
        command="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        environment=_pi_environment,
        files=_pi_files,
        foreign=("PI_CODING_AGENT_SESSION_DIR",),
        own_place="~/.pi/agent/",
    ),
    "codex": Client(
        command="codex",
        install="npm install -g @openai/codex",
        environment=_codex_environment,
        files=_codex_files,
        foreign=("CODEX_SQLITE_HOME",),
        own_place="~/.codex/config.toml",
    ),
    "opencode": Client(
        command="opencode",
        install="npm install -g opencode-ai",
        environment=_opencode_environment,
        files=_opencode_files,
        foreign=(),
        own_place="~/.config/opencode/opencode.json",
    ),
}
"""By the name that `launch` and `config` take."""
