"""`.env` as users write it: what is read, and what is refused with its line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from start_llm.config.env_file import read_env_file
from start_llm.config.settings import all_rows
from start_llm.core.errors import SettingsError

ROOT = Path(__file__).resolve().parents[2]
KNOWN = [row.name for row in all_rows()]


def written(folder: Path, content: bytes) -> Path:
    path = folder / ".env"
    path.write_bytes(content)
    return path


def refusal(folder: Path, content: bytes) -> str:
    path = written(folder, content)
    with pytest.raises(SettingsError) as refused:
        read_env_file(path, KNOWN)
    return str(refused.value).replace(str(path), "FILE")


def test_values_are_read_with_quotes_comments_and_names_of_others(tmp_path):
    content = b"\xef\xbb\xbf# a comment\n\nexport BATCH=3 # why\nMODEL_PATH='/a b'\n"
    content += b"HF_TOKEN=x\nTRACE=on\nPATH=/bin\n"
    assert read_env_file(written(tmp_path, content), KNOWN) == {
        "BATCH": "3",
        "MODEL_PATH": "/a b",
        "HF_TOKEN": "x",
        "TRACE": "on",
        "PATH": "/bin",
    }


def test_without_a_file_there_are_none(tmp_path):
    assert read_env_file(tmp_path / ".env", KNOWN) == {}


def test_a_byte_of_another_encoding_is_reported_with_its_line(tmp_path):
    assert refusal(tmp_path, b"BATCH=3\nMODEL_PATH=/mod\xe8les\n") == (
        "FILE, line 2: the byte 0xe8 is not UTF-8. Save the file as UTF-8."
    )


@pytest.mark.parametrize("line", [b"BATCH 3", b"BATCH", b"MODEL_PATH='/a", b"=3", b'MODEL_PATH="a" b'])
def test_a_line_that_does_not_parse_is_reported(line, tmp_path):
    assert refusal(tmp_path, b"# one\n\n\n" + line + b"\n") == "FILE, line 4: expected NAME=value."


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("BACTH", "BATCH"),
        ("BATC", "BATCH"),
        ("BATCHH", "BATCH"),
        ("BITCH", "BATCH"),
        ("batch", "BATCH"),
        ("MLX_PROT", "MLX_PORT"),
        ("MODELPATH", "MODEL_PATH"),
        ("DEFAULT_TOPK", "DEFAULT_TOP_K"),
    ],
)
def test_a_slip_in_a_name_is_refused_with_the_name_that_was_meant(name, meant, tmp_path):
    message = refusal(tmp_path, f"PROXY=off\n{name}=2\n".encode())
    assert message == f"FILE, line 2: there is no setting {name}. Did you mean {meant}?"


def test_all_lines_that_are_refused_are_reported_at_once(tmp_path):
    assert refusal(tmp_path, b"BACTH=2\nBATCH=2\nwhat\n").count("FILE, line") == 2


@pytest.mark.thorough
@pytest.mark.parametrize("command", [["serve", "--demo"], ["config", "pi"]])
def test_a_refusal_is_a_sentence_and_not_a_traceback(command, tmp_path):
    (tmp_path / "start_llm").symlink_to(ROOT / "start_llm")
    code = "import sys; from start_llm.config import paths; from pathlib import Path; "
    code += "paths.ENV_FILE = Path('.env').absolute(); from start_llm.cli import main; sys.exit(main())"
    written(tmp_path, b"\xe8")
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{tmp_path}/.env, line 1: the byte 0xe8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_file_that_others_may_not_read_is_reported(tmp_path):
    path = written(tmp_path, b"BATCH=3\n")
    path.chmod(0o600)
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(SettingsError, match=r"\.env cannot be read: Permission denied\."):
            read_env_file(path, KNOWN)
    finally:
        os.seteuid(0)


def test_a_folder_in_its_place_is_reported(tmp_path):
    (tmp_path / ".env").mkdir()
    with pytest.raises(SettingsError, match=r"\.env cannot be read: Is a directory\."):
        read_env_file(tmp_path / ".env", KNOWN)
