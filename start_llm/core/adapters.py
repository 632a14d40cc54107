"""Adapters: low-rank changes to a model's layers, which a request chooses by name."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from start_llm.core.errors import InvalidRequest

_NO_ADAPTER = frozenset({"", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStack:
    """The adapters under which a request is computed; without any, the base model.

    Attributes:
        digest: 16 bytes that change with what the adapters do; empty for the base model.
        layers: the layers to put into the network, by their paths.
    """

    digest: bytes = b""
    layers: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)

    def scope(self, tenant: bytes) -> bytes:
        """Return whose requests share what is computed and recorded under these adapters for a tenant."""
        if not self.digest:
            return tenant
        return hashlib.blake2b(tenant, key=self.digest, digest_size=16).digest()


BASE_MODEL = AdapterStack()


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedAdapter:
    """An adapter that requests can choose.

    Attributes:
        rank, scale: as its file says.
        nbytes: memory that it takes.
        layers: number of the layers that it changes.
    """

    id: str
    path: str
    rank: int
    scale: float
    nbytes: int
    layers: int


class AdapterChoice(Protocol):
    """The adapters of a model. Safe to use from any thread."""

    def stack(self, spec: str) -> AdapterStack:
        """Return the adapters that a request names, in its order: `a`, `a+b`; `none` for the base model.

        Raises:
            InvalidRequest: there is no such adapter, or they cannot be used together.
        """
        ...


class NoAdapters:
    """A model without adapters."""

    def stack(self, spec: str) -> AdapterStack:
        if adapter_names(spec):
            raise InvalidRequest(f"'adapter' names {spec!r}, and none is mounted.", param="adapter")
        return BASE_MODEL


def adapter_label(spec: str) -> str | None:
    """Return a request's adapters as logs show them: `a+b`; None for the base model."""
    return "+".join(adapter_names(spec)) or None


def adapter_names(spec: str) -> tuple[str, ...]:
    """Return the names in a request's `adapter`: `a`, `a+b`, or none at all."""
    return () if spec in _NO_ADAPTER else tuple(spec.split("+"))
