"""openai 3.57, in an environment of its own, finds in each reply what its types demand.

CLIENTS_HOME=~/clients scripts/install_clients.sh sdk-openai
CLIENTS_HOME=~/clients python3 install_and_run.py --test -m clients tests/clients/test_newest_openai.py
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from start_llm.config.paths import DEMO_MODEL
from tests.clients.conftest import Endpoints, open_endpoints

SCRIPT = Path(__file__).with_name("newest_openai.py")
OURS = {
    "chat": {
        "choices.message.reasoning",
        "choices.message.reasoning_content",
        "choices.delta.reasoning_content",
        "usage.receipt",
    },
    "responses": {"store", "usage.receipt", "response.store", "response.usage.receipt"},
    "others": {
        "usage.receipt",
        "state",
        "context_window",
        "max_input_tokens",
        "max_model_len",
        "max_output_tokens",
        "vision",
        "reasoning",
    },
}
"""Fields that no type of the SDK has: what this server adds, and `store`, which OpenAI sends too."""

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def demo_endpoints(clients_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    with open_endpoints(tmp_path_factory, folder=DEMO_MODEL) as endpoints:
        yield endpoints


@pytest.mark.parametrize("port", [8080, 4000])
def test_its_types_hold_for_each_object(port: int, demo_endpoints: Endpoints, clients_home: Path) -> None:
    python = clients_home / "sdk-openai" / "bin" / "python"
    if not python.exists():
        pytest.skip("sdk-openai is not installed: scripts/install_clients.sh sdk-openai")
    url = f"http://127.0.0.1:{demo_endpoints.ports[port]}/v1"
    done = subprocess.run(
        [str(python), str(SCRIPT), url], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.pop("version").startswith("3.57.")
    assert {name: set(fields) for name, fields in report.items()} == OURS
