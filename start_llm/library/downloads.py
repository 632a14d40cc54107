"""Downloads models in the background: one after the other, on one thread, with pause and resume."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from start_llm.core.errors import Conflict, InvalidRequest, ModelError, NotFound
from start_llm.core.ids import random_name
from start_llm.core.model_listing import Download, DownloadState
from start_llm.library.hub import REPOSITORY, Hub
from start_llm.library.hub_fetch import Stopped
from start_llm.library.progress import Progress

_KEPT = 5
_END_S = 5.0


@dataclass(slots=True)
class _Job:
    """One download. `wanted` is what its owner asked for; `end` is how it ended."""

    id: str
    tenant: bytes
    repo_id: str
    started_at: int
    progress: Progress = field(default_factory=Progress)
    wanted: Literal["run", "pause", "remove"] = "run"
    end: Literal["done", "error"] | None = None
    error: str | None = None
    finished_at: int | None = None

    @property
    def state(self) -> DownloadState:
        return self.end or ("active" if self.wanted == "run" else "paused")

    def want(self, wanted: Literal["run", "pause", "remove"]) -> None:
        self.wanted = wanted
        self.progress.stopping = wanted != "run"

    def as_download(self) -> Download:
        seen = self.progress
        return Download(
            id=self.id,
            repo_id=self.repo_id,
            state=self.state,
            current_file=seen.current_file if self.state == "active" else None,
            received_bytes=seen.received_bytes,
            total_bytes=seen.total_bytes,
            files_done=seen.files_done,
            files_total=seen.files_total,
            bytes_per_sec=seen.bytes_per_sec if self.state == "active" else 0,
            started_at=self.started_at,
            finished_at=self.finished_at,
            error=self.error,
        )


class Downloads:
    """The downloads of this server. Each tenant sees its own; the last five are kept.

    The thread starts with the first download. What has come of a file stays on disk, so a download that is
    started again, also by another process, goes on where it was.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._running: _Job | None = None
        self._closing = False

    def list(self, tenant: bytes) -> Sequence[Download]:
        """Return this tenant's downloads, the newest first."""
        with self._changed:
            return [job.as_download() for job in reversed(self._jobs) if job.tenant == tenant]

    def start(self, tenant: bytes, repo_id: str) -> Download:
        """Begin a download, or go on with an unfinished one of the same repository.

        Raises:
            InvalidRequest: that is no name of a repository.
            Conflict: five downloads are unfinished.
        """
        if not REPOSITORY.fullmatch(repo_id):
            raise InvalidRequest("'repo_id' must be the name of a repository (owner/name).", param="repo_id")
        with self._changed:
            known = [job for job in self._jobs if (job.tenant, job.repo_id) == (tenant, repo_id)]
            unfinished = next((job for job in known if job.end != "done"), None)
            if unfinished:
                return self._go_on(unfinished)
            self._make_room()
            job = _Job(f"dl_{random_name()}", tenant, repo_id, int(time.time()))
            self._jobs.append(job)
            self._wake()
            return job.as_download()

    def pause(self, tenant: bytes, name: str) -> Download:
        """Stop a download for now.

        Raises:
            NotFound: this tenant has no such download.
            Conflict: it has ended.
        """
        with self._changed:
            job = self._find(tenant, name)
            if job.end:
                raise Conflict(f"The download of {job.repo_id!r} has ended ({job.end}).")
            job.want("pause")
            return job.as_download()

    def resume(self, tenant: bytes, name: str) -> Download:
        """Go on with a download that is paused or failed.

        Raises:
            NotFound: this tenant has no such download.
            Conflict: it is done.
        """
        with self._changed:
            job = self._find(tenant, name)
            if job.end == "done":
                raise Conflict(f"The download of {job.repo_id!r} is done.")
            return self._go_on(job)

    def remove(self, tenant: bytes, name: str) -> Download:
        """End a download and forget it. Its partial file goes; whole files stay for the next one.

        Raises:
            NotFound: this tenant has no such download.
        """
        with self._changed:
            job = self._find(tenant, name)
            download = job.as_download()
            job.want("remove")
            self._jobs.remove(job)
            is_idle = job is not self._running
        if is_idle and job.end != "done":
            self._hub.drop_partial(job.repo_id)
        return download

    def close(self) -> None:
        """Stop the thread. Partial files stay."""
        with self._changed:
            self._closing = True
            for job in self._jobs:
                job.progress.stopping = True
            self._changed.notify_all()
        if self._thread:
            self._thread.join(_END_S)

    def _find(self, tenant: bytes, name: str) -> _Job:
        job = next((job for job in self._jobs if (job.tenant, job.id) == (tenant, name)), None)
        if job is None:
            raise NotFound(f"There is no download {name!r}. GET /downloads lists them.")
        return job

    def _go_on(self, job: _Job) -> Download:
        job.want("run")
        job.end = job.error = job.finished_at = None
        self._wake()
        return job.as_download()

    def _make_room(self) -> None:
        """Forget the oldest ended download if five are known.

        Raises:
            Conflict: none has ended.
        """
        if len(self._jobs) < _KEPT:
            return
        ended = next((job for job in self._jobs if job.end), None)
        if ended is None:
            raise Conflict(f"{_KEPT} downloads are unfinished. End one with DELETE /downloads/{{id}}.")
        self._jobs.remove(ended)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # --------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            end, error = self._carry_out(job)
            with self._changed:
                self._running = None
                if end:
                    job.end, job.error, job.finished_at = end, error, int(time.time())
            if job.wanted == "remove" and end != "done":
                self._hub.drop_partial(job.repo_id)

    def _next(self) -> _Job | None:
        """Wait for a download that is to run; None if the server stops."""
        with self._changed:
            while not self._closing:
                job = next((job for job in self._jobs if job.wanted == "run" and not job.end), None)
                if job:
                    self._running = job
                    job.progress.stopping = False
                    return job
                self._changed.wait()
            return None

    def _carry_out(self, job: _Job) -> tuple[Literal["done", "error"] | None, str | None]:
        """Return how it ended; None if it was asked to stop."""
        try:
            self._hub.fetch(self._hub.describe(job.repo_id), job.progress)
        except Stopped:
            return None, None
        except ModelError as error:
            return "error", str(error)
        except Exception as error:  # noqa: BLE001 - this thread serves all downloads, and may not end for one
            return "error", f"{type(error).__name__}: {error}"
        return "done", None
