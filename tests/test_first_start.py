"""The first start on a Mac, with a machine that is none: what is said before the default model comes."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm import app as app_module
from start_llm.app import App
from start_llm.core.errors import ModelError
from start_llm.library.hub import Hub
from start_llm.library.well_known import DEFAULT_APPLE_MODEL
from start_llm.models.machines import machine_named
from start_llm.telemetry.terminal import Terminal
from tests.flat_settings import settings_of


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a server on a fake machine, and return what it printed until it looked for its model."""
    monkeypatch.setattr("start_llm.library.hub.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("start_llm.wiring.model_places.own_machine", lambda _: machine_named("M2 16 GB"))

    def started(*, is_mac: bool, model_path: str | None = None, model_dir: str | None = None) -> str:
        monkeypatch.setattr("start_llm.wiring.model_places.is_apple_silicon", lambda: is_mac)
        output = io.StringIO()

        def resolved(name: str) -> Path:
            output.write(f"[{name} is looked for]\n")
            raise ModelError("not here")

        monkeypatch.setattr(app_module, "resolve", resolved)
        settings = settings_of(
            model_path=model_path, model_dir=model_dir, server_port=0, proxy_is_on=False, traces=False
        )
        with pytest.raises(ModelError, match="not here"):
            App(settings, Terminal(output)).start()
        return output.getvalue()

    yield started


def test_a_user_of_a_mac_is_warned_before_the_download(start: Any, tmp_path: Path):
    lines = start(is_mac=True).splitlines()
    assert lines[0] == f"The first start downloads {DEFAULT_APPLE_MODEL}: 16.8 GB."
    assert "M2 16 GB lets models use 10.1 GiB" in lines[1]
    assert str(tmp_path) in lines[2]
    assert "does not fit" in lines[3]
    assert sum(line.startswith("  mlx-community/") for line in lines) == 3
    assert lines[-1] == f"[{DEFAULT_APPLE_MODEL} is looked for]"


def test_who_chose_a_model_is_shown_nothing(start: Any):
    assert start(is_mac=True, model_path="lab/tiny") == "[lab/tiny is looked for]\n"


def test_who_has_a_folder_of_models_is_shown_nothing(start: Any, tmp_path: Path):
    for name in ("lab/tiny", "lab/small"):
        folder = tmp_path / "mine" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    mine = str(tmp_path / "mine")
    path = tmp_path / "mine" / "lab" / "small"
    assert start(is_mac=True, model_dir=mine, model_path="lab/small") == f"[{path} is looked for]\n"
    assert start(is_mac=True, model_dir=mine, model_path="lab/other") == "[lab/other is looked for]\n"


def test_a_model_that_is_there_is_not_judged_again(start: Any, tmp_path: Path):
    repository = Hub(tmp_path).folder_of(DEFAULT_APPLE_MODEL)
    (repository / "snapshots" / "c").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c")
    for name in ("config.json", "model.safetensors"):
        (repository / "snapshots" / "c" / name).write_text("{}")
    assert start(is_mac=True) == f"[{DEFAULT_APPLE_MODEL} is looked for]\n"


def test_elsewhere_the_demo_model_is_the_default_and_nothing_is_said(start: Any):
    (line,) = start(is_mac=False).splitlines()
    assert line.endswith("models/demo is looked for]")
