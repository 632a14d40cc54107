"""The adapters of one loaded model: mounted on its engine thread, and again when it is loaded again."""

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path

from start_llm.core.adapters import BASE_MODEL, MountedAdapter
from start_llm.core.errors import RequestError
from start_llm.engine.engine import Engine
from start_llm.models.adapter_loader import Adapters

type AdapterFolders = MutableMapping[str, Path]
"""The folders of a model's mounted adapters, by their names."""


class ModelAdapters:
    """Mounts and unmounts adapters: `server.served_models.ServedAdapters`.

    Args:
        adapters: loads them, on the engine thread.
        folders: what is mounted; outlives the model.
    """

    def __init__(self, engine: Engine, adapters: Adapters, folders: AdapterFolders) -> None:
        self._engine = engine
        self._adapters = adapters
        self._folders = folders

    def listed(self) -> Sequence[MountedAdapter]:
        return self._adapters.listed()

    def mount(self, name: str, folder: Path) -> MountedAdapter:
        """Mount an adapter between two steps of the engine. If it is refused, what was mounted stays."""
        mounted = self._engine.run("load an adapter", partial(self._adapters.load, name, folder))
        self._folders[name] = folder
        return mounted

    def unmount(self, name: str) -> None:
        """Take an adapter from the choice of requests. Those that use it are finished with it."""
        self._adapters.remove(name)
        self._folders.pop(name, None)
        # Otherwise the network would keep its layers.
        self._engine.run("unmount adapters", partial(self._adapters.mount, BASE_MODEL))

    def mount_again(self, say: Callable[[str], None]) -> None:
        """Mount what was mounted when the model was last loaded. Tell the user of what cannot be."""
        for name, folder in list(self._folders.items()):
            try:
                self.mount(name, folder)
            except RequestError as error:
                del self._folders[name]
                say(f"The adapter {name!r} is no longer mounted. {error}")
