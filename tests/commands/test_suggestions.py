"""What was probably meant by a command or an option that there is not."""

from __future__ import annotations

import argparse

import pytest

from start_llm import cli
from start_llm.commands.parser import _FOREIGN_COMMANDS, _FOREIGN_OPTIONS, SuggestingParser, meant
from tests.commands.parsers import all_parsers, commands_of, options_of


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "suggested", "usage"),
    [
        (["sevre"], "serve", "start_llm"),
        (["satus"], "status", "start_llm"),
        (["Doctor"], "doctor", "start_llm"),
        (["list"], "models", "start_llm"),
        (["run"], "serve", "start_llm"),
        (["serve", "--modle", "x"], "--model", "start_llm serve"),
        (["serve", "--prot=80"], "--port", "start_llm serve"),
        (["serve", "--host", "x"], "--mlx-host", "start_llm serve"),
        (["serve", "--ctx-size", "9"], "--max-kv-size", "start_llm serve"),
        (["status", "--jason"], "--json", "start_llm status"),
        (["service", "install", "--prnt"], "--print", "start_llm service install"),
        (["service", "instal"], "install", "start_llm service"),
        (["launch", "cluade"], "claude", "start_llm launch"),
        (["launch", "--modl=x", "pi"], "--model", "start_llm launch"),
        (["settings", "--format", "markdwn"], "markdown", "start_llm settings"),
        (["rm", "a/b", "--yse"], "--yes", "start_llm rm"),
    ],
)
def test_what_was_meant_is_asked(
    words: list[str], suggested: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = error_of(capsys, *words)
    assert printed.splitlines()[-1] == f"Did you mean {suggested}?"
    assert printed.startswith(f"usage: {usage} ["), "the usage is that of the command"


@pytest.mark.parametrize("words", [["xyzzy"], ["serve", "--xyzzy"], ["fit", "a", "b"], ["serve", "--batch"]])
def test_nothing_is_suggested_for_what_is_like_nothing(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Did you mean" not in error_of(capsys, *words)


@pytest.mark.thorough
def test_every_command_and_option_is_found_from_a_slip_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    for path, parser in all_parsers(cli._parser()):
        names = [name for name in options_of(parser) if len(name) > 4]
        for name in names:
            assert meant(f"{name[:-2]}{name[-1]}{name[-2]}", names, {}) is not None, name
        for name in commands_of(parser):
            assert f"Did you mean {name}?" in error_of(capsys, *path, f"{name[0]}{name}")


def test_words_of_other_programs_mean_words_that_there_are() -> None:
    commands = commands_of(cli._parser())
    assert set(_FOREIGN_COMMANDS.values()) <= commands.keys()
    assert not commands.keys() & _FOREIGN_COMMANDS.keys()
    ours = options_of(commands["serve"])
    assert set(_FOREIGN_OPTIONS.values()) <= ours
    assert not ours & _FOREIGN_OPTIONS.keys()


def test_a_parser_without_commands_suggests_its_options() -> None:
    parser = SuggestingParser(exit_on_error=False)
    parser.add_argument("--colour")
    with pytest.raises(SystemExit):
        parser.parse_args(["--color", "x"])
    assert parser.parse_args(["--colour", "x"]) == argparse.Namespace(colour="x")
