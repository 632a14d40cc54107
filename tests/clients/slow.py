"""A server that reads prompts as slowly as a test wants.

python -m tests.clients.slow serve ...       never fast
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import start_llm.app
from start_llm.app import App, EngineStartup
from start_llm.cli import main
from start_llm.config.settings import Settings
from start_llm.engine.engine import Engine
from start_llm.telemetry.terminal import Terminal
from tests.engine.harness import Wrapped

_CHUNK_S = 1.0


class Brake:
    """Makes every chunk of a prompt take a second while it is on; the engine then takes four tokens at once.

    Args:
        is_on: from the start.
    """

    def __init__(self, *, is_on: bool = False) -> None:
        self._until = float("inf") if is_on else 0.0

    def on(self) -> None:
        self._until = float("inf")

    def off(self, in_s: float = 0) -> None:
        self._until = time.monotonic() + in_s

    def app(self, settings: Settings, terminal: Terminal) -> App:
        """A server that has it."""
        return _BrakedApp(self, settings, terminal)

    def before(self, shape: tuple[int, ...]) -> None:
        if shape[1] > 1 and time.monotonic() < self._until:
            time.sleep(_CHUNK_S)


class _BrakedApp(App):
    def __init__(self, brake: Brake, settings: Settings, terminal: Terminal) -> None:
        super().__init__(settings, terminal)
        self._brake = brake

    def _load(self, folder: Path) -> tuple[Engine, EngineStartup]:
        engine, ready = super()._load(folder)
        network: Any = ready.model.network
        network.model = Wrapped(network.model, self._brake.before)
        return engine, ready


if __name__ == "__main__":
    start_llm.app.App = Brake(is_on=True).app  # pyright: ignore[reportAttributeAccessIssue] - of its type
    sys.exit(main())
