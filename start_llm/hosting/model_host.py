"""Loads models when requests name them, and lets them go when memory is short or nobody uses them.

A model stays loaded beside another one if both keep room for a prompt of their whole context window. If they
do not, the one that was used the longest time ago goes, once it has answered its requests; its pages are
written to the disk tier first, if there is one, and are found again when it comes back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from start_llm.core.client_presence import LOOK_S, check_client, client_watched, work_for_all
from start_llm.core.errors import (
    ClientGone,
    InternalError,
    ModelError,
    NotFound,
    Overloaded,
    RequestError,
    StartupError,
)
from start_llm.hosting.model_runtime import (
    MemoryNeeds,
    ModelRuntime,
    SharedParts,
    estimated_needs,
    start_model,
    together,
)
from start_llm.hosting.resident_models import LoadFailure, LoadUnderWay, Resident
from start_llm.library.folders import check_loadable
from start_llm.models.trial import TemplateTrials
from start_llm.models.weight_files import weights_size
from start_llm.server.served_models import ListedModel, ServedModel
from start_llm.server.status import ModelCard, Status
from start_llm.wiring.memory_plan import memory_budget, usable_share

_STOP_S = 30.0
"""Seconds for the last step of a model that is unloaded; nobody waits for its replies then."""


_SLOWEST_DISK = 20e6
"""Bytes of weights a second."""
_RETRY_S = 10


class ModelHost:
    """The models of a server. Safe to use from any thread; implements `server.served_models.ServedModels`.

    One model is loaded or unloaded at a time. Requests for others go on meanwhile. A model is loaded on a
    thread of its own while the requests for it wait, so that each of them can give up.

    Args:
        folders: of all models, by id.
        aliases: other names of models, to their ids.
        clock: returns seconds.

    Attributes:
        started_at: seconds since 1970.
    """

    def __init__(
        self,
        shared: SharedParts,
        folders: Mapping[str, Path],
        aliases: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._folders = dict(folders)
        self._settings = shared.settings.model
        self._aliases = aliases
        self._clock = clock
        self._trials = TemplateTrials()
        self._changed = threading.Condition()
        self._residents: dict[str, Resident] = {}
        self._changing: str | None = None
        self._change_began = 0.0
        self._loading: LoadUnderWay | None = None
        self._waiting = Counter[str]()
        self._promised = set[str]()
        self._last_id = ""
        self._last_status: Status | None = None
        self._cards: dict[str, ModelCard] = {}
        self._last_failure: LoadFailure | None = None
        self._is_closing = False
        self._reaper: threading.Timer | None = None
        self.started_at = int(time.time())

    # -------------------------------------------------------------------------------------------------- using

    @property
    def default(self) -> ServedModel:
        return self.runtime.served

    @property
    def status(self) -> Status:
        with self._changed:
            if resident := self._residents.get(self._default_id()):
                return resident.runtime.served.status
            if self._last_status is None:
                raise Overloaded("A model is being loaded; try again in a moment.")
            return self._last_status

    @property
    def runtime(self) -> ModelRuntime:
        """The loaded model that was used last.

        Raises:
            Overloaded: one has gone, and another one is being loaded in its place.
        """
        with self._changed:
            if not self._residents:
                raise Overloaded("No model is loaded now; a request loads one.")
            return self._residents[self._default_id()].runtime

    def _default_id(self) -> str:
        """Return the id of the model that answers to unknown names: the one that was used last."""

        def last_use(name: str) -> tuple[bool, float]:
            return not self._residents[name].is_leaving, self._residents[name].last_used

        return max(self._residents, key=last_use, default=self._last_id)

    @property
    def loaded(self) -> list[tuple[str, Path]]:
        """Names and folders of the loaded models, the one that was used last first."""
        with self._changed:
            names = sorted(self._residents, key=lambda one: self._residents[one].last_used, reverse=True)
            return [(name, self._folders[name]) for name in names]

    @contextmanager
    def lease(self, name: object, patience_s: float = math.inf) -> Generator[ServedModel]:
        resident = self._take(name, patience_s)
        try:
            yield resident.runtime.served
        finally:
            with self._changed:
                resident.uses -= 1
                resident.last_used = self._clock()
                self._changed.notify_all()

    def peek(self, name: object) -> ServedModel | None:
        with self._changed:
            resident = self._resident(name)
            return resident.runtime.served if resident else None

    def knows(self, name: str) -> bool:
        return self._id(name) is not None

    def loading_progress(self) -> str:
        with self._changed:
            return f"the model is being loaded, for {self._clock() - self._change_began:.0f} s so far"

    def must_wait(self, name: object) -> bool:
        with self._changed:
            resident = self._resident(name)
            return resident is None or resident.is_leaving

    def answering(self, name: object) -> str:
        with self._changed:
            return self._answering(name)

    def _answering(self, name: object) -> str:
        return self._id(name) or self._default_id()

    def _resident(self, name: object) -> Resident | None:
        """Return the resident that answers to this name; None if it is not loaded."""
        return self._residents.get(self._answering(name))

    def _take(self, name: object, patience_s: float) -> Resident:
        with self._changed:
            if self._settings.strict_names and isinstance(name, str):
                self._known_id(name)
            earlier, end = self._last_failure, self._clock() + patience_s
            while True:
                wanted = self._answering(name)
                resident = self._residents.get(wanted)
                if resident and not resident.is_leaving:
                    resident.uses += 1
                    resident.last_used = self._clock()
                    return resident
                if self._is_closing:
                    raise Overloaded("The server is stopping.")
                failure = self._last_failure
                if failure is not None and failure is not earlier and failure.name == wanted:
                    raise InternalError(failure.message)  # it was tried while this request waited
                check_client()
                if self._clock() > end:
                    raise self._late(wanted)
                if self._changing is None:
                    self._begin_loading(wanted)
                self._wait_for(wanted)

    def _wait_for(self, name: str) -> None:
        """Wait for a moment, as one of those who wait for this model."""
        self._waiting[name] += 1
        self._changed.wait(LOOK_S)
        self._waiting[name] -= 1

    def _late(self, name: str) -> Overloaded:
        """Return what a request is told whose model is not there yet. It is loaded all the same."""
        self._promised.add(name)
        return Overloaded(
            f"The model {name!r} is still being loaded. Ask again in a moment, or stream the reply.",
            retry_after_s=_RETRY_S,
        )

    def _id(self, name: object) -> str | None:
        """Return the id of the model that has this name; None if none has it."""
        found = self._aliases.get(name, name) if isinstance(name, str) else None
        return found if found in self._folders else None

    def listed(self) -> Sequence[ListedModel]:
        with self._changed:
            first = [name for name, _ in self.loaded]
            others = sorted(set(self._folders) - set(first), key=lambda name: (name != self._last_id, name))
            return [self._listed(name) for name in (*first, *others)]

    def stuck_reason(self) -> str:
        with self._changed:
            taken_s = self._clock() - self._loading.began if self._loading else 0.0
            if self._loading and taken_s > self._loading.patience_s:
                return f"{self._loading.name} has been loading for {taken_s:.0f} s"
            told = (one.runtime.served.status.stuck_reason() for one in self._residents.values())
            return next((reason for reason in told if reason), "")

    def _listed(self, name: str) -> ListedModel:
        aliases = tuple(alias for alias, model in self._aliases.items() if model == name)
        resident = self._residents.get(name)
        if resident is None:
            state = "loading" if self._changing == name else "available"
            return ListedModel(id=name, state=state, aliases=aliases, card=self._cards.get(name))
        status = resident.runtime.served.status
        return ListedModel(
            id=name,
            state="loaded",
            card=status.card,
            in_flight=resident.uses,
            aliases=aliases,
            status=status,
        )

    # ------------------------------------------------------------------------------------- loading, unloading

    def load(self, name: str) -> None:
        with self.lease(self._known_id(name)):
            pass

    def unload(self, name: str) -> None:
        name = self._known_id(name)
        with self._changed:
            self._changed.wait_for(lambda: self._changing is None or self._is_closing)
            if name in self._residents:
                with self._change(name):
                    self._unload(name)

    def _known_id(self, name: str) -> str:
        found = self._id(name)
        if found is None:
            raise NotFound(f"There is no model {name!r}; there is {', '.join(self._folders)}.", param="model")
        return found

    @contextmanager
    def _change(self, name: str) -> Generator[None]:
        """Keep others from changing what is loaded. Holds the lock at both ends."""
        self._changing, self._change_began = name, self._clock()
        try:
            yield
        finally:
            self._changing = None
            self._changed.notify_all()

    def _begin_loading(self, name: str) -> None:
        """Load a model on a thread of its own. It is given up once nobody waits for it any more."""
        self._changing, self._change_began = name, self._clock()
        threading.Thread(target=self._load_for_requests, args=(name,), name="load", daemon=True).start()

    def _load_for_requests(self, name: str) -> None:
        with self._changed, client_watched(lambda: not (self._waiting[name] or name in self._promised)):
            try:
                self._bring(name)
            except (ClientGone, RequestError):
                pass  # those who wait find the reason in `_last_failure`, or that the server stops
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                self._last_failure = LoadFailure(name, f"The model {name!r} cannot be loaded. {reason}")
                raise
            finally:
                self._promised.discard(name)

    def _bring(self, name: str) -> None:
        """Load a model, after those are gone that it cannot stand beside. Holds the lock at both ends.

        Raises:
            RequestError: it cannot be loaded. If no other one is left, the last one is loaded again.
        """
        before = self._default_id() if self._residents else None
        with self._change(name):
            reason = self._reason_not_to_load(name)
            if reason is None:
                return
            if before and not self._residents and (again := self._reason_not_to_load(before)):
                self._shared.terminal.say(f"The model {before!r} cannot be loaded again. {again}")
            failure = self._last_failure = LoadFailure(name, f"The model {name!r} cannot be loaded. {reason}")
        raise InternalError(failure.message)

    def _reason_not_to_load(self, name: str) -> str | None:
        """Load a model after making room for it, or return why it cannot be loaded."""
        try:
            self._look_over(self._folders[name])
            self._make_room(name)
            self._load(name)
        except StartupError as error:
            reason = str(error)
        else:
            return None
        # Only now: the traceback of the error leads to the parts of the model that were loaded.
        self._shared.thread.collect()
        return reason

    def _look_over(self, folder: Path) -> None:
        """Look for what would hang or fill this process, or fail. Holds the lock at both ends, not between.

        Raises:
            StartupError: the model is not to be loaded.
        """
        self._changed.release()
        try:
            check_loadable(folder)
            self._trials.check(folder)
        finally:
            self._changed.acquire()

    def start(self, name: str) -> None:
        """Load the first model.

        Raises:
            StartupError: it cannot be loaded.
        """
        with self._changed, self._change(name):
            self._look_over(self._folders[name])
            self._load(name)

    def _load(self, name: str) -> None:
        others = [resident.runtime.needs for resident in self._residents.values()]
        slowest_s = weights_size(self._folders[name]) / _SLOWEST_DISK
        self._loading = LoadUnderWay(
            name, self._clock(), self._shared.settings.engine.load_stall_s + slowest_s
        )
        self._changed.release()
        try:
            with work_for_all():
                runtime = start_model(self._shared, name, self._folders[name], others)
        except InternalError as error:
            raise ModelError(f"The model {name!r} cannot be tried. {error}") from error
        finally:
            self._changed.acquire()
            self._loading = None
        self._residents[name] = Resident(runtime, self._clock())
        self._last_id, self._cards[name] = name, runtime.card
        self._shared.prometheus.models.attach(name, runtime.metrics)
        if others:
            self._divide_memory()

    def _unload(self, name: str) -> None:
        """Unload a model once it has answered its requests."""
        self._end(self._residents[name])
        self._last_id = self._default_id()
        self._last_status = self._residents[name].runtime.served.status.unloaded()
        del self._residents[name]
        self._shared.prometheus.models.detach(name)
        self._shared.thread.collect()
        self._divide_memory()
        self._shared.terminal.say(f"Unloaded {name}.")

    def _end(self, resident: Resident) -> None:
        resident.is_leaving = True
        while resident.uses and not self._is_closing:
            self._changed.wait(LOOK_S)
            try:
                check_client()
            except ClientGone:
                resident.is_leaving = False  # nobody waits for its room any more
                raise
        if self._is_closing:
            raise Overloaded("The server is stopping.")
        self._changed.release()
        try:
            resident.runtime.stop(_STOP_S, self._shared.settings.server.drain_s)
            resident.runtime.close_database()
        finally:
            self._changed.acquire()

    # ------------------------------------------------------------------------------------------------- memory

    def _make_room(self, name: str) -> None:
        """Unload models until this one fits beside those that are left.

        Raises:
            StartupError: it does not fit beside the pinned ones. Then none is unloaded.
        """
        if not self._residents:
            return
        needed = estimated_needs(name, self._folders[name], self._shared.settings)
        pinned = [one for one in self._residents if one in self._settings.pinned]
        if pinned and not self._fits(needed, pinned):
            raise StartupError(f"It does not fit beside the pinned models: {', '.join(pinned)}.")
        while self._residents and not self._fits(needed, self._residents):
            victims = [one for one in self._residents if one not in pinned]
            self._unload(min(victims, key=lambda one: self._residents[one].last_used))

    def _fits(self, needed: MemoryNeeds, names: Collection[str]) -> bool:
        """Return whether another model fits beside these."""
        if 0 < self._settings.max_loaded <= len(names):
            return False
        return self._spare([*(self._residents[name].runtime.needs for name in names), needed]) >= 0

    @property
    def spare_bytes(self) -> int:
        with self._changed:
            return self._spare([resident.runtime.needs for resident in self._residents.values()])

    def _spare(self, needs: Sequence[MemoryNeeds]) -> int:
        """Return the bytes that are left beside models with these needs; below 0: they miss."""
        return usable_share(memory_budget(self._shared.settings)) - together(needs)

    def divide_memory(self) -> None:
        with self._changed:
            self._divide_memory()

    def _divide_memory(self) -> None:
        """Give each model room for a prompt of its whole window, and a share of what is left."""
        runtimes = [resident.runtime for resident in self._residents.values()]
        spare = max(self._spare([one.needs for one in runtimes]), 0)
        for one in runtimes:
            one.share_memory(one.needs.window_bytes + spare // len(runtimes))

    # -------------------------------------------------------------------------------------------- idle models

    def begin_unloading_idle(self) -> None:
        """From now on models go that nobody uses, if there is a limit. Until then the first one stays."""
        self._reap_later()

    def _reap_later(self) -> None:
        if self._settings.idle_s:
            self._reaper = threading.Timer(max(self._settings.idle_s / 10, 0.05), self._reap)
            self._reaper.daemon = True
            self._reaper.start()

    def _reap(self) -> None:
        """Unload a model that nobody has used for a while. The next request for it loads it again."""
        with self._changed:
            oldest = self._clock() - self._settings.idle_s
            idle = [
                name
                for name, resident in self._residents.items()
                if not resident.uses and resident.last_used < oldest and name not in self._settings.pinned
            ]
            if idle and self._changing is None and not self._is_closing:
                name = min(idle, key=lambda one: self._residents[one].last_used)
                with self._change(name):
                    self._unload(name)
            if not self._is_closing:
                self._reap_later()

    def stop(self, timeout_s: float, flush_s: float) -> bool:
        """Stop all models. False if one is still computing.

        Args:
            flush_s: seconds for writing pages to the disk.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            if self._reaper:
                self._reaper.cancel()
            self._changed.wait_for(
                lambda: self._changing is None, timeout_s
            )  # it would be loaded behind this
            residents = list(self._residents.values())
        have_stopped = [resident.runtime.stop(timeout_s, flush_s) for resident in residents]  # each of them
        return all(have_stopped)

    def close_databases(self) -> None:
        with self._changed:
            for resident in self._residents.values():
                resident.runtime.close_database()
