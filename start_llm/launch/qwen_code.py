"""Qwen Code: its variables, its settings, and what makes it ask."""

from pathlib import Path

from start_llm.core.chat import Json
from start_llm.launch.client import IDLE_MS, KEY_VARIABLE, Client, Environment, Files, OwnPrompt
from start_llm.launch.files import Joined
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.permissions import Permissions, table, texts
from start_llm.launch.server_info import OfferedModel, ServerInfo

_CONFINES = ("core", "executionSandbox", "sandbox", "sandboxImage")
"""Settings of `tools` that can only take something away from the model."""
_FORBIDS = ("disabled", "exclude")


def _environment(served: ServerInfo, folder: Path) -> Environment:
    return {
        "QWEN_HOME": str(folder),
        "QWEN_RUNTIME_DIR": str(folder),
        KEY_VARIABLE: served.key,
        "QWEN_STREAM_MAX_LIFETIME_MS": str(IDLE_MS),
    }


def _files(served: ServerInfo, _folder: Path) -> Files:
    """Return the files. Memories, skills and guesses at the next question would be requests of their own."""
    models: Json = [_model(served, model) for model in served.models]
    return {
        "settings.json": {
            "$version": 4,
            "security": {"auth": {"selectedType": "openai"}},
            "modelProviders": {"openai": models},
            "model": {"name": served.model},
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
    }


def _model(served: ServerInfo, model: OfferedModel) -> Json:
    return {
        "id": model.name,
        "name": model.name,
        "envKey": KEY_VARIABLE,
        "baseUrl": f"{served.url}/v1",
        "generationConfig": {
            "contextWindowSize": model.window,
            "modalities": {"image": model.sees},
            "samplingParams": {"max_tokens": model.reply},
            "streamIdleTimeoutMs": IDLE_MS,
            "timeout": IDLE_MS,
        },
    }


def _permissions(own: OwnSettings, _folder: Path) -> Permissions:
    """Return the mode that asks.

    The default is a mode in which the model itself judges what may run. Settings of a project, which could
    change the mode, are read only in folders that the user trusts.
    """
    place = own.place("QWEN_HOME", ".qwen")
    theirs = own.read(place / "settings.json")
    own_tools, rules = table(theirs, "tools"), table(theirs, "permissions")
    tools: dict[str, Json] = {name: own_tools[name] for name in _CONFINES if own_tools.get(name)}
    tools["approvalMode"] = "plan" if own_tools.get("approvalMode") == "plan" else "default"
    tools |= {name: Joined(listed) for name in _FORBIDS if (listed := texts(own_tools.get(name)))}
    permissions: dict[str, Json] = {
        name: Joined(listed) for name in ("deny", "ask") if (listed := texts(rules.get(name)))
    }
    settings: dict[str, Json] = {"tools": tools, "security": {"folderTrust": {"enabled": True}}}
    if permissions:
        settings["permissions"] = permissions
    notes = [f"The hooks in {place / 'settings.json'} do not run here."] if theirs.get("hooks") else []
    return Permissions(files={"settings.json": settings}, notes=notes)


QWEN = Client(
    command="qwen",
    install="npm install -g @qwen-code/qwen-code",
    environment=_environment,
    files=_files,
    permissions=_permissions,
    foreign=("QWEN_CODE_TRUSTED_FOLDERS_PATH",),
    own_place="~/.qwen/settings.json",
    programs=("QwenCode",),
    prompt=OwnPrompt(system=32_200, tools=39_300),
)
