"""A server that reads prompts as slowly as a test wants.

python -m tests.clients.slow serve ...       never fast
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import start_llm.app
from start_llm.app import App
from start_llm.cli import main
from start_llm.config.settings import Settings
from start_llm.engine.resources import EngineResources
from start_llm.ranks.leader import Leader
from start_llm.telemetry.terminal import Terminal
from tests.engine.harness import Wrapped

_CHUNK_S = 1.0
_CHUNK_TOKENS = 4


class Brake:
    """Makes every chunk of a prompt take a second and have at most four tokens while it is on.

    Args:
        is_on: from the start.
    """

    def __init__(self, *, is_on: bool = False) -> None:
        self._until = float("inf") if is_on else 0.0

    def on(self) -> None:
        self._until = float("inf")

    def off(self, in_s: float = 0) -> None:
        self._until = time.monotonic() + in_s

    def app(self, settings: Settings, terminal: Terminal, leader: Leader | None = None) -> App:
        """A server that has it."""
        return _BrakedApp(self, settings, terminal, leader)

    @property
    def _is_on(self) -> bool:
        return time.monotonic() < self._until

    def before(self, shape: tuple[int, ...]) -> None:
        if shape[1] > 1 and self._is_on:
            time.sleep(_CHUNK_S)

    def resources(self, *, longest_chunk: Callable[[int], int], **parts: Any) -> EngineResources:
        """Those of an engine whose chunks are short while it is on."""

        def longest(tokens: int) -> int:
            allowed = longest_chunk(tokens)
            return min(allowed, _CHUNK_TOKENS) if self._is_on else allowed

        return EngineResources(longest_chunk=longest, **parts)


class _BrakedApp(App):
    def __init__(self, brake: Brake, settings: Settings, terminal: Terminal, leader: Leader | None) -> None:
        super().__init__(settings, terminal, leader)
        self._brake = brake

    def start(self) -> None:
        with patch("start_llm.hosting.model_loading.EngineResources", self._brake.resources):
            super().start()
        network: Any = self.runtime.startup.model.network
        network.model = Wrapped(network.model, self._brake.before)


if __name__ == "__main__":
    start_llm.app.App = Brake(is_on=True).app  # pyright: ignore[reportAttributeAccessIssue] - of its type
    sys.exit(main())
