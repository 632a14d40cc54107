"""Names of other servers in `.env`: reported, and never taken from the environment."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from start_llm import cli
from start_llm.config.foreign_names import FOREIGN_NAMES, foreign_lines
from start_llm.config.settings import SettingSource, all_rows
from start_llm.core.errors import StartupError
from start_llm.telemetry.terminal import Terminal


def lines_about(in_file: dict[str, str], **environment: str) -> list[str]:
    return foreign_lines([SettingSource("environment", environment), SettingSource(".env", in_file)])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MODEL", "MODEL_PATH"),
        ("PORT", "MLX_PORT"),
        ("HOST", "MLX_HOST"),
        ("API_KEY", "MLX_API_KEY"),
        ("CONTEXT_LENGTH", "MAX_KV_SIZE"),
        ("model", "MODEL_PATH"),
    ],
)
def test_a_foreign_name_in_the_file_is_reported_with_the_setting_that_is_meant(name: str, meant: str) -> None:
    (line,) = lines_about({"BATCH": "3", name: "secret"})
    assert line == (f".env has {name}, which is no setting of start_llm and has no effect. Is {meant} meant?")


def test_who_has_set_what_is_meant_is_shown_nothing() -> None:
    assert lines_about({"PORT": "9", "MLX_PORT": "8081"}) == []
    assert lines_about({"PORT": "9"}, MLX_PORT="8081") == []


def test_names_in_the_environment_belong_to_other_programs() -> None:
    assert lines_about({}, PORT="9", HOST="x", MODEL="y") == []


def test_each_is_foreign_and_means_a_setting() -> None:
    settings = {row.name for row in all_rows()}
    assert set(FOREIGN_NAMES.values()) <= settings
    assert not settings & FOREIGN_NAMES.keys()


def test_the_server_tells_before_it_loads(tmp_path: Path) -> None:
    printed = io.StringIO()
    sources = [
        SettingSource("environment", {"MODEL_PATH": str(tmp_path), "PROXY": "false"}),
        SettingSource(".env", {"API_KEY": "secret"}),
    ]
    with pytest.raises(StartupError):
        cli.serve(sources, Terminal(printed))
    assert "Is MLX_API_KEY meant?" in printed.getvalue()
    assert "secret" not in printed.getvalue()
