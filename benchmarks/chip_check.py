"""Everything that a new chip has to show, in one run of at most ten minutes, as one JSON.

    scripts/chip_check [PART ...] [--quick] [--json FILE] [--model FOLDER] [--patience N]

Runs the parts of the table one after the other, each in a process of its own with a time limit: tests of
engine, cache, layers and disk buffers, replies beside an engine without a cache, model types, speed beside
mlx_lm, memory, the disk tier, and `doctor`. A part that fails or takes too long stops no other. Naming parts
runs these alone; `--quick` runs a small version of each, which shows that the part starts and says little of
the chip. `--model` is what `doctor` examines in place of the demo model. `--patience` multiplies the
limits, for machines that are busy or slow.

The JSON (`chip_check.json`) has the machine, the versions and the commit, and of each part its outcome, exit
status, seconds, and figures: tests by outcome, the tables that a benchmark prints, or doctor's findings. Of a
part that did not pass it has the last lines too. It holds no path and no text of yours.

Outcomes: `passed`; `failed` (another exit status than 0); `out of time`, whose figures are those until then.
The exit status is 0 if all parts passed, else 1.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from benchmarks.harness import ROOT
from start_llm.doctor.machine import device_finding

MOST_S = 600
END_S = 8
"""For an interrupted part to end by itself."""
TAIL_LINES = 30
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|deselected)\b")
_PROGRESS = re.compile(r"[.FEsxX]+(\s+\[ *\d+%\])?$")
_LETTERS = {".": "passed", "F": "failed", "E": "errors", "s": "skipped", "x": "xfailed"}
_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")

type Outcome = Literal["passed", "failed", "out of time"]
type Figures = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One row of the check.

    Attributes:
        command: after the interpreter. REPORT is a file that it writes, MODEL what `--model` says.
        quick: the same with little work.
        limit_s: seconds; those of all parts and their ends are at most `MOST_S`.
        read: finds the figures in what was printed, and in the report.
    """

    name: str
    shows: str
    command: str
    quick: str
    limit_s: int
    read: Callable[[str, str], Figures]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a part."""

    part: str
    shows: str
    command: str
    outcome: Outcome
    status: int
    seconds: float
    limit_s: float
    figures: Figures = field(default_factory=dict[str, Any])
    last_lines: Sequence[str] = ()


def outcomes_of_tests(printed: str, report: str) -> Figures:
    """The counts of pytest's last line; those of its letters if it was ended before it could print one."""
    del report
    counts = [{word: int(number) for number, word in _COUNT.findall(line)} for line in _lines(printed)]
    letters = Counter("".join(line.partition(" ")[0] for line in _lines(printed) if _PROGRESS.match(line)))
    until_then = {word: letters[letter] for letter, word in _LETTERS.items() if letters[letter]}
    return next((counted for counted in reversed(counts) if counted), until_then)


def tables(printed: str, report: str) -> Figures:
    """The tables in Markdown, each a list of rows by their headings, and the line that names the machine."""
    del report
    lines, parsed = list(_lines(printed)), list[list[dict[str, str]]]()
    for number, line in enumerate(lines[1:], 1):
        if _RULE.fullmatch(line):
            header = _cells(lines[number - 1])
            parsed.append([dict(zip(header, row, strict=False)) for row in _rows(lines[number + 1 :])])
    others = [line for line in lines if line and not line.startswith("|")]
    return {"tables": parsed, "lines": others}


def findings(printed: str, report: str) -> Figures:
    """The report of `doctor`; nothing if it did not come to its end."""
    del printed
    return json.loads(report) if report else {}


PARTS = (
    Part(
        name="tests",
        shows="engine, cache, layers and disk buffers",
        command="install_and_run.py --test -q tests/cache/test_layers.py tests/cache/test_truth.py "
        "tests/cache/test_disk_tier.py tests/cache/test_guards_of_arrays.py tests/engine tests/cache",
        quick="install_and_run.py --test -q tests/cache/test_layers.py",
        limit_s=170,
        read=outcomes_of_tests,
    ),
    Part(
        name="truth",
        shows="replies on the prompt cache beside those of an engine without one",
        command="-m benchmarks truth --only replies --conversations 16 --rounds 6",
        quick="-m benchmarks truth --only replies --conversations 1 --rounds 2 --family qwen3",
        limit_s=70,
        read=tables,
    ),
    Part(
        name="families",
        shows="a model type of each kind of cache, alone and in batches",
        command="-m benchmarks truth --only types --jobs 2 "
        "--types llama qwen3_next gemma3_text gpt_oss deepseek_v3 mamba2 jamba llama4 mixtral",
        quick="-m benchmarks truth --only types --jobs 1 --types llama",
        limit_s=60,
        read=tables,
    ),
    Part(
        name="speed",
        shows="decode, a batch and prefill beside mlx_lm",
        command="-m benchmarks engine --only decode batch prefill --rounds 3",
        quick="-m benchmarks engine --only decode --rounds 1",
        limit_s=80,
        read=tables,
    ),
    Part(
        name="memory",
        shows="the memory marks of the prompt cache",
        command="-m benchmarks cache --only peak budget --family dense --conversations 200",
        quick="-m benchmarks cache --only lookup",
        limit_s=40,
        read=tables,
    ),
    Part(
        name="disk",
        shows="restores from the disk tier beside computing",
        command="-m benchmarks disk --only restore first --tokens 4096 --first 4096",
        quick="-m benchmarks disk --only restore --tokens 512 --hidden 64 --layers 1",
        limit_s=30,
        read=tables,
    ),
    Part(
        name="doctor",
        shows="a served model, as `start_llm doctor` examines it",
        command="-m start_llm doctor MODEL --quick --json REPORT",
        quick="-m start_llm doctor MODEL --quick --json REPORT",
        limit_s=90,
        read=findings,
    ),
)


def check(part: Part, *, quick: bool, model: str | None, patience: float = 1) -> Result:
    """Run a part to its end, or to `patience` times its limit."""
    line, limit_s = part.quick if quick else part.command, patience * part.limit_s
    with tempfile.TemporaryDirectory() as name:
        report, printed = Path(name) / "report.json", Path(name) / "printed"
        words = line.replace("MODEL", f"--model {shlex.quote(model)}" if model else "--demo")
        command = [sys.executable, *shlex.split(words.replace("REPORT", str(report)))]
        began = time.monotonic()
        with printed.open("wb") as output:
            status = run(command, limit_s, output)
        seconds = time.monotonic() - began
        text = printed.read_text(encoding="utf-8", errors="replace")
        written = report.read_text(encoding="utf-8") if report.exists() else ""
    outcome: Outcome = "out of time" if status is None else "failed" if status else "passed"
    return Result(
        part=part.name,
        shows=part.shows,
        command=f"python {line}",
        outcome=outcome,
        status=-1 if status is None else status,
        seconds=round(seconds, 1),
        limit_s=limit_s,
        figures=part.read(without_paths(text), written),
        last_lines=() if outcome == "passed" else list(_lines(without_paths(text)))[-TAIL_LINES:],
    )


def run(command: Sequence[str], limit_s: float, output: IO[bytes]) -> int | None:
    """Run a command in a process group of its own, and return its exit status; None if it took too long.

    Nothing of the group is left when this returns or raises.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        return None
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a group; macOS refuses to signal one that has ended but was not waited for."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def without_paths(text: str) -> str:
    """Leave out where the user has what."""
    return text.replace(str(ROOT), ".").replace(tempfile.gettempdir(), "TMP").replace(str(Path.home()), "~")


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines())


def _rows(lines: Sequence[str]) -> Iterator[list[str]]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield _cells(line)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def commit() -> str:
    """The commit of this checkout, with a mark if files differ from it; empty outside of git."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607 - the user's git
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="scripts/chip_check", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(names) + " (default: all)")
    parser.add_argument("--quick", action="store_true", help="a small version of each part")
    parser.add_argument("--json", type=Path, default=Path("chip_check.json"), metavar="FILE")
    parser.add_argument("--model", metavar="FOLDER", help="for doctor (default: the demo model)")
    parser.add_argument("--patience", type=float, default=1, metavar="N", help="multiplies all time limits")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(names)}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = read_options(arguments)
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    machine = device_finding()
    most = sum(options.patience * part.limit_s + END_S for part in chosen)
    print(f"{machine.text}. At most {most:.0f} s.\n", flush=True)
    report: dict[str, Any] = {
        "machine": machine.figures,
        "commit": commit(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "is_quick": options.quick,
        "parts": [],
    }
    options.json.write_text(json.dumps(report), encoding="utf-8")  # a wrong place is reported at once
    for part in chosen:
        result = check(part, quick=options.quick, model=options.model, patience=options.patience)
        report["parts"].append(asdict(result))
        options.json.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
        print(f"{result.outcome:12} {part.name:9} {result.seconds:5.0f} s  {part.shows}", flush=True)
    bad = [checked["part"] for checked in report["parts"] if checked["outcome"] != "passed"]
    print(f"\n{', '.join(bad)} did not pass." if bad else "\nAll passed.", f"{options.json} has the figures.")
    return 1 if bad else 0
