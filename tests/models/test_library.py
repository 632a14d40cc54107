"""The models on this machine: where they are found, what is shown of them, and what a removal may touch."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import ModelError
from start_llm.core.model_listing import LibraryEntry, Machine
from start_llm.library.folders import Library, Place, places, shape_in
from start_llm.library.hub import Hub
from start_llm.models.machines import GIB

MACHINE = Machine(
    *("Toy 16 GB", "Toy", 16 * GIB, 10 * GIB), bandwidth_gbs=100, tflops=10, fuses_attention=True
)


class Clock:
    """Shows what it is set to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def qwen3(tiny_model) -> Path:
    return tiny_model("qwen3", hidden=64, layers=1)


def copied(model: Path, folder: Path, **config: Any) -> Path:
    shutil.copytree(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def in_hub(cache: Path, model: Path, name: str, commit: str = "c1", *, is_named: bool = True) -> Path:
    """A snapshot as the hub's library lays it out."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for path in model.iterdir():
        blob = repository / "blobs" / f"{commit}{path.name}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    if is_named:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
    return snapshot


def library(*where: Place, **options: Any) -> Library:
    return Library(where, MACHINE, **options)


def only(library: Library) -> LibraryEntry:
    (entry,) = library.entries()
    return entry


def test_a_model_in_each_kind_of_place_is_found(qwen3, tmp_path):
    copied(qwen3, tmp_path / "plain" / "mine")
    copied(qwen3, tmp_path / "studio" / "owner" / "theirs")
    snapshot = in_hub(tmp_path / "hub", qwen3, "lab/model--x")
    entries = library(
        Place("models", tmp_path / "plain"),
        Place("hub", tmp_path / "hub"),
        Place("lm-studio", tmp_path / "studio"),
        Place("lm-studio", tmp_path / "not there"),
    ).entries()
    assert [(entry.repo_id, entry.place) for entry in entries] == [
        ("mine", "models"),
        ("lab/model--x", "hub"),
        ("owner/theirs", "lm-studio"),
    ]
    assert entries[1].path == str(snapshot)
    assert all(entry.complete and entry.supported and not entry.serving for entry in entries)


def test_an_entry_says_what_the_model_is(qwen3, tmp_path):
    folder = copied(qwen3, tmp_path / "m", quantization={"bits": 4, "group_size": 64}, vision_config={"a": 1})
    entry = only(library(Place("models", tmp_path)))
    assert entry.model_type == "qwen3"
    assert entry.size_bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert (entry.quant_bits, entry.vision) == (4, True)
    assert entry.report is not None
    assert entry.report.fits
    assert entry.report.context_tokens == 131_072
    assert (entry.report.decode_tps or 0) > 0


@pytest.mark.parametrize(
    ("config", "supported", "is_assessed"),
    [
        ({"model_type": "nothing"}, False, True),
        ({"model_file": "mine.py"}, False, True),
        ({"model_type": "rwkv7"}, True, False),
        ({"model_type": None}, False, True),
        ({"model_type": 5}, False, True),
        ({"num_hidden_layers": None}, True, False),
    ],
)
def test_what_mlx_lm_cannot_run_or_nobody_can_judge_is_marked(
    qwen3, tmp_path, config, supported, is_assessed
):
    copied(qwen3, tmp_path / "m", **config)
    entry = only(library(Place("models", tmp_path)))
    assert entry.supported is supported
    assert (entry.report is not None) is is_assessed


@pytest.mark.parametrize("text", ["{", "[]", "", "\xff"])
def test_a_config_that_cannot_be_read_leaves_an_entry_without_an_assessment(qwen3, tmp_path, text):
    folder = copied(qwen3, tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    entry = only(library(Place("models", tmp_path)))
    assert (entry.model_type, entry.complete, entry.report) == (None, False, None)
    with pytest.raises(ModelError, match=r"config\.json is missing, or is no JSON object"):
        shape_in("m", folder)


def test_what_lacks_files_is_marked(qwen3, tmp_path):
    folder = copied(qwen3, tmp_path / "m")
    (folder / "model.safetensors").unlink()
    entry = only(library(Place("models", tmp_path)))
    assert (entry.complete, entry.report) == (False, None)


def test_a_snapshot_whose_blobs_are_gone_is_marked(qwen3, tmp_path):
    snapshot = in_hub(tmp_path, qwen3, "lab/x")
    (snapshot / "model.safetensors").resolve().unlink()
    entry = only(library(Place("hub", tmp_path)))
    assert (entry.repo_id, entry.complete) == ("lab/x", False)


def test_a_download_that_has_just_begun_is_listed_as_incomplete(tmp_path):
    blobs = tmp_path / "models--lab--x" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"x" * 10)
    entry = only(library(Place("hub", tmp_path)))
    assert (entry.repo_id, entry.complete, entry.size_bytes) == ("lab/x", False, 10)


def test_data_sets_and_files_of_other_kinds_are_no_models(tmp_path):
    (tmp_path / "datasets--lab--x" / "snapshots" / "c").mkdir(parents=True)
    (tmp_path / "models--lab--gguf" / "snapshots" / "c").mkdir(parents=True)
    (tmp_path / "version.txt").write_text("1")
    assert library(Place("hub", tmp_path)).entries() == []


def test_of_several_snapshots_the_named_one_counts_else_the_newest(qwen3, tmp_path):
    older = in_hub(tmp_path, qwen3, "lab/x", "c1", is_named=False)
    newer = in_hub(tmp_path, qwen3, "lab/x", "c2", is_named=False)
    os.utime(older, (1, 1))
    assert only(library(Place("hub", tmp_path))).path == str(newer)
    (tmp_path / "models--lab--x" / "refs").mkdir()
    (tmp_path / "models--lab--x" / "refs" / "main").write_text("c1\n")
    assert only(library(Place("hub", tmp_path))).path == str(older)


def test_the_list_is_read_again_after_thirty_seconds(qwen3, tmp_path):
    clock = Clock()
    models = library(Place("models", tmp_path), clock=clock)
    assert models.entries() == []
    copied(qwen3, tmp_path / "m")
    clock.now = 29.9
    assert models.entries() == []
    clock.now = 30.0
    assert only(models).repo_id == "m"


def test_no_tensor_is_read(qwen3, tmp_path):
    """A file that is all header, with nothing behind it, is judged like a whole one."""
    folder = copied(qwen3, tmp_path / "m")
    weights = folder / "model.safetensors"
    whole = only(library(Place("models", tmp_path))).report
    size = int.from_bytes(weights.read_bytes()[:8], "little")
    os.truncate(weights, 8 + size)
    assert only(library(Place("models", tmp_path))).report == whole


def test_the_loaded_model_is_serving_also_behind_a_link(qwen3, tmp_path):
    folder = copied(qwen3, tmp_path / "real")
    (tmp_path / "link").symlink_to(folder)
    entries = library(Place("models", tmp_path), serving=lambda: (folder,)).entries()
    assert [(entry.repo_id, entry.serving) for entry in entries] == [("link", True), ("real", True)]


def test_a_model_is_found_by_its_name_or_the_end_of_it(qwen3, tmp_path):
    folder = copied(qwen3, tmp_path / "owner" / "m")
    models = library(Place("lm-studio", tmp_path))
    assert models.folder("owner/m") == models.folder("m") == folder
    assert models.folder("other/m") is None


# ---------------------------------------------------------------------------------------------------- removal


def test_a_repository_of_the_hub_goes_with_its_blobs(qwen3, tmp_path):
    in_hub(tmp_path, qwen3, "lab/x")
    in_hub(tmp_path, qwen3, "lab/y")
    models = library(Place("hub", tmp_path))
    assert models.remove("lab/x") == [tmp_path / "models--lab--x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models--lab--y"]
    assert only(models).repo_id == "lab/y", "the list is read again at once"


def test_of_a_link_the_link_goes_and_not_what_it_leads_to(qwen3, tmp_path):
    outside = copied(qwen3, tmp_path / "outside")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "m").symlink_to(outside)
    library(Place("model-dir", tmp_path / "place")).remove("m")
    assert list((tmp_path / "place").iterdir()) == []
    assert (outside / "config.json").is_file()


def test_a_link_inside_of_a_model_is_not_followed(qwen3, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    folder = copied(qwen3, tmp_path / "place" / "m")
    (folder / "link").symlink_to(outside)
    library(Place("model-dir", tmp_path / "place")).remove("m")
    assert not folder.exists()
    assert (outside / "precious").read_text() == "x"


def test_what_is_reached_through_a_linked_owner_stays(qwen3, tmp_path):
    outside = copied(qwen3, tmp_path / "outside" / "m")
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "owner").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="leads out of"):
        library(Place("lm-studio", tmp_path / "place")).remove("owner/m")
    assert (outside / "config.json").is_file()


def test_the_models_of_the_repository_stay(qwen3, tmp_path):
    copied(qwen3, tmp_path / "m")
    with pytest.raises(ModelError, match="part of this repository"):
        library(Place("models", tmp_path, is_ours=False)).remove("m")
    assert (tmp_path / "m" / "config.json").is_file()


@pytest.mark.parametrize("name", ["", "nothing", "..", "../m", "/", "m/../m", "."])
def test_a_name_that_is_not_listed_removes_nothing(qwen3, tmp_path, name):
    copied(qwen3, tmp_path / "m")
    with pytest.raises(ModelError, match="There is no model"):
        library(Place("model-dir", tmp_path)).remove(name)
    assert (tmp_path / "m" / "config.json").is_file()


def test_a_folder_that_the_system_keeps_is_reported(qwen3, tmp_path, monkeypatch):
    copied(qwen3, tmp_path / "m")

    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(ModelError, match="cannot be removed: Permission denied"):
        library(Place("model-dir", tmp_path)).remove("m")


def test_the_places_of_a_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    user_places = places(tmp_path / "own", tmp_path / "chosen", Hub(tmp_path / "cache"))
    assert [(place.name, place.is_ours) for place in user_places] == [
        ("models", False),
        ("model-dir", True),
        ("hub", True),
        ("lm-studio", True),
        ("lm-studio", True),
    ]
    assert user_places[2].folder == tmp_path / "cache"
    assert user_places[3].folder == tmp_path / ".lmstudio" / "models"
    assert "model-dir" not in [place.name for place in places(tmp_path, None, Hub(tmp_path))]
