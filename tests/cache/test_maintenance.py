"""`start_llm cache`: what the folder of the disk tier holds, whether it is whole, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.cli import main
from start_llm.storage.private_files import Lock
from tests.cache.test_guards_of_disk import cache_conversation, files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache_conversation(tmp_path, has_state=True)
    return tmp_path


def run(*arguments: object) -> int:
    return main(["cache", *map(str, arguments)])


@pytest.mark.parametrize("flag", ["--ssd-cache-dir", "--paged-ssd-cache-dir"])
def test_it_tells_what_is_there(folder: Path, flag: str, capsys: pytest.CaptureFixture[str]):
    assert run("status", flag, folder) == 0
    output = capsys.readouterr().out
    pages = list((folder / "pages").rglob("*.safetensors"))
    assert f"{len(pages)} files, {sum(path.stat().st_size for path in pages):,} bytes" in output
    assert "states" in output


def test_the_environment_names_the_folder_too(folder: Path, monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SSD_CACHE_DIR", str(folder))
    assert run("verify") == 0
    assert "Damaged files: 0." in capsys.readouterr().out


def test_it_names_the_damaged_files(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = files(folder)[2]
    path.write_bytes(path.read_bytes()[:-1])
    assert run("verify", "--ssd-cache-dir", folder) == 1
    output = capsys.readouterr().out
    assert f"{path.relative_to(folder)}: truncated" in output
    assert "Damaged files: 1." in output


def test_it_removes_what_is_there(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "mine.txt").write_text("mine")
    assert run("clear", "--ssd-cache-dir", folder) == 0
    assert "Removed" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert run("clear", "--ssd-cache-dir", folder) == 0
    assert "Removed 0 files" in capsys.readouterr().out


def test_it_removes_nothing_from_a_running_server(folder: Path, capsys: pytest.CaptureFixture[str]):
    lock = Lock(folder / "lock")
    assert lock.take()
    assert run("clear", "--ssd-cache-dir", folder) == 2
    assert "Stop that server first" in capsys.readouterr().err
    assert files(folder)
    lock.release()


@pytest.mark.parametrize("action", ["status", "verify"])
def test_a_folder_that_is_not_there_is_an_error(
    tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]
):
    assert run(action, "--ssd-cache-dir", tmp_path / "none") == 2
    assert f"SSD_CACHE_DIR='{tmp_path / 'none'}': No such file or directory." in capsys.readouterr().err


@pytest.mark.parametrize("action", ["status", "verify"])
def test_an_empty_folder_is_fine(tmp_path: Path, action: str, capsys: pytest.CaptureFixture[str]):
    assert run(action, "--ssd-cache-dir", tmp_path) == 0
    assert f"{tmp_path} holds no files of the disk tier." in capsys.readouterr().out


def test_without_a_folder_there_is_nothing_to_tell(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("SSD_CACHE_DIR", "off")
    assert run("status") == 2
    assert "SSD_CACHE_DIR=off: there is no disk tier" in capsys.readouterr().err


@pytest.mark.thorough
def test_it_needs_no_model_and_no_mlx():
    code = "import sys; import start_llm.cli; print('mlx' in sys.modules or 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
