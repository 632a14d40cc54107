"""The settings of ranks that compute one model together: what is off, and what followers get."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from start_llm.config.paths import disk_tier_folder, own_name
from start_llm.config.settings import Settings
from start_llm.core.errors import SettingsError
from start_llm.models.rank_group import RankGroup
from start_llm.ranks.wire import SentSettings
from start_llm.wiring.memory_plan import memory_budget

_SENT = ("engine", "kv", "cache")
"""The groups of settings on which it depends what is computed and kept."""


def settings_together(settings: Settings, ranks: RankGroup) -> Settings:
    """Return the settings of a rank. All may use as much memory as the one that has least.

    Raises:
        SettingsError: they ask for what several ranks cannot do.
    """
    for variable, value in (
        ("MORE_MODELS", settings.model.more),
        ("MODEL_DIR", settings.model.dir),
        ("ADAPTER_DIR", settings.model.adapter_dir),
    ):
        if value:
            raise SettingsError(f"{variable} is set: several machines compute one model, without adapters.")
    return replace(
        settings,
        engine=replace(settings.engine, memory=ranks.least(memory_budget(settings))),
        model=replace(settings.model, idle_s=0.0),
        ssd=replace(settings.ssd, folder=_folder_of(settings, ranks.rank)),
    )


def _folder_of(settings: Settings, rank: int) -> str | None:
    """Return SSD_CACHE_DIR of a rank. On one machine each has a folder of its own, beside that of rank 0."""
    folder = disk_tier_folder(settings.ssd.folder, settings.server.state_root)
    if folder is None or not rank:
        return settings.ssd.folder
    return str(folder.with_name(own_name(folder.name, rank)))


def left_out(settings: Settings) -> Sequence[str]:
    """Return sentences on what several ranks do without, for the person who starts them.

    Args:
        settings: as they were set.
    """
    lines = ["Several machines compute one model: without embeddings and adapters."]
    if settings.model.idle_s:
        lines.append("MODEL_IDLE_SECONDS has no effect: the model stays loaded.")
    return lines


def sent_settings(settings: Settings) -> SentSettings:
    """Return what followers are loaded with."""
    groups = {name: asdict(getattr(settings, name)) for name in _SENT}
    return SentSettings(settings.model.path, groups)


def followed(settings: Settings, sent: SentSettings) -> Settings:
    """Return the settings of a follower: those of rank 0, as far as they were sent."""
    groups = {name: type(getattr(settings, name))(**values) for name, values in sent.groups.items()}
    return replace(settings, model=replace(settings.model, path=sent.model), **groups)
