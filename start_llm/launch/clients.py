"""The table of coding clients, with the environment variables and files that each needs for a server.

The meaning of each name comes from the client's documentation and from tests with the client itself. Idle
limits are raised, because clients otherwise give up after 300 s without an event.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from start_llm.core.chat import Json
from start_llm.launch import permissions
from start_llm.launch.client import (
    IDLE_MS,
    IDLE_S,
    KEY_VARIABLE,
    PROVIDER,
    Client,
    Environment,
    Files,
    OwnPrompt,
)
from start_llm.launch.cline import CLINE
from start_llm.launch.continue_cli import CONTINUE
from start_llm.launch.opencode_permissions import opencode
from start_llm.launch.qwen_code import QWEN
from start_llm.launch.server_info import OfferedModel, ServerInfo

_LEAST_CLAUDE_WINDOW = 100_000
_FREE: Json = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}


# --------------------------------------------------------------------------------------------- Claude Code


def _claude_environment(served: ServerInfo, folder: Path) -> Environment:
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
        "API_TIMEOUT_MS": str(IDLE_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    }


def _claude_limits(served: ServerInfo) -> Environment:
    """Return the token limits.

    Without them Claude Code assumes a window of a million tokens for an unknown model, and compacts too late.
    It complains about a compaction window below 100,000 tokens, so smaller windows set the context size only.
    """
    limits = {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.window),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.reply),
    }
    if served.window >= _LEAST_CLAUDE_WINDOW:
        limits["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(served.window)
    return limits


def _claude_files(_served: ServerInfo, _folder: Path) -> Files:
    """Mark the onboarding as done: otherwise Claude Code asks for a login."""
    return {".claude.json": {"hasCompletedOnboarding": True}}


# --------------------------------------------------------------------------------------------------- Codex


_CODEX_PROMPT = 12_000
"""Tokens of Codex's own prompt: about 10,000, and more with some tokenizers."""


def _codex_environment(served: ServerInfo, folder: Path) -> Environment:
    return {"CODEX_HOME": str(folder), KEY_VARIABLE: served.key}


def _codex_files(served: ServerInfo, _folder: Path) -> Files:
    provider: Json = {
        "name": PROVIDER,
        "base_url": f"{served.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        "stream_idle_timeout_ms": IDLE_MS,
        # Waits start at 0.2 s and double. Five attempts end before a restarted server is ready.
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


def _codex_growth(served: ServerInfo) -> int:
    """Return by how many tokens a conversation may grow beyond its first prefix before Codex compacts it.

    After a compaction, Codex's own prompt and up to 20,000 tokens of questions are still there (lesson 35).
    """
    return max(served.window - served.reply - _CODEX_PROMPT, served.window // 4)


# ------------------------------------------------------------------------------------------------ opencode


def _opencode_environment(served: ServerInfo, folder: Path) -> Environment:
    """Return the variables.

    opencode reads OPENCODE_CONFIG before the project's own file, and OPENCODE_CONFIG_CONTENT after it. So the
    choice of model and provider is in the latter, where a project cannot override it.
    """
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


def _opencode_files(served: ServerInfo, _folder: Path) -> Files:
    options: Json = {
        "baseURL": f"{served.url}/v1",
        "apiKey": f"{{env:{KEY_VARIABLE}}}",
        "headerTimeout": False,
        "chunkTimeout": IDLE_MS,
    }
    provider: Json = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": options,
        "models": {model.name: _opencode_model(model) for model in served.models},
    }
    return {
        "opencode.json": {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "provider": {PROVIDER: provider},
        }
    }


def _opencode_model(model: OfferedModel) -> Json:
    return {
        "name": model.name,
        "limit": {"context": model.window, "output": model.reply},
        "tool_call": True,
        "reasoning": True,
        # Without both, opencode puts a text in place of each image.
        "attachment": model.sees,
        "modalities": {"input": ["text", "image"] if model.sees else ["text"], "output": ["text"]},
    }


# -------------------------------------------------------------------------------------------------- pi


_PI_MARGIN = 4096
"""Tokens that pi keeps free besides those of the reply; it asks for a reply that much shorter."""


def _pi_environment(served: ServerInfo, folder: Path) -> Environment:
    return {
        "PI_CODING_AGENT_DIR": str(folder),
        KEY_VARIABLE: served.key,
        # With this, pi sends a session id.
        "PI_CACHE_RETENTION": "long",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    }


def _pi_files(served: ServerInfo, _folder: Path) -> Files:
    """Return the files.

    pi estimates the tokens that it keeps after a compaction as characters / 4. Four characters can be up to
    four tokens, so `keepRecentTokens` is at most an eighth of the window.
    """
    provider: Json = {
        "baseUrl": f"{served.url}/v1",
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "headers": {"User-Agent": "pi"},
        "models": [_pi_model(model) for model in served.models],
    }
    return {
        "models.json": {"providers": {PROVIDER: provider}},
        "settings.json": {
            "defaultProvider": PROVIDER,
            "defaultModel": served.model,
            "httpIdleTimeoutMs": 0,
            # Waits are 2 s, 4 s and so on. A restart of the server outlasts the default of three retries.
            "retry": {"maxRetries": 6},
            "compaction": {
                "reserveTokens": served.reply + _PI_MARGIN,
                "keepRecentTokens": min(20_000, served.window // 8),
            },
        },
    }


def _pi_model(model: OfferedModel) -> dict[str, Json]:
    """Return the entry of a model, for pi and for OpenClaw, which is built on pi."""
    return {
        "id": model.name,
        "name": model.name,
        "reasoning": True,
        "input": ["text", "image"] if model.sees else ["text"],
        "contextWindow": model.window,
        "maxTokens": model.reply,
        "cost": _FREE,
    }


# ------------------------------------------------------------------------------------------------ OpenClaw


def _openclaw_environment(served: ServerInfo, folder: Path) -> Environment:
    return {
        "OPENCLAW_STATE_DIR": str(folder),
        "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json"),
        KEY_VARIABLE: served.key,
        "OPENCLAW_NO_AUTO_UPDATE": "1",
    }


def _openclaw_files(served: ServerInfo, folder: Path) -> Files:
    """Return the files. The workspace is in the private folder, because OpenClaw writes notes into it."""
    # Without this flag, no field of OpenClaw's requests identifies the session.
    models: Json = [
        {**_pi_model(model), "compat": {"supportsPromptCacheKey": True}} for model in served.models
    ]
    provider: Json = {
        "baseUrl": f"{served.url}/v1",
        "apiKey": f"${{{KEY_VARIABLE}}}",
        "api": "openai-completions",
        "timeoutSeconds": IDLE_S,
        "headers": {"User-Agent": "openclaw"},
        "models": models,
    }
    defaults: Json = {
        "model": {"primary": f"{PROVIDER}/{served.model}"},
        "workspace": str(folder / "workspace"),
    }
    return {
        "openclaw.json": {
            "models": {"mode": "replace", "providers": {PROVIDER: provider}},
            "agents": {"defaults": defaults},
            # In a container, a gateway would listen on all addresses.
            "gateway": {"mode": "local", "bind": "loopback"},
            # Notes are found by their words. Vectors would be computed by OpenAI, if there is a key for it.
            "memory": {"search": {"provider": "none"}},
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
        permissions=permissions.claude,
        foreign=(
            "ANTHROPIC_API_KEY",
            "CLAUDE_CODE_OAUTH_TOKEN",
            "CLAUDE_CODE_USE_BEDROCK",
            "CLAUDE_CODE_USE_FOUNDRY",
            "CLAUDE_CODE_USE_VERTEX",
        ),
        own_place="~/.claude.json",
        programs=("claude-cli",),
        prompt=OwnPrompt(system=16_600, tools=61_200),
    ),
    "openclaw": Client(
        command="openclaw",
        install="npm install -g openclaw",
        environment=_openclaw_environment,
        files=_openclaw_files,
        permissions=permissions.openclaw,
        foreign=("OPENCLAW_HOME", "OPENCLAW_AGENT_DIR"),
        own_place="~/.openclaw/openclaw.json",
        programs=("openclaw",),
        prompt=OwnPrompt(system=49_000, tools=10_300),
    ),
    "pi": Client(
        command="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        environment=_pi_environment,
        files=_pi_files,
        permissions=permissions.pi,
        foreign=("PI_CODING_AGENT_SESSION_DIR",),
        own_place="~/.pi/agent/",
        programs=("pi",),
        prompt=OwnPrompt(system=2_600, tools=3_000),
    ),
    "codex": Client(
        command="codex",
        install="npm install -g @openai/codex",
        environment=_codex_environment,
        files=_codex_files,
        permissions=permissions.codex,
        foreign=("CODEX_SQLITE_HOME",),
        own_place="~/.codex/config.toml",
        programs=("codex_exec", "codex_cli_rs", "codex-tui"),
        prompt=OwnPrompt(system=20_100, tools=17_800),
    ),
    "opencode": Client(
        command="opencode",
        install="npm install -g opencode-ai",
        environment=_opencode_environment,
        files=_opencode_files,
        permissions=opencode,
        foreign=(),
        own_place="~/.config/opencode/opencode.json",
        programs=("opencode",),
        prompt=OwnPrompt(system=9_700, tools=21_100),
    ),
    "qwen": QWEN,
    "cline": CLINE,
    "continue": CONTINUE,
}
"""The clients by the names that the commands `launch` and `config` take."""
