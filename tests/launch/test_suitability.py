"""Which clients suit a model: reported by `clients`, by `launch` before it starts one, and by the start."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from start_llm.config.paths import DEMO_MODEL
from start_llm.launch.clients import CLIENTS
from start_llm.launch.suitability import judge, unsuited_clients
from tests.launch.home import ROOT, Home
from tests.serving import Server, serving

CUT_BY_THE_DEMO = ["claude", "openclaw", "codex", "qwen"]
"""Clients whose instructions have more than the 16,000 characters that the demo model's template shows."""


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving(DEMO_MODEL) as server:
        yield server


def in_four_characters(system: str) -> int:
    return len(system) // 4


def test_a_client_needs_twice_its_own_prompt() -> None:
    pi = CLIENTS["pi"]
    own = sum(pi.prompt) // 4
    assert judge(2 * own, in_four_characters)(pi) == ""
    assert judge(2 * own - 1, in_four_characters)(pi) == (
        f"the client's own prompt has about {own:,} tokens, and the window {2 * own - 1:,}"
    )


def test_a_large_window_suits_all_and_a_tiny_one_none() -> None:
    assert unsuited_clients(131_072, in_four_characters) == {}
    assert unsuited_clients(1000, in_four_characters).keys() == CLIENTS.keys()


def test_where_the_longest_prompt_is_cut_off_each_client_is_judged_by_its_own() -> None:
    reasons = unsuited_clients(131_072, lambda system: in_four_characters(system[:16_000]))
    assert list(reasons) == CUT_BY_THE_DEMO
    assert {*reasons.values()} == {"the model's template cuts the client's own prompt off"}


@pytest.mark.parametrize("limit", [2000, 2600 - 400])
def test_a_template_that_cuts_the_prompt_off_does_not_suit(limit: int) -> None:
    def count(system: str) -> int:
        return in_four_characters(system[:limit])

    assert judge(131_072, count)(CLIENTS["pi"]) == "the model's template cuts the client's own prompt off"


def test_nobody_is_judged_by_a_server_that_does_not_count() -> None:
    assert unsuited_clients(1000, lambda _: None) == {}


def test_all_clients_are_judged_by_the_longest_prompt_if_the_template_shows_it_whole() -> None:
    counted: list[int] = []

    def count(system: str) -> int:
        counted.append(len(system))
        return in_four_characters(system)

    clients = unsuited_clients(6000, count)
    longest = max(client.prompt.system for client in CLIENTS.values())
    assert counted == [longest, longest - 400]
    assert clients.keys() == {name for name, client in CLIENTS.items() if sum(client.prompt) > 4 * 3000}
    assert clients.keys() == CLIENTS.keys() - {"pi", "continue"}


@pytest.mark.thorough
def test_the_list_of_clients_says_who_suits_the_model(home: Home, demo: Server) -> None:
    environment = home.environment("pi", MLX_PORT=str(demo.port), PROXY="false")
    lines = home.run("clients", env=environment).stdout.splitlines()
    cut = [line.split()[0] for line, after in pairwise(lines) if "does not suit the model" in after]
    assert cut == CUT_BY_THE_DEMO
    assert lines[-1] == f"  Judged for demo, which is served at {demo.url}."


@pytest.mark.long
def test_who_launches_a_client_that_does_not_suit_is_warned_before_it_starts(
    home: Home, demo: Server
) -> None:
    done = home.run("launch", "--base-url", demo.url, "claude", name="claude")
    assert done.returncode == 0, "without a terminal nobody is asked"
    assert done.stderr.startswith(
        "claude does not suit demo: the model's template cuts the client's own prompt off.\n"
        "These suit it: pi, opencode, cline, continue. Try: start_llm launch pi\n"
    )
    assert home.client_start().arguments == []
    done = home.run("launch", "--base-url", demo.url, "pi")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.thorough
@pytest.mark.parametrize(("answer", "status", "starts"), [("n", 1, False), ("", 1, False), ("y", 0, True)])
def test_in_a_terminal_the_user_is_asked(
    answer: str, status: int, starts: bool, home: Home, demo: Server
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "start_llm", "launch", "--base-url", demo.url, "claude"]
    with subprocess.Popen(
        command, env=home.environment("claude"), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        printed = b""
        while b"[y/N] " not in printed:
            printed += os.read(ours, 1000)
        os.write(ours, f"{answer}\n".encode())
        assert process.wait(30) == status
    os.close(ours)
    assert (home.folder / "received.json").exists() == starts


def test_the_start_proposes_a_client_that_suits(
    demo: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = demo.printed()
    assert "Or start a coding client (pi, opencode, cline, continue) in the folder to work in:" in printed
    assert "# claude, openclaw, codex, qwen: not with this model" in printed
