"""Continue's command line: its variables, its configuration, and what makes it ask."""

from pathlib import Path

from start_llm.core.chat import PROGRAM_HEADER, Json
from start_llm.launch.client import KEY_VARIABLE, PROVIDER, Client, Environment, Files, OwnPrompt
from start_llm.launch.files import Joined
from start_llm.launch.own_settings import OwnSettings
from start_llm.launch.permissions import Permissions, texts
from start_llm.launch.server_info import OfferedModel, ServerInfo

_ACTING = ("Bash", "Edit", "MultiEdit", "Write", "Fetch")
"""Tools that change something or reach the network. Without a terminal, Continue would allow the first."""


def _environment(served: ServerInfo, folder: Path) -> Environment:
    return {
        "CONTINUE_GLOBAL_DIR": str(folder),
        KEY_VARIABLE: served.key,
        "CONTINUE_CLI_AUTO_UPDATED": "1",
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        "CONTINUE_METRICS_ENABLED": "0",
    }


def _files(served: ServerInfo, _folder: Path) -> Files:
    """Return the files. The empty one says that nobody has to be asked for a key of Anthropic's."""
    models: Json = [_model(served, model) for model in served.models]
    return {
        "config.yaml": {"name": PROVIDER, "version": "1.0.0", "schema": "v1", "models": models},
        ".onboarding_complete": "\n",
    }


def _model(served: ServerInfo, model: OfferedModel) -> Json:
    return {
        "name": model.name,
        "provider": "openai",
        "model": model.name,
        "apiBase": f"{served.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat"],
        "capabilities": ["tool_use", *(["image_input"] if model.sees else [])],
        # It sends its SDK's User-Agent, whatever this says of another one.
        "requestOptions": {"headers": {PROGRAM_HEADER: "continue"}},
        "defaultCompletionOptions": {"contextLength": model.window, "maxTokens": model.reply},
    }


def _permissions(own: OwnSettings, _folder: Path) -> Permissions:
    """Return rules that ask, also where Continue's own rules would not: without a terminal."""
    place = own.place("CONTINUE_GLOBAL_DIR", ".continue")
    theirs = own.read(place / "permissions.yaml")
    rules: dict[str, Json] = {"ask": Joined([*_ACTING, *texts(theirs.get("ask"))])}
    if excluded := texts(theirs.get("exclude")):
        rules["exclude"] = Joined(excluded)
    return Permissions(files={"permissions.yaml": rules})


CONTINUE = Client(
    command="cn",
    install="npm install -g @continuedev/cli",
    environment=_environment,
    files=_files,
    permissions=_permissions,
    foreign=("ANTHROPIC_API_KEY", "CONTINUE_API_BASE", "CONTINUE_USE_BEDROCK"),
    own_place="~/.continue/config.yaml",
    programs=("continue",),
    prompt=OwnPrompt(system=1_300, tools=6_200),
)
