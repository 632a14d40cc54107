"""What `model_host` knows of a model that is loaded, is being loaded or could not be."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.hosting.model_runtime import ModelRuntime


@dataclass(eq=False, slots=True)
class Resident:
    """A loaded model.

    Attributes:
        uses: requests that it is answering.
        last_used: seconds on the host's clock.
        is_leaving: it takes no more requests, and ends with those that it has.
    """

    runtime: ModelRuntime
    last_used: float
    uses: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A model that could not be loaded, and what its requests are told."""

    name: str
    message: str


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
