"""The models that requests can name."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from start_llm.core.adapters import MountedAdapter
from start_llm.core.model_card import ModelCard
from start_llm.protocols.base import ModelFacts
from start_llm.server.status import Status
from start_llm.serving.service import Service

type ModelState = Literal["loaded", "loading", "available"]


class ServedAdapters(Protocol):
    """The adapters of a loaded model. Safe to use from any thread."""

    def listed(self) -> Sequence[MountedAdapter]: ...

    def mount(self, name: str, folder: Path) -> MountedAdapter:
        """Mount an adapter, or replace one.

        Raises:
            InvalidRequest: it is none for this model.
            EngineDied: the engine has stopped.
        """
        ...

    def unmount(self, name: str) -> None:
        """Unmount an adapter.

        Raises:
            NotFound: it is not mounted.
            EngineDied: the engine has stopped.
        """
        ...


class ServedEmbedder(Protocol):
    """Makes vectors of texts. Safe to use from any thread.

    Attributes:
        width: numbers of a vector.
        longest: tokens of a text at most.
    """

    @property
    def width(self) -> int: ...

    @property
    def longest(self) -> int: ...

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least, without encoding it."""
        ...

    def tokens(self, text: str) -> list[int]: ...

    def embed(self, ids: Sequence[int], patience_s: float) -> list[float]:
        """Return the vector of a text. For so many seconds, requests that somebody waits for go first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel(ModelFacts):
    """A loaded model, as the server knows it: with the service that answers its requests, and its status.

    Attributes:
        embedder: None if it is no embedding model.
    """

    service: Service
    status: Status
    adapters: ServedAdapters
    embedder: ServedEmbedder | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model that requests can name.

    Attributes:
        card: as it was loaded last; None if it never was.
        status: None if it is not loaded.
        in_flight: requests that it is answering.
        aliases: its other names.
    """

    id: str
    state: ModelState
    card: ModelCard | None = None
    in_flight: int = 0
    aliases: tuple[str, ...] = ()
    status: Status | None = None


class ServedModels(Protocol):
    """The models of a server. Safe to use from any thread."""

    @property
    def started_at(self) -> int:
        """Seconds since 1970 at which the server has started."""
        ...

    @property
    def status(self) -> Status:
        """The status of the model that was used last, loaded or not.

        Raises:
            RequestError: the first one is being loaded.
        """
        ...

    def stuck_reason(self) -> str:
        """Return why a model is stuck, while it is loaded or computes; empty if none is."""
        ...

    def lease(self, name: object, patience_s: float = ...) -> AbstractContextManager[ServedModel]:
        """Return the model of this name, loaded, for the time of a request; for an unknown name the default.

        Clients send names of their own (`gpt-5`, `claude-haiku`), so an unknown name is no error unless
        STRICT_MODEL_NAMES says so. For one, a model is loaded only if none is: the one that was used last.

        Args:
            patience_s: seconds to wait for the model.

        Raises:
            NotFound: the name is unknown, and names are strict.
            Overloaded: the model is still being loaded. It is loaded all the same.
            RequestError: it cannot be loaded.
        """
        ...

    def lease_if_loaded(self, name: object) -> AbstractContextManager[ServedModel | None]:
        """Return what `lease` returns if it need not wait; None if the model has to be loaded first.

        Raises:
            NotFound: the name is unknown, and names are strict.
        """
        ...

    def answering(self, name: object) -> str:
        """Return the id of the model that a lease of this name would return, loaded or not."""
        ...

    def peek(self, name: object) -> ServedModel | None:
        """Return the model that a lease of this name would return, if it is loaded. Changes nothing."""
        ...

    def knows(self, name: str) -> bool:
        """Return True if a model has this name."""
        ...

    def loading_progress(self, name: str) -> str:
        """Return a line about the model with this id, for which a request waits."""
        ...

    def listed(self) -> Sequence[ListedModel]:
        """Return all models: the loaded ones first, of these the one that was used last."""
        ...

    def load(self, name: str) -> None:
        """Load a model.

        Raises:
            NotFound: there is no such model.
            RequestError: it cannot be loaded.
        """
        ...

    @property
    def spare_bytes(self) -> int:
        """Memory that is free beside a prompt of the whole context window of each loaded model."""
        ...

    def divide_memory(self) -> None:
        """Divide the memory anew, because a model has more or fewer adapters."""
        ...

    def unload(self, name: str) -> None:
        """Free the memory of a model once it has answered its requests. The next request loads it again.

        Raises:
            NotFound: there is no such model.
        """
        ...
