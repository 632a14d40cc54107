"""Files of the hub: looked at before they come, gone on with, and never taken for what they are not."""

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

from start_llm.core.errors import HubError, ModelError
from start_llm.library import hub as hub_module
from start_llm.library.hub import Hub
from start_llm.library.hub_fetch import Stopped
from start_llm.library.progress import Progress
from tests.models.fake_hub import COMMIT, WEIGHTS, FakeHub, digest, hub_of

SIZE = 300_000
FILES = {
    "config.json": b"{}",
    WEIGHTS: os.urandom(SIZE),
    "sub/more.json": b"[]",
    "../outside.json": b"{}",
    "tokenizer.py": b"import os",
}
REPO = "lab/tiny"


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with hub_of(dict(FILES)) as running:
        yield running


def hub_for(server: FakeHub, cache: Path, **more: Any) -> Hub:
    return Hub(cache, pause=lambda _: None, endpoint=server.url, **more)


def fetched(hub: Hub, progress: Progress | None = None) -> Path:
    return hub.fetch(hub.describe(REPO), progress or Progress())


def partial(hub: Hub) -> Path:
    (path,) = hub.folder_of(REPO).glob("blobs/*.incomplete")
    return path


def test_what_came_is_found_by_the_hubs_own_library_without_a_network(server, tmp_path):
    folder = fetched(hub_for(server, tmp_path))
    assert Path(snapshot_download(REPO, cache_dir=tmp_path, local_files_only=True)) == folder
    came = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert came == ["config.json", WEIGHTS, "sub/more.json"]
    assert (folder / WEIGHTS).readlink() == Path("../../blobs") / digest(WEIGHTS, FILES[WEIGHTS])
    assert (folder / "sub" / "more.json").read_bytes() == b"[]"
    assert not (tmp_path / "outside.json").exists()


@pytest.mark.thorough
def test_a_download_that_is_not_whole_is_no_snapshot(server, tmp_path):
    hub = hub_for(server, tmp_path)
    server.broken_after = 100_000
    with pytest.raises(HubError):
        fetched(hub)
    assert hub.snapshot(REPO) is None
    server.broken_after = None
    assert hub.snapshot(REPO) is None
    assert fetched(hub) == hub.snapshot(REPO)


@pytest.mark.thorough
def test_progress_counts_what_was_there_before(server, tmp_path):
    server.broken_after = 100_000
    first, second = Progress(), Progress()
    with pytest.raises(HubError):
        fetched(hub_for(server, tmp_path), first)
    assert (first.received_bytes, first.files_done, first.current_file) == (100_002, 1, WEIGHTS)
    server.broken_after = None
    fetched(hub_for(server, tmp_path), second)
    assert second.received_bytes == second.total_bytes == SIZE + 4
    assert (second.files_done, second.files_total, second.current_file) == (3, 3, None)
    assert server.sent == SIZE


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    hub = hub_for(server, tmp_path)
    server.broken_after = 100_000
    with pytest.raises(HubError):
        fetched(hub)
    server.broken_after, server.ignores_range = None, True
    progress = Progress()
    assert (fetched(hub, progress) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert progress.received_bytes == SIZE + 4


def test_a_partial_file_that_is_too_long_starts_again(server, tmp_path):
    hub = hub_for(server, tmp_path)
    blobs = hub.folder_of(REPO) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest(WEIGHTS, FILES[WEIGHTS])}.incomplete").write_bytes(b"x" * (SIZE + 1))
    assert (fetched(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_wrong_contents_are_thrown_away_and_reported(server, tmp_path):
    hub = hub_for(server, tmp_path)
    blobs = hub.folder_of(REPO) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest(WEIGHTS, FILES[WEIGHTS])}.incomplete").write_bytes(b"x" * 1000)
    with pytest.raises(ModelError, match=r"model\.safetensors of 'lab/tiny' came with other contents"):
        fetched(hub)
    assert list(blobs.glob("*.incomplete")) == []
    assert (fetched(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_a_small_file_with_wrong_contents_is_found_too(server, tmp_path):
    repository = hub_for(server, tmp_path).describe(REPO)
    server.files["config.json"] = b"[]"
    server.etag = None
    with pytest.raises(ModelError, match=r"config\.json of 'lab/tiny' has changed on the hub"):
        hub_for(server, tmp_path).fetch(repository, Progress())


def test_contents_that_changed_on_the_hub_are_not_mixed(server, tmp_path):
    server.etag = "e" * 64
    with pytest.raises(ModelError, match=r"model\.safetensors of 'lab/tiny' has changed on the hub"):
        fetched(hub_for(server, tmp_path))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("status", "kind"), [(500, HubError), (503, HubError), (403, ModelError), (404, ModelError)]
)
def test_a_refusal_of_a_file_is_reported_with_its_status(server, tmp_path, status, kind):
    hub = hub_for(server, tmp_path)
    repository = hub.describe(REPO)
    server.status = status
    with pytest.raises(kind, match=f"The hub answered {status} for config.json"):
        hub.fetch(repository, Progress())
    assert len(server.downloads("config.json")) == (5 if kind is HubError else 1)


def test_a_download_stops_when_it_is_asked_to(server, tmp_path):
    hub, progress = hub_for(server, tmp_path), Progress()

    def stop() -> None:
        progress.stopping = progress.received_bytes > 100_000

    server.piece_s = 0.01
    progress.on_piece = stop
    with pytest.raises(Stopped):
        fetched(hub, progress)
    assert 100_000 < partial(hub).stat().st_size < SIZE


@pytest.mark.thorough
def test_two_processes_do_not_write_to_one_file(server, tmp_path):
    hub = hub_for(server, tmp_path)
    server.broken_after = 100_000
    with pytest.raises(HubError):
        fetched(hub)
    with partial(hub).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="Another process downloads"):
            fetched(hub)
        assert hub.drop_partial(REPO) == 0
    assert hub.drop_partial(REPO) == 1
    assert hub.drop_partial("lab/never") == 0


def test_a_partial_file_of_another_program_stays(server, tmp_path):
    hub = hub_for(server, tmp_path)
    theirs = hub.folder_of(REPO) / "blobs" / f"{'a' * 64}.1234abcd.incomplete"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"x")
    assert hub.drop_partial(REPO) == 0
    assert theirs.is_file()


def test_a_partial_file_of_another_user_stays(server, tmp_path, monkeypatch):
    hub = hub_for(server, tmp_path)
    server.broken_after = 100_000
    with pytest.raises(HubError):
        fetched(hub)
    path = partial(hub)
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "denied")))
    assert hub.drop_partial(REPO) == 0
    assert path.is_file()


def test_a_disk_without_room_is_found_before_anything_comes(server, tmp_path):
    hub = hub_for(server, tmp_path, free_bytes=lambda _: 2**30 + SIZE)
    with pytest.raises(ModelError, match=r"needs 0\.0 GB more in .*\. Free are 1\.1 GB") as refused:
        fetched(hub)
    assert "HF_HUB_CACHE" in str(refused.value)
    assert server.sent == 0
    fetched(hub_for(server, tmp_path))
    assert fetched(hub), "what is there needs no room"


def test_a_folder_that_cannot_be_written_is_named(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written"):
        hub_for(server, tmp_path / "file", free_bytes=lambda _: 2**40).fetch(
            hub_for(server, tmp_path).describe(REPO), Progress()
        )


def test_the_free_space_is_that_of_the_first_folder_that_is_there(tmp_path):
    asked: list[Path] = []
    hub = Hub(tmp_path / "a" / "b", free_bytes=lambda folder: asked.append(folder) or 5)
    assert hub.free_space() == 5
    assert asked == [tmp_path]


def test_a_small_file_is_read_without_being_kept(server, tmp_path):
    hub = hub_for(server, tmp_path)
    repository = hub.describe(REPO)
    assert hub.read(repository, "config.json") == b"{}"
    assert hub.read(repository, "nothing.json") is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_to_be_read_is_refused(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "_MOST_READ", 1000)
    hub = hub_for(server, tmp_path)
    with pytest.raises(ModelError, match="300,000 bytes, more than is read"):
        hub.read(hub.describe(REPO), WEIGHTS)


def test_a_repository_without_a_model_is_refused(tmp_path):
    with (
        hub_of({"notes.md": b"#"}) as server,
        pytest.raises(ModelError, match="none of the files of a model"),
    ):
        hub_for(server, tmp_path).describe(REPO)


@pytest.mark.parametrize(
    ("name", "words"), [("lab/nothing", "cannot be downloaded: 404"), ("lab/a--b", "cannot be downloaded")]
)
def test_a_repository_that_is_not_there_is_named(server, tmp_path, name, words):
    with pytest.raises(ModelError, match=words):
        hub_for(server, tmp_path).describe(name)


def test_a_hub_that_does_not_answer_is_a_matter_of_the_network(tmp_path):
    with pytest.raises(HubError):
        Hub(tmp_path, endpoint="http://127.0.0.1:9").describe(REPO)


def test_a_page_in_place_of_the_hubs_answer_is_a_matter_of_the_network(server, tmp_path):
    """Of a mirror in maintenance, or of a proxy that wants a name and a password."""
    server.page = b"<html>Please log in.</html>"
    hub = hub_for(server, tmp_path)
    for ask in (lambda: hub.describe(REPO), lambda: hub.search("tiny", 3)):
        with pytest.raises(HubError, match="The hub's answer is not JSON"):
            ask()


def test_redirects_without_end_are_a_matter_of_the_network(server, tmp_path):
    hub = hub_for(server, tmp_path)
    repository = hub.describe(REPO)
    server.redirects = True
    for ask in (
        lambda: hub.describe(REPO),
        lambda: hub.search("tiny", 3),
        lambda: hub.read(repository, "config.json"),
        lambda: hub.fetch(repository, Progress()),
    ):
        with pytest.raises(HubError, match="The connection to the hub failed"):
            ask()


def test_weights_that_no_package_loads_do_not_come(tmp_path):
    """Checkpoints of a training, and weights that are there a second time in the layout of their makers."""
    names = [
        *("config.json", WEIGHTS, "model-00002-of-00002.safetensors", "adapters.safetensors"),
        *("consolidated.safetensors", "consolidated.00.safetensors", "original/consolidated.00.safetensors"),
        *("checkpoint-500/model.safetensors", "checkpoint-500/config.json"),
    ]
    with hub_of(dict.fromkeys(names, b"{}")) as server:
        come = {file.path for file in hub_for(server, tmp_path).describe(REPO).files}
    assert come == {*names[:4], "checkpoint-500/config.json"}


def test_a_mirror_may_have_tags_of_its_own(server, tmp_path):
    server.etag = "5f3a-61b"
    assert (fetched(hub_for(server, tmp_path)) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_offline_nobody_is_asked(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "is_offline_mode", lambda: True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        hub_for(server, tmp_path).describe(REPO)


def test_the_commit_of_a_repository_is_pinned(server, tmp_path):
    repository = hub_for(server, tmp_path).describe(REPO)
    assert repository.commit == COMMIT
    assert repository.total_bytes == SIZE + 4
    assert json.loads(FILES["config.json"]) == {}
