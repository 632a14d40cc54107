"""The loaded models of a server, and what `model_host` and `model_switcher` know of the others."""

import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from start_llm.core.client_presence import LOOK_S
from start_llm.core.errors import Overloaded
from start_llm.core.model_card import ModelCard
from start_llm.hosting.model_memory import MemoryNeeds
from start_llm.hosting.model_runtime import ModelRuntime
from start_llm.server.status import Status


@dataclass(eq=False, slots=True)
class Resident:
    """A loaded model.

    Attributes:
        uses: requests that it is answering.
        last_used: seconds on the host's clock.
        is_leaving: it takes no more requests, and ends with those that it has.
    """

    runtime: ModelRuntime
    last_used: float
    uses: int = 0
    is_leaving: bool = False

    @property
    def takes_requests(self) -> bool:
        """False if it leaves, or if its engine has ended, so that it has to be loaded anew."""
        return not self.is_leaving and self.runtime.engine.is_alive()


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that could not be loaded, and the error that its requests get."""

    name: str
    message: str


@dataclass(frozen=True, slots=True)
class ModelChange:
    """A model that is being loaded or unloaded.

    Attributes:
        began: seconds on the host's clock.
    """

    name: str
    began: float


class ResidentModels:
    """The loaded models. Whoever reads or writes here holds `changed`, and notifies it.

    One model is loaded or unloaded at a time. The thread that does so has begun a change; it alone adds and
    removes models, so it need not hold `changed` to know which ones there are.

    Args:
        clock: returns seconds.

    Attributes:
        by_id: the models that are loaded.
        change: what is being loaded or unloaded; None if nothing is.
        waiting: requests that wait for a model, by its id.
        promised: ids of models that are loaded in their turn although nobody waits: clients were asked to
            come back.
        last_id: of the model that was loaded last, or was left as the default.
        last_status: of the model that has gone last.
        cards: of all models that were ever loaded.
        is_closing: nothing is loaded any more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.changed = threading.Condition()
        self.by_id: dict[str, Resident] = {}
        self.change: ModelChange | None = None
        self.waiting = Counter[str]()
        self.promised = set[str]()
        self.last_failure: LoadFailure | None = None
        self.last_id = ""
        self.last_status: Status | None = None
        self.cards: dict[str, ModelCard] = {}
        self.is_closing = False

    @property
    def by_use(self) -> list[str]:
        """The ids of the loaded models, the one that was used last first."""
        return sorted(self.by_id, key=lambda name: self.by_id[name].last_used, reverse=True)

    @property
    def default_id(self) -> str:
        """The id of the model that answers to unknown names: the one that was used last."""
        staying = (name for name in self.by_use if not self.by_id[name].is_leaving)
        return next(staying, next(iter(self.by_use), self.last_id))

    @property
    def needs(self) -> list[MemoryNeeds]:
        return [resident.runtime.needs for resident in self.by_id.values()]

    def begin_change(self, name: str) -> None:
        """Keep others from changing what is loaded, until `changing` ends."""
        self.change = ModelChange(name, self.clock())

    @contextmanager
    def changing(self) -> Generator[None]:
        """End the change with the block. Does not hold `changed` meanwhile."""
        try:
            yield
        finally:
            with self.changed:
                self.promised -= self.by_id.keys()
                self.change = None
                self.changed.notify_all()

    def use(self, resident: Resident) -> None:
        resident.uses += 1
        resident.last_used = self.clock()

    def release(self, resident: Resident) -> None:
        resident.uses -= 1
        resident.last_used = self.clock()
        self.changed.notify_all()

    def wait_for(self, name: str, end: float) -> None:
        """Wait for a moment, as one of those who wait for this model.

        Args:
            end: no longer than until then, in seconds of the host's clock.
        """
        self.waiting[name] += 1
        self.changed.wait(min(LOOK_S, max(end - self.clock(), 0)))
        self.waiting[name] -= 1

    def is_awaited(self, name: str) -> bool:
        return self.waiting[name] > 0 or name in self.promised

    def check_open(self) -> None:
        """Give up if the server stops.

        Raises:
            Overloaded: it does.
        """
        if self.is_closing:
            raise Overloaded("The server is stopping.")
