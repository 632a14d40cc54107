"""Settings by the names of fields alone, for tests that set a few."""

from collections import Counter, defaultdict
from typing import Any

from start_llm.config.settings import Settings

ROWS = tuple(Settings.rows())
_TIMES = Counter(row.field for row in ROWS)
PLACES = {row.field: row for row in ROWS if _TIMES[row.field] == 1} | {
    f"{row.group}_{row.field}": row for row in ROWS
}
"""Where a name sets its value. That of a group stands before a field of which there are several."""


def settings_of(**values: Any) -> Settings:
    """Return settings with these values, such as `batch` and `proxy_port`."""
    chosen: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in values.items():
        chosen[PLACES[name].group][PLACES[name].field] = value
    return Settings.of(chosen)


def value_of(settings: Settings, name: str) -> Any:
    """Return the value that has this name in `settings_of`."""
    return getattr(getattr(settings, PLACES[name].group), PLACES[name].field)
