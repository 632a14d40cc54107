"""`start_llm doctor` as a person starts it: what is printed, what is written, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from start_llm.cli import main
from start_llm.commands import server_status
from start_llm.config.settings import Settings
from start_llm.doctor import report
from start_llm.doctor.examination import QUICK, Extent, judged_rounding, judged_sense
from start_llm.doctor.findings import Finding, Findings
from start_llm.doctor.network import Rounding, Sense
from start_llm.launch.http_requests import HttpAnswer
from tests.conftest import TinyModel
from tests.serving import serving

ROOT = Path(__file__).resolve().parents[2]


def findings_of(*given: Finding) -> Any:
    def examine(_settings: Settings, _model: Path, findings: Findings, _extent: Extent) -> None:
        for finding in given:
            findings.add(finding)

    return examine


def run(*arguments: object) -> int:
    return main(["doctor", "--mlx-port", "0", "--no-proxy", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of other tests are not seen."""
    monkeypatch.setenv("STATE_ROOT", str(tmp_path / "state"))


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


def test_it_prints_a_page_and_writes_a_report(model: Path, tmp_path: Path, monkeypatch, capsys):
    findings = (
        Finding("port", "fine", "8080 is free", {"port": 8080}),
        Finding("memory", "look", "too little"),
    )
    monkeypatch.setattr(report, "examine", findings_of(*findings))
    assert run("--model", model, "--json", tmp_path / "doctor.json") == 0
    page = capsys.readouterr().out
    assert "port         fine      8080 is free" in page
    assert "memory       LOOK      too little" in page
    assert "Nothing is wrong." in page
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert written["verdict"] == "fine"
    assert written["findings"][0] == {
        "topic": "port",
        "verdict": "fine",
        "text": "8080 is free",
        "figures": {"port": 8080},
    }


def test_a_fault_is_the_status_and_the_last_word(model: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(report, "examine", findings_of(Finding("truth", "fault", "3 are wrong")))
    assert run("--model", model, "--json", tmp_path / "doctor.json") == 1
    assert "Something is wrong: truth." in capsys.readouterr().out
    assert json.loads((tmp_path / "doctor.json").read_text())["verdict"] == "fault"


def test_a_report_is_json_even_if_a_number_is_none():
    findings = Findings(show=lambda _: None)
    findings.add(
        Finding("network", "fault", "NaN", {"nats": float("nan"), "typical": float("inf"), "n": 1.5})
    )
    (finding,) = json.loads(findings.as_json(), parse_constant=pytest.fail)["findings"]
    assert finding["figures"] == {"nats": "nan", "typical": "inf", "n": 1.5}


def test_nothing_is_downloaded(tmp_path: Path, capsys):
    assert run("--model", "owner/name", "--json", tmp_path / "doctor.json") == 2
    assert "'owner/name' is not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "doctor.json").exists()


def test_a_report_that_cannot_be_written_is_refused_first(model: Path, tmp_path, capsys):
    assert run("--model", model, "--json", tmp_path / "missing" / "doctor.json") == 2
    assert "--json" in capsys.readouterr().err


def test_it_does_not_measure_beside_a_server(model: Path, tmp_path: Path, capsys):
    with serving(model) as server:
        assert main(["doctor", "--model", str(model), "--no-proxy", "--mlx-port", str(server.port)]) == 2
    assert f"A server runs at {server.url}" in capsys.readouterr().err


def test_it_does_not_measure_beside_a_server_that_has_another_key_and_no_file_here(
    model: Path, monkeypatch, capsys
):
    monkeypatch.setattr(server_status, "ask", lambda url, *_: HttpAnswer(503, b'{"status": "draining"}'))
    assert run("--model", model) == 2
    assert "A server runs at http://127.0.0.1:0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'"a page"'),
        (404, b'{"status": 404, "error": "Not Found"}'),
        (404, b'{"status": "error"}'),
        (200, b'{"status": 1}'),
        (200, b'["status"]'),
        (200, b"[" * 100_000),
    ],
)
def test_what_is_no_server_does_not_keep_it_from_measuring(
    status: int, body: bytes, model: Path, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.setattr(server_status, "ask", lambda url, *_: HttpAnswer(status, body))
    monkeypatch.setattr(report, "examine", findings_of())
    assert run("--model", model, "--json", tmp_path / "doctor.json") == 0


def test_who_interrupts_it_finds_no_empty_report(model: Path, tmp_path: Path, monkeypatch, capsys):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "examine", interrupted)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert run("--model", model, "--json", tmp_path / "doctor.json") == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not (tmp_path / "doctor.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_it_finds_nothing_left_behind(model: Path, tmp_path: Path, number: signal.Signals):
    command = [
        sys.executable,
        "-m",
        "start_llm",
        "doctor",
        "--model",
        str(model),
        "--mlx-port",
        "0",
        "--no-proxy",
    ]
    environment = os.environ | {"STATE_ROOT": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, "--json", str(tmp_path / "doctor.json")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        while "network" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.3)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list((tmp_path / "state").glob("doctor-*")) == []


@pytest.mark.long
def test_a_whole_examination_of_a_small_model(model: Path, tmp_path: Path, capsys):
    assert run("--model", model, "--json", tmp_path / "doctor.json") == 0
    by_topic = {row["topic"]: row for row in json.loads((tmp_path / "doctor.json").read_text())["findings"]}
    assert by_topic["truth"]["figures"]["conversations"] == 50
    assert by_topic["decode"]["verdict"] == "fine"


@pytest.mark.long
def test_a_quick_examination_looks_at_all_topics_with_fewer_conversations(
    model: Path, tmp_path: Path, capsys
):
    assert run("--model", model, "--quick", "--json", tmp_path / "doctor.json") == 0
    assert "This takes about a minute" in capsys.readouterr().out
    written = (tmp_path / "doctor.json").read_text()
    assert str(tmp_path) not in written, "it says nothing of where the user has what"
    by_topic = {finding["topic"]: finding for finding in json.loads(written)["findings"]}
    assert by_topic.keys() >= {"device", "network", "truth", "decode", "peak memory", "reuse", "restart"}
    assert by_topic["truth"]["figures"]["conversations"] <= QUICK.conversations


@pytest.mark.parametrize(
    ("first", "second", "verdict"), [(2.5, 0.4, "fine"), (2.5, 2.4, "look"), (8.1, 8.1, "skipped")]
)
def test_a_model_that_knows_english_recognises_what_it_has_just_read(first, second, verdict):
    assert judged_sense(Sense(first=first, second=second, chance=7.6)).verdict == verdict


@pytest.mark.parametrize(
    ("typical", "precision", "verdict"),
    [
        (1e-5, "float32", "fine"),
        (0.05, "float32", "fault"),
        (0.05, "bfloat16", "fine"),
        (0.8, "bfloat16", "fault"),
        (float("nan"), "bfloat16", "fault"),
    ],
)
def test_more_than_rounding_is_a_fault(typical, precision, verdict):
    assert judged_rounding(Rounding(typical, nats=0.01, precision=precision)).verdict == verdict
