"""The help text of `serve`, and folders on the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

import pytest

from start_llm import cli
from start_llm.config import settings
from start_llm.config.flags import FLAGS, variables_of, words_of
from start_llm.config.setting_types import OFF
from start_llm.config.settings import SettingSource, all_rows

ROWS = {row.name: row for row in all_rows()}


@pytest.fixture
def help_text(capsys, monkeypatch) -> str:
    monkeypatch.setenv("COLUMNS", "10000")
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    return capsys.readouterr().out


def test_each_flag_stands_under_the_section_of_its_setting(help_text):
    sections = {}
    for block in help_text.split("\n\n"):
        heading, _, lines = block.partition("\n")
        sections |= dict.fromkeys(re.findall(r"^  (--[a-z-]+)", lines, re.MULTILINE), heading.rstrip(":"))
    for flag in FLAGS:
        assert sections[flag.names[0]] == ROWS[flag.variable].section, flag
    assert sections["--no-proxy"] == "Proxy"
    assert len(re.findall(r"^[A-Z].*:$", help_text, re.MULTILINE)) == len(
        set(sections.values()) - {"options"}
    )


def test_each_flag_says_what_its_setting_says(help_text):
    for flag in FLAGS:
        row = ROWS[flag.variable]
        first = re.split(r"(?<=[.:;]) ", row.help)[0]
        (line,) = re.findall(rf"^  {flag.names[0]} .*(?:\n {{10,}}.*)?", help_text, re.MULTILINE)
        assert first in line
        assert f"[{row.name}" in line
    assert "[BATCH=4]" in help_text
    assert "[MEMORY_BUDGET=100%]" in help_text
    assert "says the same" not in help_text
    assert "wins over" not in help_text.partition("In brackets")[0]


@pytest.mark.parametrize("text", ["0", "0.0", "00", "0."])
def test_a_prompt_cache_of_nothing_is_off(text):
    options = cli._parser().parse_args(["serve", "--prompt-cache", text])
    assert variables_of(options) == {"PROMPT_CACHE": "false"}


def test_a_home_of_a_user_who_is_not_there_is_a_name_like_others():
    options = cli._parser().parse_args(["serve", "--model", "~nobody-of-this-name/x"])
    assert words_of(options) == ["--model", "~nobody-of-this-name/x"]


def test_further_models_are_kept_beside_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    options = cli._parser().parse_args(["serve", "--model", "a/b", "--model", "mine", "--model=c/d"])
    assert variables_of(options) == {"MODEL_PATH": "a/b", "MORE_MODELS": "mine,c/d"}
    assert words_of(options) == ["--model", "a/b", "--model", str(tmp_path / "mine"), "--model", "c/d"]


def test_flags_as_words_mean_the_same_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    given = [
        "--model",
        "mine",
        "--model-dir",
        "models",
        "--port",
        "81",
        "--temp",
        "0.5",
        "--demo",
        "--no-proxy",
    ]
    assert words_of(cli._parser().parse_args(["serve", *given])) == [
        *("--model", str(tmp_path / "mine"), "--model-dir", str(tmp_path / "models")),
        *("--mlx-port", "81", "--temperature", "0.5", "--demo", "--no-proxy"),
    ]
    repository = ["serve", "--model", "lab/tiny"]
    assert words_of(cli._parser().parse_args(repository)) == repository[1:]


def test_a_folder_on_the_command_line_is_seen_from_where_the_command_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def model_dir_of(folder: str) -> str:
        return variables_of(cli._parser().parse_args(["serve", "--model-dir", folder]))["MODEL_DIR"]

    assert model_dir_of("models") == str(tmp_path / "models")
    assert model_dir_of("/models") == "/models"
    assert model_dir_of("~/models") == "~/models"


@pytest.mark.parametrize("text", ["off", "OFF", " Off "])
def test_off_is_no_folder_where_a_setting_says_so(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def options(*words: str) -> argparse.Namespace:
        return cli._parser().parse_args(["serve", *words])

    def folder(variables: Mapping[str, str]) -> str | None:
        return settings.load(SettingSource("here", variables)).ssd.folder

    turned_off = options("--ssd-cache-dir", text)
    assert folder(variables_of(turned_off)) == folder({"SSD_CACHE_DIR": text}) == OFF
    assert words_of(turned_off) == ["--ssd-cache-dir", text.strip()]
    assert variables_of(options("--ssd-cache-dir", "./off")) == {"SSD_CACHE_DIR": str(tmp_path / "off")}
    assert variables_of(options("--model-dir", "off")) == {"MODEL_DIR": str(tmp_path / "off")}
