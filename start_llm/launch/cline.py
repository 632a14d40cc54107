"""Cline's command line: its variables, its settings, and what makes it ask."""

from pathlib import Path

from start_llm.core.chat import Json
from start_llm.launch.client import IDLE_MS, Client, Environment, Files, OwnPrompt
from start_llm.launch.files import Joined
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.permissions import Permissions, texts
from start_llm.launch.server_info import OfferedModel, ServerInfo

_PROVIDER = "openai-compatible"
"""One that Cline has. It starts with its own service in place of a provider that it does not know."""
_ADVERTISEMENTS = ("cline-cli-cline-pass-intro", "cline-cli-desktop-launch", "cline-cli-zen")
"""They lie over the first screen, each until it has been shown once."""
_CHOSEN_AT = "2026-01-01T00:00:00.000Z"


def _environment(served: ServerInfo, folder: Path) -> Environment:
    return {
        "CLINE_DIR": str(folder),
        "CLINE_DATA_DIR": str(folder / "data"),
        "OPENAI_API_KEY": served.key,
        # Otherwise a process of its own stays behind, for conversations in the background.
        "CLINE_SESSION_BACKEND_MODE": "local",
    }


def _files(served: ServerInfo, _folder: Path) -> Files:
    settings: Json = {
        "provider": _PROVIDER,
        "model": served.model,
        "baseUrl": f"{served.url}/v1",
        "timeout": IDLE_MS,
        "headers": {"User-Agent": "cline"},
    }
    chosen: Json = {"settings": settings, "updatedAt": _CHOSEN_AT, "tokenSource": "manual"}
    models: Json = {model.name: _model(model) for model in served.models}
    return {
        "data/settings/providers.json": {
            "version": 1,
            "lastUsedProvider": _PROVIDER,
            "modes": {},
            "providers": {_PROVIDER: chosen},
        },
        "data/settings/models.json": {"version": 1, "providers": {_PROVIDER: {"models": models}}},
        "data/settings/global-settings.json": {"telemetryOptOut": True, "autoUpdateEnabled": False},
        "data/settings/cli-notices.json": {"shown": dict.fromkeys(_ADVERTISEMENTS, True)},
    }


def _model(model: OfferedModel) -> Json:
    return {
        "id": model.name,
        "name": model.name,
        "contextWindow": model.window,
        "maxTokens": model.reply,
        "capabilities": ["tools", "streaming", "reasoning", *(["images"] if model.sees else [])],
    }


def _permissions(own: OwnSettings, _folder: Path) -> Permissions:
    """Return settings with which Cline asks before each tool that acts. By default it does not."""
    data = own.place("CLINE_DATA_DIR", str(own.place("CLINE_DIR", ".cline") / "data"))
    theirs = own.read(data / "settings" / "global-settings.json")
    settings: dict[str, Json] = {"toolAutoApprove": False}
    if theirs.get("planActMode") == "plan":
        settings["planActMode"] = "plan"
    if disabled := texts(theirs.get("disabledTools")):
        settings["disabledTools"] = Joined(disabled)
    return Permissions(files={"data/settings/global-settings.json": settings})


CLINE = Client(
    command="cline",
    install="npm install -g cline",
    environment=_environment,
    files=_files,
    permissions=_permissions,
    foreign=(
        "CLINE_DB_DATA_DIR",
        "CLINE_GLOBAL_SETTINGS_PATH",
        "CLINE_MODEL",
        "CLINE_PROVIDER",
        "CLINE_PROVIDER_SETTINGS_PATH",
        "CLINE_SESSION_DATA_DIR",
    ),
    own_place="~/.cline/data/settings/",
    programs=("cline",),
    prompt=OwnPrompt(system=4_300, tools=18_100),
)
