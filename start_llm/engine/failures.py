"""What fails with an error: a single request where it is known which one, and never the loop."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import mlx.core as mx

from start_llm.core.errors import StartLLMError
from start_llm.core.events import Failed
from start_llm.core.standard_error import print_traceback
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.generation import Generation
from start_llm.telemetry.metrics import EngineMetrics


@owned_by(ENGINE)
class Failures:
    """Requests that have failed, whose clients have not been notified yet.

    Args:
        abandon_everything: called when what should clean up after an error fails too.
    """

    def __init__(self, metrics: EngineMetrics, abandon_everything: Callable[[], None]) -> None:
        self._metrics = metrics
        self._abandon_everything = abandon_everything
        self._failed: list[Generation] = []

    @contextmanager
    def on_failure(self, abandon: Callable[[], None] = lambda: None) -> Generator[None]:
        """If the block raises, run `abandon`, and tell the requests that were added that they failed.

        The loop goes on. What nobody expected is printed.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a network raises, other requests must survive
            self._metrics.failures += 1
            if not isinstance(error, StartLLMError):
                print_traceback()
            try:
                abandon()
            except Exception:  # noqa: BLE001 - nothing that is here can be trusted; later requests must survive
                print_traceback()
                self._abandon_everything()
            self.tell(f"The engine failed: {type(error).__name__}: {error}")
            mx.clear_cache()

    def add(self, generations: Iterable[Generation]) -> None:
        self._failed += generations

    def take_back(self, generation: Generation) -> None:
        """Note that a request goes on after all."""
        self._failed.remove(generation)

    def tell(self, message: str) -> None:
        """Tell each request once."""
        for generation in dict.fromkeys(self._failed):
            generation.emit(Failed(message))
        self._failed.clear()
