"""The texts that tell systemd and launchd how to run the server."""

from __future__ import annotations

import plistlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LABEL = "local.start_llm"
_BETWEEN_STARTS_S = 10
_AGAIN = "END_WHEN_STUCK"
"""The setting with which a server ends that cannot go on; the manager then starts it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """How a service runs the server.

    Attributes:
        words: the program and its arguments.
        folder: where it runs.
        log: the file for what it prints, where the system keeps no log of its own.
        stop_s: seconds that it may take to end.
    """

    words: Sequence[str]
    folder: Path
    log: Path
    stop_s: float


def systemd_unit(command: ServiceCommand) -> str:
    """Return the unit file.

    A bad setting (status 2) is not tried again, and a server that was told to end at once (130, 143) has not
    failed. systemd expands variables in arguments, but not in the program's path.
    """
    program, *arguments = command.words
    return f"""\
[Unit]
Description=start_llm, a local LLM server for coding agents

[Service]
ExecStart={" ".join([_quoted(program), *(_quoted(word.replace("$", "$$")) for word in arguments)])}
WorkingDirectory={_escaped(str(command.folder))}
Environment={_AGAIN}=true
Restart=on-failure
RestartSec={_BETWEEN_STARTS_S}
RestartPreventExitStatus=2
SuccessExitStatus=130 143
TimeoutStopSec={command.stop_s:g}

[Install]
WantedBy=default.target
"""


def _quoted(word: str) -> str:
    text = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def launchd_plist(command: ServiceCommand) -> bytes:
    """Return the property list of an agent."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command.words),
            "WorkingDirectory": str(command.folder),
            "EnvironmentVariables": {_AGAIN: "true"},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _BETWEEN_STARTS_S,
            "ExitTimeOut": round(command.stop_s),
            "ProcessType": "Interactive",
            "StandardOutPath": str(command.log),
            "StandardErrorPath": str(command.log),
        }
    )
