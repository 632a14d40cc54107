"""Loads and unloads models: makes room, divides memory, and lets models go that nobody uses."""

import threading
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.client_presence import LOOK_S, check_client, client_watched, work_for_all
from start_llm.core.errors import (
    ClientGone,
    Conflict,
    InternalError,
    ModelError,
    Overloaded,
    StartupError,
)
from start_llm.hosting.model_memory import MemoryNeeds, estimated_needs, spare_bytes
from start_llm.hosting.model_runtime import start_model
from start_llm.hosting.resident_models import LoadFailure, Resident, ResidentModels
from start_llm.hosting.shared_parts import SharedParts
from start_llm.library.folders import check_loadable
from start_llm.models.trial import TemplateTrials
from start_llm.models.weight_files import weights_size

_STOP_S = 30.0
"""Seconds for the last step of a model that is unloaded; nobody waits for its replies then."""
_SLOWEST_DISK = 20e6
"""Bytes of weights a second."""
_SHORTEST_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """A model that is being loaded.

    Attributes:
        began: seconds on the host's clock.
        patience_s: after which it is stuck.
    """

    name: str
    began: float
    patience_s: float


class ModelSwitcher:
    """Loads and unloads models, one at a time. Requests for others go on meanwhile.

    A model is loaded on a thread of its own while the requests for it wait, so that each of them can give up.

    Args:
        folders: of all models, by id.
    """

    def __init__(self, shared: SharedParts, folders: Mapping[str, Path], residents: ResidentModels) -> None:
        self._shared = shared
        self._folders = folders
        self._settings = shared.settings.model
        self._residents = residents
        self._trials = TemplateTrials()
        self._loading: LoadUnderWay | None = None

    def load_first(self, name: str) -> None:
        """Load the first model.

        Raises:
            StartupError: it cannot be loaded.
        """
        with self._residents.changed:
            self._residents.begin_change(name)
        with self._residents.changing():
            self._look_over(self._folders[name])
            self._load(name)

    def begin_loading(self, name: str) -> None:
        """Load a model on a thread of its own. It is given up once nobody waits for it any more.

        Call it with the lock, and only while nothing changes.
        """
        self._residents.begin_change(name)
        threading.Thread(target=self._load_for_requests, args=(name,), name="load", daemon=True).start()

    def unload(self, name: str) -> None:
        """Unload a model, if it is loaded, once it has answered its requests.

        Raises:
            Overloaded: the server stops.
            InternalError: it does not end.
            ClientGone: nobody waits for it any more. It stays.
            Conflict: other ranks have it too.
        """
        if self._shared.ranks:
            raise Conflict("Several machines compute this model: it stays loaded.")
        residents = self._residents
        with residents.changed:
            while residents.change and not residents.is_closing:
                check_client()
                residents.changed.wait(LOOK_S)
            if name not in residents.by_id:
                return
            residents.check_open()
            residents.begin_change(name)
        try:
            with self._changing():
                self._unload(name)
        except ModelError as error:
            raise InternalError(str(error)) from error

    @contextmanager
    def _changing(self) -> Generator[None]:
        """End the change with the block. Then load the models that were promised to clients."""
        try:
            with self._residents.changing():
                yield
        finally:
            self._keep_promise()

    def _keep_promise(self) -> None:
        residents = self._residents
        with residents.changed:
            # Whoever has waited for a model that is there now takes it before it may have to go.
            residents.changed.wait_for(
                lambda: (+residents.waiting).keys().isdisjoint(residents.by_id), LOOK_S
            )
            if residents.promised and residents.change is None and not residents.is_closing:
                self.begin_loading(next(iter(residents.promised)))

    def stuck_reason(self) -> str:
        """Return why the loading of a model is stuck; empty if none is."""
        loading, now = self._loading, self._residents.clock()
        if loading is None or now - loading.began <= loading.patience_s:
            return ""
        return f"{loading.name} has been loading for {now - loading.began:.0f} s"

    # ------------------------------------------------------------------------------------------------ loading

    def _load_for_requests(self, name: str) -> None:
        with self._changing(), client_watched(lambda: not self._residents.is_awaited(name)):
            try:
                self._bring(name)
            except (ClientGone, Overloaded):
                pass  # nobody waits, or those who wait get the error of a server that stops
            except Exception as error:
                self._note_failure(name, f"{type(error).__name__}: {error}")
                raise

    def _bring(self, name: str) -> None:
        """Load a model, after those are gone that it cannot stand beside.

        If it cannot be loaded and no other one is left, the last one is loaded again.
        """
        with self._residents.changed:
            before = self._residents.default_id if self._residents.by_id else None
        reason = self._reason_not_to_load(name)
        if reason is None:
            return
        if before and not self._residents.by_id and (again := self._reason_not_to_load(before)):
            self._shared.terminal.say(f"The model {before!r} cannot be loaded again. {again}")
        self._note_failure(name, reason)

    def _note_failure(self, name: str, reason: str) -> None:
        with self._residents.changed:
            message = f"The model {name!r} cannot be loaded. {reason}"
            self._residents.last_failure = LoadFailure(name, message)
            self._residents.promised.discard(name)

    def _reason_not_to_load(self, name: str) -> str | None:
        """Load a model after making room for it, or return why it cannot be loaded."""
        try:
            if not self._shared.thread.is_alive():
                raise ModelError("The engine thread has ended; start the server again.")
            self._look_over(self._folders[name])
            if name in self._residents.by_id:  # it takes no more requests
                self._unload(name)
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
        """Look for what would hang or fill this process, or fail.

        Raises:
            StartupError: the model is not to be loaded.
        """
        check_loadable(folder)
        self._trials.check(folder)

    def _load(self, name: str) -> None:
        residents, others = self._residents, self._residents.needs
        patience_s = (
            self._shared.settings.engine.load_stall_s + weights_size(self._folders[name]) / _SLOWEST_DISK
        )
        self._loading = LoadUnderWay(name, residents.clock(), patience_s)
        try:
            with work_for_all():
                runtime = start_model(self._shared, name, self._folders[name], others)
        except InternalError as error:
            raise ModelError(f"The model {name!r} cannot be tried. {error}") from error
        finally:
            self._loading = None
        with residents.changed:
            residents.by_id[name] = Resident(runtime, residents.clock())
            residents.last_id, residents.cards[name] = name, runtime.card
        self._shared.prometheus.models.attach(name, runtime.status)
        if others:
            self.divide_memory()

    # ---------------------------------------------------------------------------------------------- unloading

    def _unload(self, name: str) -> None:
        """Unload a model once it has answered its requests."""
        self._end(self._residents.by_id[name])
        self._forget(name)
        self._shared.prometheus.models.detach(name)
        self._shared.thread.collect()
        self.divide_memory()
        self._shared.terminal.say(f"Unloaded {name}.")

    def _end(self, resident: Resident) -> None:
        """End a model once it has answered its requests.

        Raises:
            ModelError: it still computes. It takes no more requests, and is ended when there is need again.
        """
        self._wait_for_requests(resident)
        if not resident.runtime.stop(_STOP_S, self._shared.settings.server.drain_s):
            raise ModelError(f"{resident.runtime.card.id!r} does not end, so its memory is not free.")
        self._shared.conversations.leave(resident.runtime.conversations, _STOP_S)

    def _wait_for_requests(self, resident: Resident) -> None:
        """Let a model finish its requests, and no more begin."""
        with self._residents.changed:
            resident.is_leaving = True
            while resident.uses and not self._residents.is_closing:
                self._residents.changed.wait(LOOK_S)
                try:
                    check_client()
                except ClientGone:
                    resident.is_leaving = False  # nobody waits for its room any more
                    raise
            self._residents.check_open()

    def _forget(self, name: str) -> None:
        residents = self._residents
        with residents.changed:
            residents.last_id = residents.default_id
            residents.last_status = residents.by_id[name].runtime.status.unloaded()
            del residents.by_id[name]

    # ------------------------------------------------------------------------------------------------- memory

    def _make_room(self, name: str) -> None:
        """Unload models until this one fits beside those that are left.

        Raises:
            StartupError: it does not fit beside the pinned ones. Then none is unloaded.
        """
        residents = self._residents.by_id
        if not residents:
            return
        needed = estimated_needs(name, self._folders[name], self._shared.settings)
        pinned = [other for other in residents if other in self._settings.pinned]
        if pinned and not self._fits(needed, pinned):
            raise StartupError(f"It does not fit beside the pinned models: {', '.join(pinned)}.")
        while residents and not self._fits(needed, residents):
            victims = [other for other in residents if other not in pinned]
            self._unload(min(victims, key=lambda other: residents[other].last_used))

    def _fits(self, needed: MemoryNeeds, names: Collection[str]) -> bool:
        """Return whether another model fits beside these."""
        if 0 < self._settings.max_loaded <= len(names):
            return False
        others = [self._residents.by_id[name].runtime.needs for name in names]
        return spare_bytes(self._shared.settings, [*others, needed]) >= 0

    @property
    def spare_bytes(self) -> int:
        """The bytes that are left beside the loaded models; below 0: they miss."""
        with self._residents.changed:
            return spare_bytes(self._shared.settings, self._residents.needs)

    def divide_memory(self) -> None:
        """Give each model room for a prompt of its whole window, and a share of what is left."""
        with self._residents.changed:
            runtimes = [resident.runtime for resident in self._residents.by_id.values()]
            spare = max(spare_bytes(self._shared.settings, self._residents.needs), 0)
            for runtime in runtimes:
                runtime.share_memory(runtime.needs.window_bytes + spare // len(runtimes))

    # -------------------------------------------------------------------------------------------- idle models

    def begin_unloading_idle(self) -> None:
        """From now on models go that nobody uses, if there is a limit. Until then the first one stays."""
        if self._settings.idle_s:
            threading.Thread(target=self._unload_idle, name="idle models", daemon=True).start()

    def _unload_idle(self) -> None:
        """Unload each model that nobody has used for a while. The next request for it loads it again."""
        residents, look_s = self._residents, max(self._settings.idle_s / 10, _SHORTEST_LOOK_S)
        while True:
            with residents.changed:
                if residents.changed.wait_for(lambda: residents.is_closing, look_s):
                    return
                name = None if residents.change else self._longest_idle()
                if name is None:
                    continue
                residents.begin_change(name)
            with self._changing(), suppress(Overloaded, ModelError):
                self._unload(name)

    def _longest_idle(self) -> str | None:
        oldest = self._residents.clock() - self._settings.idle_s
        for name in reversed(self._residents.by_use):
            resident = self._residents.by_id[name]
            if not resident.uses and resident.last_used < oldest and name not in self._settings.pinned:
                return name
        return None

    # ------------------------------------------------------------------------------------------------ the end

    def stop(self, timeout_s: float, flush_s: float) -> None:
        """Stop all models. One that still computes after both times is left behind.

        Args:
            flush_s: seconds for writing pages to the disk, of all models together.
        """
        residents = self._residents
        with residents.changed:
            residents.is_closing = True
            residents.changed.notify_all()
            # Otherwise a model would be loaded behind this.
            residents.changed.wait_for(lambda: residents.change is None, timeout_s)
            runtimes = [resident.runtime for resident in residents.by_id.values()]
        end = residents.clock() + flush_s
        for runtime in runtimes:
            runtime.stop(timeout_s, max(end - residents.clock(), 0.0))

    def leave_conversations(self) -> None:
        """Write what is known of conversations. Only once no request is left that could add to it."""
        with self._residents.changed:
            for resident in self._residents.by_id.values():
                self._shared.conversations.leave(resident.runtime.conversations)
