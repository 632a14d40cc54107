"""Resolves the name of a model (a folder or a Hugging Face repository) to a folder on disk."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from httpx import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from start_llm.core.errors import ModelError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# Weights, tokenizer, template, configuration. No Python files: code from a model is never run.
_FILES = ("*.json", "*.jsonl", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")
# huggingface_hub drops a connection that is silent for a minute, so no process still writes to older files.
_ABANDONED_S = 600


def resolve(name: str) -> Path:
    """Return the model folder for `name`; download missing files and show the progress.

    Raises:
        ModelError: `name` is neither a folder nor a repository, or the download failed.
    """
    folder = _as_path(name)
    if folder.is_dir():
        return folder.resolve()
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        raise ModelError(
            f"MODEL_PATH={name!r}: no such folder, and not the name of a repository (owner/name)."
        )
    _drop_partial_files(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(f"The model {name!r} cannot be downloaded: {error}") from error
    except (LocalEntryNotFoundError, OSError, HTTPError) as error:
        raise ModelError(
            f"The model {name!r} is not on this machine, and the network did not give it: {error} "
            "Start again to resume the download, or name a folder with --model."
        ) from error


def _as_path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:
        # `~name` without such a user: treat it as the literal name of a folder.
        return Path(name)


def _drop_partial_files(name: str) -> None:
    """Remove files of interrupted downloads: each download writes to a new name and never reads them."""
    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "blobs"
    for partial in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
