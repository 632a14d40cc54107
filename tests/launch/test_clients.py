"""Each client's view of a server: exactly. What makes it ask is in `test_permissions.py`."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.access.client_name import client_name
from start_llm.config.settings import Settings
from start_llm.launch.client import Client
from start_llm.launch.clients import CLIENTS
from start_llm.launch.files import parse_yaml, text_of
from start_llm.launch.http_requests import Address
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.permissions import Permissions
from start_llm.launch.server_info import NO_KEY, ServerInfo, address_at, addresses, reply_limit
from start_llm.launch.setup import make_setup
from tests.flat_settings import settings_of

FOLDER = Path("/private/folder")
SERVED = ServerInfo(
    url="http://127.0.0.1:4000", key="sk-1", model="openai/tiny", window=131_072, reply=32_000
)
HOUR_MS = 3_600_000
PAST_PROXIES = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost,::1")
KEY = {"START_LLM_API_KEY": "sk-1"}
ENTRY = {
    "id": "openai/tiny",
    "name": "openai/tiny",
    "reasoning": True,
    "input": ["text"],
    "contextWindow": 131_072,
    "maxTokens": 32_000,
    "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
}

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "claude": {
        "CLAUDE_CONFIG_DIR": "/private/folder",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:4000",
        "ANTHROPIC_AUTH_TOKEN": "sk-1",
        "ANTHROPIC_MODEL": "openai/tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "openai/tiny",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "openai/tiny",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "openai/tiny",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "openai/tiny",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "32000",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "131072",
        "API_TIMEOUT_MS": "3600000",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_OFFICIAL_MARKETPLACE_AUTOINSTALL": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
    },
    "codex": {"CODEX_HOME": "/private/folder"} | KEY,
    "opencode": KEY
    | {
        "OPENCODE_CONFIG": "/private/folder/opencode.json",
        "OPENCODE_CONFIG_CONTENT": '{"model": "start_llm/openai/tiny", '
        '"small_model": "start_llm/openai/tiny", "enabled_providers": ["start_llm"]}',
        "OPENCODE_DB": "/private/folder/opencode.db",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
    "pi": KEY
    | {
        "PI_CODING_AGENT_DIR": "/private/folder",
        "PI_CACHE_RETENTION": "long",
        "PI_SKIP_VERSION_CHECK": "1",
        "PI_TELEMETRY": "0",
    },
    "openclaw": KEY
    | {
        "OPENCLAW_STATE_DIR": "/private/folder",
        "OPENCLAW_CONFIG_PATH": "/private/folder/openclaw.json",
        "OPENCLAW_NO_AUTO_UPDATE": "1",
    },
    "qwen": KEY
    | {
        "QWEN_HOME": "/private/folder",
        "QWEN_RUNTIME_DIR": "/private/folder",
        "QWEN_STREAM_MAX_LIFETIME_MS": "3600000",
    },
    "cline": {
        "CLINE_DIR": "/private/folder",
        "CLINE_DATA_DIR": "/private/folder/data",
        "CLINE_SESSION_BACKEND_MODE": "local",
        "OPENAI_API_KEY": "sk-1",
    },
    "continue": KEY
    | {
        "CONTINUE_GLOBAL_DIR": "/private/folder",
        "CONTINUE_CLI_AUTO_UPDATED": "1",
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        "CONTINUE_METRICS_ENABLED": "0",
    },
}
FILES: dict[str, dict[str, object]] = {
    "claude": {".claude.json": {"hasCompletedOnboarding": True}},
    "codex": {
        "config.toml": {
            "model": "openai/tiny",
            "model_provider": "start_llm",
            "model_context_window": 131_072,
            "model_auto_compact_token_limit": 131_072 - 32_000 - 12_000,
            "model_auto_compact_token_limit_scope": "body_after_prefix",
            "model_reasoning_effort": "medium",
            "check_for_update_on_startup": False,
            "model_providers": {
                "start_llm": {
                    "name": "start_llm",
                    "base_url": "http://127.0.0.1:4000/v1",
                    "env_key": "START_LLM_API_KEY",
                    "wire_api": "responses",
                    "stream_idle_timeout_ms": HOUR_MS,
                    "request_max_retries": 9,
                    "stream_max_retries": 9,
                }
            },
            "features": {"plugins": False},
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
            "otel": {"exporter": "none"},
        }
    },
    "opencode": {
        "opencode.json": {
            "$schema": "https://opencode.ai/config.json",
            "autoupdate": False,
            "share": "disabled",
            "provider": {
                "start_llm": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "start_llm",
                    "options": {
                        "baseURL": "http://127.0.0.1:4000/v1",
                        "apiKey": "{env:START_LLM_API_KEY}",
                        "headerTimeout": False,
                        "chunkTimeout": HOUR_MS,
                    },
                    "models": {
                        "openai/tiny": {
                            "name": "openai/tiny",
                            "limit": {"context": 131_072, "output": 32_000},
                            "tool_call": True,
                            "reasoning": True,
                            "attachment": False,
                            "modalities": {"input": ["text"], "output": ["text"]},
                        }
                    },
                }
            },
        }
    },
    "pi": {
        "models.json": {
            "providers": {
                "start_llm": {
                    "baseUrl": "http://127.0.0.1:4000/v1",
                    "api": "openai-completions",
                    "apiKey": "$START_LLM_API_KEY",
                    "headers": {"User-Agent": "pi"},
                    "models": [ENTRY],
                }
            }
        },
        "settings.json": {
            "defaultProvider": "start_llm",
            "defaultModel": "openai/tiny",
            "httpIdleTimeoutMs": 0,
            "retry": {"maxRetries": 6},
            "compaction": {"reserveTokens": 32_000 + 4096, "keepRecentTokens": 131_072 // 8},
        },
    },
    "openclaw": {
        "openclaw.json": {
            "models": {
                "mode": "replace",
                "providers": {
                    "start_llm": {
                        "baseUrl": "http://127.0.0.1:4000/v1",
                        "apiKey": "${START_LLM_API_KEY}",
                        "api": "openai-completions",
                        "timeoutSeconds": 3600,
                        "headers": {"User-Agent": "openclaw"},
                        "models": [ENTRY | {"compat": {"supportsPromptCacheKey": True}}],
                    }
                },
            },
            "agents": {
                "defaults": {
                    "model": {"primary": "start_llm/openai/tiny"},
                    "workspace": "/private/folder/workspace",
                }
            },
            "gateway": {"mode": "local", "bind": "loopback"},
            "memory": {"search": {"provider": "none"}},
            "update": {"checkOnStart": False},
            "telemetry": {"enabled": False},
        }
    },
    "qwen": {
        "settings.json": {
            "$version": 4,
            "security": {"auth": {"selectedType": "openai"}},
            "modelProviders": {
                "openai": [
                    {
                        "id": "openai/tiny",
                        "name": "openai/tiny",
                        "envKey": "START_LLM_API_KEY",
                        "baseUrl": "http://127.0.0.1:4000/v1",
                        "generationConfig": {
                            "contextWindowSize": 131_072,
                            "modalities": {"image": False},
                            "samplingParams": {"max_tokens": 32_000},
                            "streamIdleTimeoutMs": HOUR_MS,
                            "timeout": HOUR_MS,
                        },
                    }
                ]
            },
            "model": {"name": "openai/tiny"},
            "general": {"enableAutoUpdate": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "memory": {
                "enableManagedAutoMemory": False,
                "enableManagedAutoDream": False,
                "enableAutoSkill": False,
            },
            "ui": {"enableFollowupSuggestions": False, "enableUserFeedback": False},
        }
    },
    "cline": {
        "data/settings/providers.json": {
            "version": 1,
            "lastUsedProvider": "openai-compatible",
            "modes": {},
            "providers": {
                "openai-compatible": {
                    "settings": {
                        "provider": "openai-compatible",
                        "model": "openai/tiny",
                        "baseUrl": "http://127.0.0.1:4000/v1",
                        "timeout": HOUR_MS,
                        "headers": {"User-Agent": "cline"},
                    },
                    "updatedAt": "2026-01-01T00:00:00.000Z",
                    "tokenSource": "manual",
                }
            },
        },
        "data/settings/models.json": {
            "version": 1,
            "providers": {
                "openai-compatible": {
                    "models": {
                        "openai/tiny": {
                            "id": "openai/tiny",
                            "name": "openai/tiny",
                            "contextWindow": 131_072,
                            "maxTokens": 32_000,
                            "capabilities": ["tools", "streaming", "reasoning"],
                        }
                    }
                }
            },
        },
        "data/settings/global-settings.json": {"telemetryOptOut": True, "autoUpdateEnabled": False},
        "data/settings/cli-notices.json": {
            "shown": {
                "cline-cli-cline-pass-intro": True,
                "cline-cli-desktop-launch": True,
                "cline-cli-zen": True,
            }
        },
    },
    "continue": {
        "config.yaml": {
            "name": "start_llm",
            "version": "1.0.0",
            "schema": "v1",
            "models": [
                {
                    "name": "openai/tiny",
                    "provider": "openai",
                    "model": "openai/tiny",
                    "apiBase": "http://127.0.0.1:4000/v1",
                    "apiKey": "${{ secrets.START_LLM_API_KEY }}",
                    "roles": ["chat"],
                    "capabilities": ["tool_use"],
                    "requestOptions": {"headers": {"x-start-llm-program": "continue"}},
                    "defaultCompletionOptions": {"contextLength": 131_072, "maxTokens": 32_000},
                }
            ],
        },
        ".onboarding_complete": "\n",
    },
}


def nothing_of_their_own(**variables: str) -> OwnSettings:
    return OwnSettings(variables={"HOME": "/nowhere", **variables}, work=Path("/nowhere/work"))


def without_permissions(name: str) -> Client:
    return replace(CLIENTS[name], permissions=lambda *_: Permissions())


@pytest.mark.parametrize("name", CLIENTS)
def test_the_environment_is_exactly_this(name):
    setup = make_setup(without_permissions(name), SERVED, FOLDER, nothing_of_their_own())
    assert setup.environment == ENVIRONMENTS[name] | PAST_PROXIES


@pytest.mark.parametrize("name", CLIENTS)
def test_the_files_are_exactly_these(name):
    setup = make_setup(without_permissions(name), SERVED, FOLDER, nothing_of_their_own())
    assert setup.files == {FOLDER / file: content for file, content in FILES[name].items()}


@pytest.mark.parametrize("name", CLIENTS)
def test_each_file_reads_back_in_its_own_form(name):
    for path, content in make_setup(CLIENTS[name], SERVED, FOLDER, nothing_of_their_own()).files.items():
        read = {".json": json.loads, ".toml": tomllib.loads, ".yaml": parse_yaml}.get(path.suffix, str)
        assert read(text_of(path, content)) == content


@pytest.mark.parametrize("name", CLIENTS)
def test_no_file_holds_the_key(name):
    for path, content in make_setup(CLIENTS[name], SERVED, FOLDER, nothing_of_their_own()).files.items():
        assert SERVED.key not in text_of(path, content)


@pytest.mark.parametrize("name", CLIENTS)
def test_variables_that_lead_elsewhere_go_and_all_others_stay(name):
    client = without_permissions(name)
    theirs = {"PATH": "/bin", "HOME": "/home/me", "EDITOR": "vi"}
    elsewhere = dict.fromkeys((*client.foreign, *ENVIRONMENTS[name]), "elsewhere")
    over = make_setup(client, SERVED, FOLDER, nothing_of_their_own()).over(theirs | elsewhere)
    assert over == theirs | ENVIRONMENTS[name] | PAST_PROXIES


def test_hosts_that_the_user_keeps_from_a_proxy_stay_kept():
    inherited = {"NO_PROXY": "intra.example, 127.0.0.1", "HTTP_PROXY": "http://10.0.0.1:3128"}
    setup = make_setup(CLIENTS["pi"], SERVED, FOLDER, nothing_of_their_own(**inherited))
    assert setup.over(inherited)["NO_PROXY"] == "intra.example,127.0.0.1,localhost,::1"
    assert setup.over(inherited)["HTTP_PROXY"] == "http://10.0.0.1:3128"


def test_clients_with_a_switch_for_images_learn_of_a_model_that_sees():
    seeing = replace(SERVED, sees=True)

    def files(name: str) -> str:
        pairs = make_setup(CLIENTS[name], seeing, FOLDER, nothing_of_their_own()).files.items()
        return "".join(text_of(path, content) for path, content in pairs).replace(" ", "").replace("\n", "")

    for name in ("pi", "openclaw"):
        assert '"input":["text","image"]' in files(name)
    assert '"attachment":true' in files("opencode")
    assert '"modalities":{"input":["text","image"],"output":["text"]}' in files("opencode")
    assert '"modalities":{"image":true}' in files("qwen")
    assert '"reasoning","images"]' in files("cline")
    assert '["tool_use","image_input"]' in files("continue")
    for name in ("claude", "codex"):
        assert files(name) == files(name).replace("image", "")


def test_a_server_elsewhere_may_need_the_proxy():
    served = ServerInfo(url="https://llm.example", key="k", model="m", window=10_000, reply=2500)
    assert "NO_PROXY" not in make_setup(CLIENTS["codex"], served, FOLDER, nothing_of_their_own()).environment


def test_claude_is_not_given_a_compaction_window_that_it_complains_of():
    served = ServerInfo(url="http://127.0.0.1:8080", key="k", model="m", window=99_999, reply=24_999)
    environment = CLIENTS["claude"].environment(served, FOLDER)
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "99999"
    assert "CLAUDE_CODE_AUTO_COMPACT_WINDOW" not in environment


@pytest.mark.parametrize("window", [12_000, 20_000, 40_960, 131_072, 262_144])
def test_compaction_comes_in_time_and_does_not_come_again_at_once(window):
    """At the limit a whole reply has room; after a compaction the limit is not reached."""
    reply = reply_limit(window, window)
    served = ServerInfo(url="http://127.0.0.1:8080", key="k", model="m", window=window, reply=reply)
    codex: Any = CLIENTS["codex"].files(served, FOLDER)["config.toml"]
    pi: Any = CLIENTS["pi"].files(served, FOLDER)["settings.json"]
    assert codex["model_auto_compact_token_limit_scope"] == "body_after_prefix"
    assert codex["model_auto_compact_token_limit"] == max(window // 4, window - reply - 12_000)
    match pi["compaction"]:
        case {"reserveTokens": int(reserve), "keepRecentTokens": int(kept)}:
            assert reserve == reply + 4096, "pi keeps that many free besides the reply"
            assert 4 * kept <= window // 2, "pi takes four characters for a token"
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize(
    ("window", "most", "limit"),
    [
        (196_608, 196_608, 32_000),
        (131_072, 131_072, 32_000),
        (131_072, 4096, 4096),
        (40_960, 40_960, 10_240),
        (3, 3, 1),
    ],
)
def test_a_reply_is_at_most_a_quarter_of_the_window(window, most, limit):
    assert reply_limit(window, most) == limit


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), ["http://127.0.0.1:4000", "http://127.0.0.1:8080"]),
        (settings_of(proxy_is_on=False), ["http://127.0.0.1:8080"]),
        (settings_of(proxy_port=4001, server_port=81), ["http://127.0.0.1:4001", "http://127.0.0.1:81"]),
        (settings_of(proxy_is_on=False, server_host="0.0.0.0"), ["http://127.0.0.1:8080"]),
        (settings_of(proxy_is_on=False, server_host="::"), ["http://[::1]:8080"]),
        (settings_of(proxy_is_on=False, server_host="10.0.0.7"), ["http://10.0.0.7:8080"]),
    ],
)
def test_the_settings_say_where_the_server_is(settings, expected):
    assert addresses(settings) == [Address(url, NO_KEY) for url in expected]


OWN, PROXY = "http://127.0.0.1:8080", "http://127.0.0.1:4000"


@pytest.mark.parametrize(
    ("keys", "own", "proxy"),
    [
        ({"proxy_keys": ("p", "q")}, NO_KEY, "p"),
        ({"access_keys": ("k", "l")}, "k", "k"),
        ({"access_keys": ("k",), "proxy_keys": ("p",)}, "k", "p"),
    ],
)
def test_each_port_is_sent_its_own_key(keys, own, proxy):
    settings = settings_of(**keys)
    assert addresses(settings) == [Address(PROXY, proxy), Address(OWN, own)]
    assert address_at("http://localhost:8080/v1/", settings) == Address("http://localhost:8080", own)
    assert address_at("http://localhost:4000", settings) == Address("http://localhost:4000", proxy)
    assert address_at("https://far.example", settings) == Address("https://far.example", proxy)


@pytest.mark.parametrize("name", CLIENTS)
def test_the_server_knows_each_client_by_a_name_of_its_own(name: str):
    programs = CLIENTS[name].programs
    assert programs
    assert all(client_name({"user-agent": f"{program}/1.2"}) == program for program in programs)
    others = {program for other, client in CLIENTS.items() if other != name for program in client.programs}
    assert not others.intersection(programs)
