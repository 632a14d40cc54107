"""Whether this machine runs on its battery."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from start_llm.core.kernel_files import kernel_text

_SUPPLIES = Path("/sys/class/power_supply")
_PMSET = ("/usr/bin/pmset", "-g", "ps")
_PATIENCE_S = 2.0
_BELIEVED_S = 30.0


class PowerSource:
    """Looks whether the machine runs on its battery, and believes what it saw for half a minute."""

    def __init__(
        self, look: Callable[[], bool] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look = look or is_on_battery
        self._clock = clock
        self._checked_at: float | None = None
        self._is_battery = False

    @property
    def is_battery(self) -> bool:
        now = self._clock()
        if self._checked_at is None or now - self._checked_at >= _BELIEVED_S:
            self._checked_at, self._is_battery = now, self._look()
        return self._is_battery


def is_on_battery(supplies: Path = _SUPPLIES) -> bool:
    """Return whether the machine is known to run on its battery. That of a mouse is not its own.

    Args:
        supplies: where Linux lists power supplies.
    """
    return _says_battery() if sys.platform == "darwin" else _is_discharging(supplies)


def _says_battery() -> bool:
    try:
        status = subprocess.run(_PMSET, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "'Battery Power'" in status.stdout


def _is_discharging(supplies: Path) -> bool:
    return any(
        (kernel_text(supply / "type"), kernel_text(supply / "status")) == ("Battery", "Discharging")
        and kernel_text(supply / "scope") != "Device"
        for supply in supplies.glob("*")
    )
