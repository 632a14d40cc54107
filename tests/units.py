"""How several processes share the tests: files that need the same slow start go to the same process.

    pytest -n 2 --dist loadfile

The longest come first, so that all processes end at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xdist.scheduler import LoadFileScheduling

UNITS = {
    "LiteLLM": ("tests/proxy/test_", "tests/sdk/", "tests/foreign/test_attacks.py"),
    "a server for each family": ("tests/http/",),
    "a network for the engine": ("tests/engine/",),
    "restarts": ("tests/cache/test_restart.py",),
    "models that see": ("tests/vision/",),
    "the real weights": ("tests/real/",),
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
    return names.index(name) if (name := unit(nodeid)) in UNITS else len(names)


class UnitScheduling(LoadFileScheduling):
    """Deals out units, in the order in which their first tests were collected.

    After each of 27,000 tests, xdist would count all tests anew, and for each test that it deals out look
    through the names of all.
    """

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        if node in self.registered_collections:
            self.registered_collections[node] = Numbered(collection)

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """Count the tests that wait or run, and forget units that are done."""
        for done in [name for name, tests in workload.items() if all(tests.values())]:
            del workload[done]
        return super()._pending_of(workload)


class Numbered(list[str]):
    """Names of which each knows its place."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self._places = {name: place for place, name in enumerate(names)}

    def index(self, name: str, /, *_: Any) -> int:
        return self._places[name]


def only_outcomes(send: Callable[..., None]) -> Callable[..., None]:
    """Return what sends only the events of a process that say how a test went.

    Of a test that passes that is its call. What begins and what was prepared was half of what processes sent
    each other, which takes longer than most tests.

    Args:
        send: takes the name of an event and what is known of it.
    """

    def sends(name: str, **known: Any) -> None:
        if name == "logstart":
            return
        report = known.get("data", {})
        if name == "testreport" and report["when"] != "call" and report["outcome"] == "passed":
            return
        send(name, **known)

    return sends
