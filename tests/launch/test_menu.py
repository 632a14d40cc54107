"""Which coding clients there are here, and what the start suggests."""

from pathlib import Path

import pytest

from start_llm import cli
from start_llm.hosting.startup_summary import paste_lines
from start_llm.launch.clients import CLIENTS
from start_llm.launch.suitability import menu, suggested


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with programs; pi alone is installed."""
    program = tmp_path / "pi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return program


def test_each_client_is_started_or_installed_with_what_is_shown(programs: Path):
    shown = dict(menu({"PATH": str(programs.parent)}, {}))
    assert shown.keys() == CLIENTS.keys()
    assert shown["pi"] == "start_llm launch pi"
    assert shown["codex"] == "not installed; npm install -g @openai/codex"


def test_why_one_does_not_suit_stands_below_it(programs: Path):
    lines = [*menu({"PATH": str(programs.parent)}, {"pi": "too long"})]
    assert lines[lines.index(("pi", "start_llm launch pi")) + 1] == ("", "does not suit the model: too long")
    assert len(lines) == len(CLIENTS) + 1


def test_the_command_prints_them(
    programs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLX_PORT", "9")  # nothing listens there
    monkeypatch.setenv("PROXY", "false")
    monkeypatch.setenv("STATE_ROOT", str(programs.parent))
    assert cli.main(["clients"]) == 0
    *lines, empty, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*CLIENTS]
    assert (empty, last.split(":")[0]) == ("", "  No server runs")
    assert "  pi        start_llm launch pi" in lines


def test_an_installed_client_is_suggested(programs: Path):
    assert suggested({"PATH": str(programs.parent)}, ()) == ["launch", "pi"]
    (line,) = paste_lines("http://127.0.0.1:1", "m", (), asks_key=False)[-1][1]
    assert line.endswith("launch --base-url http://127.0.0.1:1 pi")


def test_one_that_does_not_suit_the_model_is_not_suggested(programs: Path):
    assert suggested({"PATH": str(programs.parent)}, ("pi",)) == ["clients"]
    title, lines = paste_lines("http://127.0.0.1:1", "m", ("pi",), asks_key=False)[-1]
    assert title.startswith(
        "Or start a coding client (claude, openclaw, codex, opencode, qwen, cline, continue)"
    )
    assert lines[0].endswith("start_llm clients")
    assert lines[1].startswith("# pi: not with this model")


def test_without_one_the_list_is_suggested(programs: Path):
    programs.unlink()
    assert suggested({"PATH": str(programs.parent)}, ()) == ["clients"]
    (line,) = paste_lines("http://127.0.0.1:1", "m", (), asks_key=False)[-1][1]
    assert line.endswith("start_llm clients")
