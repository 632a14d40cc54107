"""Limit how much is written to a disk in a day, across restarts."""

import json
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from start_llm.storage.private_files import private_opener


class DailyWriteLimit:
    """Counts written bytes by day (UTC).

    Args:
        path: file with the count of the day.
        max_bytes: for a day; 0 is no limit.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._day, self._nbytes = "", 0

    @property
    def today_bytes(self) -> int:
        return self._nbytes if self._day == _today() else 0

    @property
    def is_reached(self) -> bool:
        return 0 < self._max_bytes <= self.today_bytes

    def note(self, nbytes: int) -> None:
        self._day, self._nbytes = _today(), self.today_bytes + nbytes

    def load(self) -> bool:
        """Read what was written earlier today. False if there is a damaged file, which counts as nothing."""
        try:
            match json.loads(self._path.read_bytes()):
                case {"day": str(day), "bytes": int(nbytes)} if nbytes >= 0:
                    self._day, self._nbytes = day, nbytes
                    return True
                case _:
                    return False
        except FileNotFoundError:
            return True
        except (OSError, ValueError, RecursionError):
            return False

    def save(self) -> None:
        """Write the count down. Without it, at most what was written since then may be written again."""
        temporary = self._path.with_name(self._path.name + ".tmp")
        with suppress(OSError):
            with open(temporary, "w", encoding="utf-8", opener=private_opener) as file:
                json.dump({"day": self._day, "bytes": self._nbytes}, file)
            temporary.replace(self._path)


def _today() -> str:
    return datetime.fromtimestamp(time.time(), UTC).date().isoformat()
