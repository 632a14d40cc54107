"""How several processes share the tests: files that need the same slow start go to the same process.

    pytest -n 2 --dist loadfile

The longest come first, so that all processes end at about the same time.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

UNITS = {
    "LiteLLM": ("tests/proxy/test_", "tests/sdk/", "tests/foreign/test_attacks.py"),
    "a server for each family": ("tests/http/",),
    "a network for the engine": ("tests/engine/",),
    "restarts": ("tests/cache/test_restart.py",),
    "models that see": ("tests/vision/",),
    "launches of ranks": ("tests/ranks/test_engine_of_ranks.py", "tests/ranks/test_launch_of_ranks.py"),
    "the disk": ("tests/cache/test_disk_tier.py",),
    "the demo model": ("tests/models/test_demo_model.py",),
    "status": ("tests/server/test_status.py",),
    "chaos": ("tests/chaos/",),
}
"""By what they share: how the paths of these files begin. Any other file is a unit of its own."""


def unit(nodeid: str) -> str:
    """Return the unit of a test, by its path and name."""
    file = nodeid.partition("::")[0]
    return next((name for name, starts in UNITS.items() if file.startswith(starts)), file)


def rank(nodeid: str) -> int:
    """Return a sort key: the units of the table come first."""
    names = [*UNITS]
    return names.index(one) if (one := unit(nodeid)) in UNITS else len(names)


class UnitScheduling(LoadFileScheduling):
    """Deals out units, in the order in which their first tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)
