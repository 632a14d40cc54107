"""What may be loaded, from the settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from start_llm.config.settings import Settings
from start_llm.core.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """What may be loaded.

    Attributes:
        max_loaded: number of models; 0 is as many as memory allows.
        idle_s: seconds without a request after which a model is unloaded; 0 is never.
        pinned: models that are never unloaded to make room for others, nor for being idle.
        flush_s: seconds for writing the pages of a model that is unloaded.
        aliases: other names of models, to their ids.
        is_strict: a name that no model has is an error.
    """

    max_loaded: int = 0
    idle_s: float = 0.0
    pinned: frozenset[str] = frozenset()
    flush_s: float = 30.0
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    is_strict: bool = False


def host_limits(settings: Settings, known: Collection[str]) -> HostLimits:
    """Return what may be loaded.

    Raises:
        SettingsError: a pinned model is unknown, or that of an alias, or an alias is the id of a model.
    """
    unknown = [name for name in settings.model.pinned if name not in known]
    if unknown:
        raise SettingsError(f"MODEL_PINS: there is no model {unknown[0]!r}; there is {', '.join(known)}.")
    aliases = dict(_pair(one) for one in settings.model.aliases)
    for alias, name in aliases.items():
        if name not in known:
            raise SettingsError(f"MODEL_ALIASES: there is no model {name!r}; there is {', '.join(known)}.")
        if alias in known:
            raise SettingsError(f"MODEL_ALIASES: {alias!r} is a model itself.")
    return HostLimits(
        max_loaded=settings.model.max_loaded,
        idle_s=settings.model.idle_s,
        pinned=frozenset(settings.model.pinned),
        flush_s=settings.server.drain_s,
        aliases=aliases,
        is_strict=settings.model.strict_names,
    )


def _pair(alias: str) -> tuple[str, str]:
    name, _, model = alias.partition("=")
    return name.strip(), model.strip()
