"""The models that requests can name: loads them when requests do so, and says what there is.

A model stays loaded beside another one if both keep room for a prompt of their whole context window. If they
do not, the one that was used the longest time ago goes, once it has answered its requests; its pages are
written to the disk tier first, if there is one, and are found again when it comes back.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from start_llm.core.client_presence import check_client
from start_llm.core.errors import InternalError, NotFound, Overloaded
from start_llm.hosting.model_runtime import ModelRuntime
from start_llm.hosting.model_switcher import ModelSwitcher
from start_llm.hosting.resident_models import Resident, ResidentModels
from start_llm.hosting.shared_parts import SharedParts
from start_llm.server.served_models import ListedModel, ServedModel
from start_llm.server.status import Status

_RETRY_S = 10


class ModelHost:
    """The models of a server. Safe to use from any thread; implements `server.served_models.ServedModels`.

    Args:
        folders: of all models, by id.
        aliases: other names of models, to their ids.
        clock: returns seconds.

    Attributes:
        switcher: loads and unloads them.
        started_at: seconds since 1970.
    """

    def __init__(
        self,
        shared: SharedParts,
        folders: Mapping[str, Path],
        aliases: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = dict(folders)
        self._settings, self._aliases = shared.settings.model, aliases
        self._residents = ResidentModels(clock)
        self.switcher = ModelSwitcher(shared, self._folders, self._residents)
        self.started_at = int(time.time())

    # -------------------------------------------------------------------------------------------------- using

    @property
    def status(self) -> Status:
        with self._residents.changed:
            if resident := self._residents.by_id.get(self._residents.default_id):
                return resident.runtime.status
            if self._residents.last_status is None:
                raise Overloaded("A model is being loaded; try again in a moment.")
            return self._residents.last_status

    @property
    def default(self) -> ModelRuntime:
        with self._residents.changed:
            if not self._residents.by_id:
                raise Overloaded("No model is loaded now; a request loads one.")
            return self._residents.by_id[self._residents.default_id].runtime

    @contextmanager
    def lease(self, name: object, patience_s: float = math.inf) -> Generator[ServedModel]:
        resident = self._take(name, patience_s)
        with self._releasing(resident):
            yield resident.runtime

    @contextmanager
    def lease_if_loaded(self, name: object) -> Generator[ServedModel | None]:
        resident = self._take_loaded(name)
        if resident is None:
            yield None
            return
        with self._releasing(resident):
            yield resident.runtime

    @contextmanager
    def _releasing(self, resident: Resident) -> Generator[None]:
        try:
            yield
        finally:
            with self._residents.changed:
                self._residents.release(resident)

    def _take_loaded(self, name: object) -> Resident | None:
        with self._residents.changed:
            self._check_name(name)
            resident = self._resident(name)
            if resident is None or not resident.takes_requests:
                return None
            self._residents.use(resident)
            return resident

    def _take(self, name: object, patience_s: float) -> Resident:
        residents = self._residents
        with residents.changed:
            self._check_name(name)
            earlier, end = residents.last_failure, residents.clock() + patience_s
            while (resident := self._resident(name)) is None or not resident.takes_requests:
                wanted = self._answering(name)
                residents.check_open()
                failure = residents.last_failure
                if failure is not None and failure is not earlier and failure.name == wanted:
                    raise InternalError(failure.message)  # it was tried while this request waited
                check_client()
                if residents.change is None:
                    self.switcher.begin_loading(wanted)
                if residents.clock() > end:
                    raise self._late(wanted)
                residents.wait_for(wanted, end)
            residents.use(resident)
            return resident

    def _check_name(self, name: object) -> None:
        if self._settings.strict_names and isinstance(name, str):
            self._known_id(name)

    def _late(self, name: str) -> Overloaded:
        """Return the error for a request whose model is not loaded yet. It is loaded all the same."""
        self._residents.promised.add(name)
        return Overloaded(
            f"The model {name!r} is still being loaded. Ask again in a moment, or stream the reply.",
            retry_after_s=_RETRY_S,
        )

    def load(self, name: str) -> None:
        with self.lease(self._known_id(name)):
            pass

    def unload(self, name: str) -> None:
        self.switcher.unload(self._known_id(name))

    @property
    def spare_bytes(self) -> int:
        return self.switcher.spare_bytes

    def divide_memory(self) -> None:
        self.switcher.divide_memory()

    # -------------------------------------------------------------------------------------------------- names

    def peek(self, name: object) -> ServedModel | None:
        with self._residents.changed:
            resident = self._resident(name)
            return resident.runtime if resident else None

    def knows(self, name: str) -> bool:
        return self._id(name) is not None

    def answering(self, name: object) -> str:
        with self._residents.changed:
            return self._answering(name)

    def _answering(self, name: object) -> str:
        return self._id(name) or self._residents.default_id

    def _resident(self, name: object) -> Resident | None:
        """Return the resident that answers to this name; None if it is not loaded."""
        return self._residents.by_id.get(self._answering(name))

    def _id(self, name: object) -> str | None:
        """Return the id of the model that has this name; None if none has it."""
        model_id = self._aliases.get(name, name) if isinstance(name, str) else None
        return model_id if model_id in self._folders else None

    def _known_id(self, name: str) -> str:
        model_id = self._id(name)
        if model_id is None:
            raise NotFound(f"There is no model {name!r}; there is {', '.join(self._folders)}.", param="model")
        return model_id

    # ------------------------------------------------------------------------------------------ what there is

    @property
    def loaded(self) -> list[tuple[str, Path]]:
        """Names and folders of the loaded models, the one that was used last first."""
        with self._residents.changed:
            return [(name, self._folders[name]) for name in self._residents.by_use]

    def loading_progress(self, name: str) -> str:
        with self._residents.changed:
            change, now = self._residents.change, self._residents.clock()
            taken_s = now - change.began if change else 0.0
            if change and change.name != name:
                return f"the model waits until another one is loaded or unloaded, for {taken_s:.0f} s so far"
            return f"the model is being loaded, for {taken_s:.0f} s so far"

    def stuck_reason(self) -> str:
        with self._residents.changed:
            statuses = [resident.runtime.status for resident in self._residents.by_id.values()]
        reasons = (self.switcher.stuck_reason(), *(status.stuck_reason() for status in statuses))
        return next(filter(None, reasons), "")

    def listed(self) -> Sequence[ListedModel]:
        with self._residents.changed:
            first, last_id = self._residents.by_use, self._residents.last_id
            others = sorted(set(self._folders) - set(first), key=lambda name: (name != last_id, name))
            return [self._listed(name) for name in (*first, *others)]

    def _listed(self, name: str) -> ListedModel:
        aliases = tuple(alias for alias, model in self._aliases.items() if model == name)
        resident, change = self._residents.by_id.get(name), self._residents.change
        if resident is None:
            state = "loading" if change and change.name == name else "available"
            card = self._residents.cards.get(name)
            return ListedModel(id=name, state=state, aliases=aliases, card=card)
        status = resident.runtime.status
        return ListedModel(
            id=name,
            state="loaded",
            card=status.card,
            in_flight=resident.uses,
            aliases=aliases,
            status=status,
        )
