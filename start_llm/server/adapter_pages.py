"""Renders the pages about adapters: lists, mounts and unmounts them."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from start_llm.core.adapters import MountedAdapter, adapter_names
from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.server.page_request import Page, PageRequest, members
from start_llm.server.served_models import ServedModels

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")


@dataclass(frozen=True, slots=True)
class AdapterPages:
    """Answers requests about adapters.

    Each names a model in `model`, or means the one that was used last.

    Attributes:
        root: the folder below which adapters are; None if nobody may mount any.
    """

    models: ServedModels
    root: Path | None = None

    def listed(self, request: PageRequest) -> Page:
        """List the adapters of a model. One that is not loaded has none, and is not loaded for it."""
        model = self.models.peek(request.fields.text("model"))
        return 200, {"adapters": [_entry(adapter) for adapter in model.adapters.listed()] if model else []}

    def mount(self, request: PageRequest) -> Page:
        """Mount an adapter, between two steps of the replies that run.

        Raises:
            InvalidRequest: it has no proper name, is not below the folder, is not for this model, or does not
                fit into memory.
        """
        asked = request.fields
        name = asked.required_text("id")
        if not _NAME.fullmatch(name) or not adapter_names(name):
            raise asked.fail(
                "id", f"must be 1 to 64 letters, digits, '.', '_', ':' or '-', and not 'none': {name!r}"
            )
        folder = self._folder(asked.text("path") or name)
        with self.models.lease(asked.text("model")) as model:
            self._demand_room(folder)
            mounted = model.adapters.mount(name, folder)
            self.models.divide_memory()
        return 200, _entry(mounted)

    def unmount(self, request: PageRequest) -> Page:
        """Unmount an adapter. The requests that use it are finished with it.

        Raises:
            NotFound: it is not mounted.
        """
        with self.models.lease(request.fields.text("model")) as model:
            model.adapters.unmount(request.name)
            self.models.divide_memory()
        return 200, {"id": request.name, "deleted": True}

    def _folder(self, path: str) -> Path:
        if self.root is None:
            raise InvalidRequest("Adapters are mounted from ADAPTER_DIR, which is not set.", param="path")
        with suppress(OSError, ValueError, RuntimeError):  # a null character, links that lead in a circle
            folder = (self.root / path).resolve()
            if folder.is_relative_to(self.root.resolve()) and folder.is_dir():
                return folder
        raise InvalidRequest(f"'path' {path!r} is no folder below ADAPTER_DIR.", param="path")

    def _demand_room(self, folder: Path) -> None:
        try:
            needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        except OSError as error:
            raise InvalidRequest(f"The adapter cannot be read: {error.strerror}.", param="path") from error
        spare = self.models.spare_bytes
        if needed > spare:
            raise InvalidRequest(
                f"The adapter takes {needed:,} bytes, and {max(spare, 0):,} are free beside a prompt of the "
                "whole context window. Lower MAX_KV_SIZE, or raise MEMORY_BUDGET.",
                param="path",
            )


def _entry(adapter: MountedAdapter) -> dict[str, Json]:
    return members(adapter, "id path rank scale size_bytes=nbytes mounted_layers=layers")
