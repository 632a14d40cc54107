"""Fetches a file of the hub into a partial file that a later attempt, or another process, goes on with."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import httpx
from huggingface_hub import hf_hub_url

from start_llm.core.errors import HubError, ModelError
from start_llm.library.progress import Progress

SERVER_ERROR = 500
_OK, _PARTIAL, _UNSATISFIABLE = 200, 206, 416
_ATTEMPTS = 5
_PIECE = 2**20
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


class Stopped(Exception):
    """The download was asked to stop. What it has received stays."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository.

    Attributes:
        digest: SHA-256 of its contents, or git's SHA-1 of small files.
    """

    path: str
    size: int
    digest: str

    @property
    def is_sha256(self) -> bool:
        return len(self.digest) == 2 * hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class HubRepository:
    """A repository at one commit, with the files that a model needs.

    Attributes:
        numbers: how many weights it has of each type, as safetensors calls the types; empty if the hub does
            not say.
    """

    repo_id: str
    commit: str
    files: tuple[HubFile, ...]
    endpoint: str | None = None
    numbers: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def url_of(self, file: HubFile) -> str:
        return hf_hub_url(self.repo_id, file.path, revision=self.commit, endpoint=self.endpoint)


class FileFetch:
    """Fetches files of one repository.

    Args:
        pause: waits for some seconds between two attempts.
    """

    def __init__(
        self, client: httpx.Client, repository: HubRepository, pause: Callable[[float], None]
    ) -> None:
        self._client = client
        self._repository = repository
        self._pause = pause

    def read(self, file: HubFile) -> bytes:
        """Return the contents of a small file.

        Raises:
            HubError: the network did not give it.
            ModelError: the hub refuses.
        """
        with _transport_errors():
            reply = self._client.get(self._repository.url_of(file))
            self._check(reply, file)
            return reply.content

    def fetch(self, file: HubFile, blob: Path, progress: Progress) -> None:
        """Fetch a file into `blob`.

        Raises:
            Stopped: `progress` asked for it.
            HubError: the network did not give all of it.
            ModelError: another process fetches it, or it is not what the hub names.
        """
        partial = partial_of(blob)
        # Unbuffered: what has come is in the file, even if the process is killed.
        with partial.open("ab", buffering=0) as out:
            if not lock(out):
                raise ModelError(f"Another process downloads {self._named(file)}. Wait for it, or stop it.")
            if _length(out) > file.size:
                out.truncate(0)
            progress.have(_length(out))
            self._with_patience(lambda: self._receive(file, out, progress), out)
            if _digest(partial, file) != file.digest:
                partial.unlink()
                raise ModelError(
                    f"{self._named(file)} came with other contents than the hub names. Start again."
                )
            os.fsync(out.fileno())
            partial.replace(blob)

    def _named(self, file: HubFile) -> str:
        return f"{file.path} of {self._repository.repo_id!r}"

    def _with_patience(self, attempt: Callable[[], None], out: BinaryIO) -> None:
        """Try again after errors of the network, up to five times without a new byte.

        Raises:
            HubError: the last attempt failed too.
        """
        left = _ATTEMPTS
        while True:
            before = _length(out)
            try:
                with _transport_errors():
                    attempt()
            except HubError:
                left = left - 1 if _length(out) == before else _ATTEMPTS - 1
                if not left:
                    raise
                self._pause(2.0 ** (_ATTEMPTS - 1 - left))
            else:
                return

    def _receive(self, file: HubFile, out: BinaryIO, progress: Progress) -> None:
        """Append the rest of a file to what is there of it."""
        have = _length(out)
        if have == file.size:
            return
        if progress.stopping:
            raise Stopped
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with self._client.stream("GET", self._repository.url_of(file), headers=headers) as reply:
            if reply.status_code != _UNSATISFIABLE:
                self._check(reply, file)
            if have and not _continues(reply, have):
                progress.have(-have)
                out.truncate(0)
            for piece in () if reply.status_code == _UNSATISFIABLE else reply.iter_raw():
                out.write(piece)
                progress.receive(len(piece))
                if progress.stopping:
                    raise Stopped
        if _length(out) < file.size:
            raise HubError(f"{file.path} ended after {_length(out):,} of {file.size:,} bytes.")

    def _check(self, reply: httpx.Response, file: HubFile) -> None:
        """Check the status of a reply, and that the hub still means the same contents.

        Raises:
            HubError: the hub is in trouble.
            ModelError: the hub refuses, or has other contents.
        """
        if reply.status_code >= SERVER_ERROR:
            raise HubError(f"The hub answered {reply.status_code} for {file.path}.")
        if reply.status_code not in (_OK, _PARTIAL):
            raise ModelError(f"The hub answered {reply.status_code} for {self._named(file)}.")
        digest = _etag([*reply.history, reply][0].headers)
        if digest and digest != file.digest:
            raise ModelError(f"{self._named(file)} has changed on the hub. Start the download again.")


def _continues(reply: httpx.Response, have: int) -> bool:
    """Return True if the reply goes on at byte `have`. A server may ignore Range and send all."""
    begin = re.match(r"bytes (\d+)-", reply.headers.get("content-range", ""))
    return reply.status_code == _PARTIAL and begin is not None and int(begin[1]) == have


def _etag(headers: Mapping[str, str]) -> str:
    """Return the digest that the hub's own reply names; "" if it names none: a mirror may have other tags."""
    tag = (headers.get("x-linked-etag") or headers.get("etag") or "").removeprefix("W/").strip('"')
    return tag if _DIGEST.fullmatch(tag) else ""


def _length(out: BinaryIO) -> int:
    return os.fstat(out.fileno()).st_size


def _digest(path: Path, file: HubFile) -> str:
    with path.open("rb") as data:
        if file.is_sha256:
            return hashlib.file_digest(data, "sha256").hexdigest()
        digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
        while piece := data.read(_PIECE):
            digest.update(piece)
        return digest.hexdigest()


_ERRNO = re.compile(r"\[Errno -?\d+\] ")


def partial_of(blob: Path) -> Path:
    """Return the file into which a blob is fetched."""
    return blob.with_name(f"{blob.name}.incomplete")


def lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed. Return False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hub_trouble(error: Exception) -> HubError:
    """Return in plain words what is wrong with the connection to the hub."""
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return HubError("The hub did not answer in time. Try again, or check the network.")
    why = _ERRNO.sub("", str(error)).rstrip(".") or type(error).__name__
    if isinstance(error, httpx.ConnectError):
        return HubError(f"The hub cannot be reached: {why}. Check the network and the variable HTTPS_PROXY.")
    return HubError(f"The connection to the hub failed: {why}.")


@contextmanager
def _transport_errors() -> Generator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise hub_trouble(error) from error
