"""What an examination found, as a page for a person and as JSON for a report."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from start_llm import __version__

type Verdict = Literal["fine", "look", "fault", "skipped"]
type Figure = float | int | str | bool | None

_WORDS: Mapping[Verdict, str] = {"fine": "fine", "look": "LOOK", "fault": "FAULT", "skipped": "skipped"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        verdict: `fault`: replies may be wrong, or something does not work; `look`: it works, and something
            about it is worth knowing; `skipped`: it could not be judged, and the text says why.
        text: for a person, in a sentence.
        figures: what the sentence rests on. No text of the user's and no path is among them.
    """

    topic: str
    verdict: Verdict
    text: str
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure])

    @property
    def row(self) -> tuple[str, str]:
        return f"{self.topic:<12} {_WORDS[self.verdict]:<8}", self.text


@dataclass(slots=True)
class Findings:
    """The findings of an examination, in their order.

    Args:
        show: called with each finding as soon as it is there.
    """

    show: Callable[[Finding], None]
    entries: list[Finding] = field(default_factory=list[Finding])
    began: float = field(default_factory=time.monotonic)

    def add(self, finding: Finding) -> None:
        self.entries.append(finding)
        self.show(finding)

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.entries if finding.verdict == "fault"]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def as_json(self) -> str:
        """Return the content of `doctor.json`."""
        content = {
            "start_llm": __version__,
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(self.seconds, 1),
            "verdict": "fault" if self.faults else "fine",
            "findings": [
                asdict(replace(finding, figures=_finite(finding.figures))) for finding in self.entries
            ],
        }
        return json.dumps(content, ensure_ascii=False, allow_nan=False, indent=2) + "\n"

    def conclusion(self) -> Iterator[str]:
        """Yield the lines below the page."""
        names = ", ".join(dict.fromkeys(finding.topic for finding in self.faults))
        yield f"Something is wrong: {names}." if names else "Nothing is wrong."
        looks = sum(finding.verdict == "look" for finding in self.entries)
        if looks:
            yield f"{looks} {'line' if looks == 1 else 'lines'} marked LOOK: worth knowing, not wrong."
        yield f"It took {self.seconds:.0f} seconds."


def _finite(figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """Replace numbers that JSON does not have, such as NaN, by their names."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
