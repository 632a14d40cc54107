"""The commands that the README shows do what it says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import wait_for_health

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
CURL_LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("curl ")]


@pytest.fixture(scope="module")
def server_on_8080() -> Iterator[None]:
    command = [sys.executable, "-m", "start_llm", "serve", "--no-proxy", "--demo", "--mlx-port", "8080"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        wait_for_health(process, 8080)
        yield
    finally:
        process.terminate()
        assert process.wait(10) == 0


@pytest.mark.usefixtures("server_on_8080")
@pytest.mark.parametrize("line", CURL_LINES)
def test_curl_line_gets_an_answer(line: str) -> None:
    done = subprocess.run(shlex.split(line), capture_output=True, text=True, timeout=60, check=True)
    if " -N " in line:
        events = [text.removeprefix("data: ") for text in done.stdout.splitlines() if text]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "stop"
    else:
        assert not json.loads(done.stdout).get("error")


def test_readme_shows_the_endpoints_with_curl() -> None:
    shown = "\n".join(CURL_LINES)
    assert all(
        path in shown
        for path in (
            "/v1/models",
            "/v1/chat/completions",
            "/v1/completions",
            "/v1/messages",
            "/v1/responses",
            "/stats",
        )
    )


def test_readme_names_the_test_command() -> None:
    assert any("python install_and_run.py --test" in block for block in BLOCKS)
