"""Run the examination for a person: lines on the terminal, and a file for a report."""

from pathlib import Path

from start_llm.config.settings import Settings
from start_llm.core.errors import ModelError, SettingsError
from start_llm.doctor.examination import WHOLE, Extent, examine
from start_llm.doctor.findings import Findings
from start_llm.library.download import folder_at, on_disk
from start_llm.library.hub import Hub
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.model_places import model_name


def examine_and_report(settings: Settings, report: Path, terminal: Terminal, extent: Extent = WHOLE) -> int:
    """Examine, print each finding, and write the report. Returns 1 if something is wrong, else 0.

    Raises:
        ModelError: the model is not on this machine.
        SettingsError: the report cannot be written.
    """
    model = _model(model_name(settings))
    _check_writable(report)
    terminal.say(
        f"Examining this machine with {model.name}. This takes {extent.duration}, and changes nothing.\n"
    )
    findings = Findings(show=lambda finding: terminal.summary([finding.row]))
    examine(settings, model, findings, extent)
    report.write_text(findings.as_json(), encoding="utf-8")
    terminal.say("")
    for line in findings.conclusion():
        terminal.say(line)
    terminal.say(f"{report} has all figures, and no text of yours. Attach it to a report about this server.")
    return 1 if findings.faults else 0


def _model(name: str) -> Path:
    """Return the model's folder. Nothing is downloaded for an examination."""
    if (folder := folder_at(name)) is not None:
        return folder.resolve()
    if (snapshot := on_disk(name, Hub())) is not None:
        return snapshot
    raise ModelError(
        f"The model {name!r} is not on this machine. Get it with `start_llm pull {name}`, or use --demo."
    )


def _check_writable(report: Path) -> None:
    is_new = not report.exists()
    try:
        report.open("a", encoding="utf-8").close()
    except OSError as error:
        raise SettingsError(f"--json {str(report)!r}: {error.strerror}.") from error
    if is_new:
        report.unlink()  # who interrupts the examination finds no empty report
