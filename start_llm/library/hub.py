"""Lists a repository of the Hugging Face hub, and fetches its files into the hub's cache folder.

huggingface_hub writes each download to a new name, so an interrupted file starts again from nothing. Here the
partial file is `blobs/<digest>.incomplete`, and a later download goes on at its end, in another process too.
Its name holds the digest of the contents (the ETag of the hub), so that it never continues another version;
size and digest are checked at the end. The finished layout is that of huggingface_hub:

    models--owner--name/blobs/<digest>
    models--owner--name/snapshots/<commit>/<file>  ->  ../../blobs/<digest>
    models--owner--name/refs/main                      the commit, written last
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import httpx
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE, is_offline_mode
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers

from start_llm.core.errors import HubError, ModelError
from start_llm.library.hub_fetch import (
    SERVER_ERROR,
    FileFetch,
    HubFile,
    HubRepository,
    hub_trouble,
    lock,
    partial_of,
)
from start_llm.library.progress import Progress

REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Weights, tokenizer, template, configuration. No Python files: code from a model is never run.
FILES = ("*.json", "*.jsonl", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_UNUSED = ("*/*.safetensors", "consolidated*.safetensors")
"""Weights that neither mlx_lm nor mlx_vlm loads: other checkpoints, and the same in their makers' layout."""
_OURS = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\.incomplete")
_COMMIT = re.compile(r"\w{1,64}")
_MOST_READ = 32 * 2**20
_TIMEOUT_S = 30.0
_TIMEOUT = httpx.Timeout(_TIMEOUT_S, connect=10.0)
_SPARE_BYTES = 2**30
"""Disk space that a download leaves free."""


class HubModel(NamedTuple):
    """A repository that a search has found."""

    repo_id: str
    downloads: int


class Hub:
    """The hub, and the folder of what came from it.

    Args:
        cache: the hub's cache folder.
        pause: waits for some seconds between two attempts.
        endpoint: address of the hub; None: HF_ENDPOINT, or the public one.
        free_bytes: returns the free space of the disk that a folder lies on.
    """

    def __init__(
        self,
        cache: Path | None = None,
        pause: Callable[[float], None] = time.sleep,
        endpoint: str | None = None,
        free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    ) -> None:
        self.cache = cache or Path(HF_HUB_CACHE)
        self._pause = pause
        self._endpoint = endpoint
        self._free_bytes = free_bytes

    def describe(self, repo_id: str) -> HubRepository:
        """Ask the hub for the newest commit of a repository and its files.

        Raises:
            HubError: it cannot be reached.
            ModelError: there is no such repository, or it is not open to this user.
        """
        if is_offline_mode():
            raise HubError("HF_HUB_OFFLINE is set.")
        api = HfApi(endpoint=self._endpoint)
        with _hub_errors(repo_id):
            info = api.model_info(repo_id, timeout=_TIMEOUT_S)
            commit = info.sha
            tree = [*api.list_repo_tree(repo_id, recursive=True, revision=commit)]
        files = [file for file in tree if isinstance(file, RepoFile) and _is_wanted(file.path)]
        if commit is None or not files:
            raise ModelError(f"{repo_id!r} has none of the files of a model ({', '.join(FILES)}).")
        digests = [file.lfs.sha256 if file.lfs else file.blob_id for file in files]
        hub_files = (
            HubFile(file.path, file.size, digest) for file, digest in zip(files, digests, strict=True)
        )
        numbers = dict(info.safetensors.parameters) if info.safetensors else {}
        return HubRepository(repo_id, commit, tuple(hub_files), self._endpoint, numbers)

    def search(self, words: str, limit: int) -> list[HubModel]:
        """Return the models on the hub that MLX can load and whose names have these words, by downloads.

        Raises:
            HubError: it cannot be reached.
        """
        if is_offline_mode():
            raise HubError("HF_HUB_OFFLINE is set.")
        api = HfApi(endpoint=self._endpoint)
        try:
            with _network_errors():
                models = [*api.list_models(search=words, filter="mlx", sort="downloads", limit=limit)]
        except HfHubHTTPError as error:
            raise HubError(f"The hub refuses to search: {error}") from error
        return [HubModel(model.id, model.downloads or 0) for model in models]

    def read(self, repository: HubRepository, path: str) -> bytes | None:
        """Return the contents of a small file; None if the repository has none of this name.

        Raises:
            HubError: it cannot be reached.
            ModelError: the file is too large, or the hub refuses.
        """
        file = next((file for file in repository.files if file.path == path), None)
        if file is None:
            return None
        if file.size > _MOST_READ:
            raise ModelError(f"{path} of {repository.repo_id!r} has {file.size:,} bytes, more than is read.")
        with self._client() as client:
            return FileFetch(client, repository, self._pause).read(file)

    def free_space(self) -> int:
        """Return the free bytes of the disk that the cache is on, or will be."""
        return self._free_bytes(next(path for path in (self.cache, *self.cache.parents) if path.is_dir()))

    def folder_of(self, repo_id: str) -> Path:
        """Return the folder of a repository in the cache, which need not be there."""
        return self.cache / repo_folder_name(repo_id=repo_id, repo_type="model")

    def snapshot(self, repo_id: str) -> Path | None:
        """Return the folder of the newest commit that is on disk; None if there is none."""
        folder = self.folder_of(repo_id)
        path = folder / "snapshots" / (newest_commit(folder) or "none")
        return path if path.is_dir() else None

    def fetch(self, repository: HubRepository, progress: Progress) -> Path:
        """Fetch what is missing, and return the folder of the snapshot.

        Raises:
            Stopped: `progress` asked for it.
            HubError: the hub cannot be reached.
            ModelError: the disk has no room or cannot be written, or a file is not what the hub says.
        """
        folder = self.folder_of(repository.repo_id)
        try:
            return self._fetch(repository, folder, progress)
        except OSError as error:
            raise ModelError(f"{folder} cannot be written: {error.strerror}.") from error

    def _fetch(self, repository: HubRepository, folder: Path, progress: Progress) -> Path:
        blobs, snapshot = folder / "blobs", folder / "snapshots" / repository.commit
        blobs.mkdir(parents=True, exist_ok=True)
        progress.begin(len(repository.files), repository.total_bytes)
        self._check_space(repository, blobs)
        with self._client() as client:
            fetch = FileFetch(client, repository, self._pause)
            for file in repository.files:
                progress.current_file = file.path
                if _is_whole(blobs, file):
                    progress.have(file.size)
                else:
                    fetch.fetch(file, blobs / file.digest, progress)
                _link(snapshot, file, blobs)
                progress.file_done()
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(repository.commit, encoding="utf-8")
        return snapshot

    def drop_partial(self, repo_id: str) -> int:
        """Remove our partial files that no process writes to; return their number.

        huggingface_hub does not lock its own, which have other names.
        """
        dropped = 0
        blobs = self.folder_of(repo_id) / "blobs"
        for path in [path for path in blobs.glob("*.incomplete") if _OURS.fullmatch(path.name)]:
            with suppress(OSError), path.open("ab") as file:  # another user's, in a folder that is shared
                if lock(file):
                    path.unlink()
                    dropped += 1
        return dropped

    def _client(self) -> httpx.Client:
        return httpx.Client(headers=build_hf_headers(), timeout=_TIMEOUT, follow_redirects=True)

    def _check_space(self, repository: HubRepository, blobs: Path) -> None:
        """Refuse a download that the disk has no room for.

        Raises:
            ModelError: names what is needed and what is free.
        """
        needed = sum(file.size - _size(blobs, file) for file in repository.files)
        free = self.free_space()
        if needed and needed + _SPARE_BYTES > free:
            raise ModelError(
                f"{repository.repo_id!r} needs {needed / 1e9:,.1f} GB more in {self.cache}. Free are "
                f"{free / 1e9:,.1f} GB, of which {_SPARE_BYTES / 1e9:,.1f} GB have to stay free. Make room "
                "(start_llm models, start_llm rm), or set HF_HUB_CACHE to a folder on another disk."
            )


def _link(snapshot: Path, file: HubFile, blobs: Path) -> None:
    """Put a file into a snapshot."""
    path = snapshot / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.path.relpath(blobs / file.digest, path.parent)
    if path.is_symlink() and str(path.readlink()) == target:
        return
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)


def _is_whole(blobs: Path, file: HubFile) -> bool:
    blob = blobs / file.digest
    return blob.is_file() and blob.stat().st_size == file.size


def _size(blobs: Path, file: HubFile) -> int:
    """Return the bytes of a file that are on disk."""
    blob = blobs / file.digest
    path = next((path for path in (blob, partial_of(blob)) if path.is_file()), None)
    return min(path.stat().st_size, file.size) if path else 0


def newest_commit(folder: Path) -> str | None:
    """Return the commit that a repository's folder names as its newest; None if it names none."""
    try:
        named = (folder / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return named if _COMMIT.fullmatch(named) else None


def _is_wanted(path: str) -> bool:
    parts = PurePosixPath(path).parts
    is_inside = bool(parts) and not path.startswith("/") and ".." not in parts and "\\" not in path
    return is_inside and _is_like(path, FILES) and not _is_like(path, _UNUSED)


def _is_like(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


@contextmanager
def _hub_errors(repo_id: str) -> Generator[None]:
    """Translate what huggingface_hub raises about a repository."""
    try:
        with _network_errors():
            yield
    except GatedRepoError as error:
        raise ModelError(
            f"The model {repo_id!r} cannot be downloaded: its authors ask for consent. Accept their terms on "
            f"the repository's page, and set HF_TOKEN. ({error})"
        ) from error
    except HfHubHTTPError as error:
        if error.response.status_code >= SERVER_ERROR:
            raise HubError(str(error)) from error
        raise ModelError(f"The model {repo_id!r} cannot be downloaded: {error}") from error
    except HFValidationError as error:
        raise ModelError(f"The model {repo_id!r} cannot be downloaded: {error}") from error


@contextmanager
def _network_errors() -> Generator[None]:
    """Translate what keeps the hub from answering."""
    try:
        yield
    except HfHubHTTPError:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HubError("The hub's answer is not JSON. Check the network and HF_ENDPOINT.") from error
    except (OSError, httpx.HTTPError) as error:
        raise hub_trouble(error) from error
