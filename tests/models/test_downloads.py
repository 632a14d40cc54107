"""Downloads in the background: their states, and what a killed process leaves to the next."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from start_llm.core.errors import Conflict, InvalidRequest, NotFound
from start_llm.core.model_listing import Download
from start_llm.library.downloads import Downloads
from start_llm.library.hub import Hub
from tests.models.fake_hub import PIECE, WEIGHTS, FakeHub, hub_of
from tests.models.test_download import REPOSITORY, environment

US, THEM = b"us", b"them"
SIZE = 8 * 2**20
FILES = {"config.json": b"{}", WEIGHTS: os.urandom(SIZE)}
REPO = "lab/tiny"


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with hub_of(dict(FILES)) as running:
        yield running


@pytest.fixture
def hub(server, tmp_path) -> Hub:
    return Hub(tmp_path, pause=lambda _: None, endpoint=server.url)


@pytest.fixture
def downloads(hub) -> Iterator[Downloads]:
    queue = Downloads(hub)
    yield queue
    queue.close()


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def only(downloads: Downloads) -> Download:
    (download,) = downloads.list(US)
    return download


def wait_for_state(downloads: Downloads, state: str) -> Download:
    wait_for(lambda: only(downloads).state == state)
    return only(downloads)


def test_a_download_runs_and_is_done(downloads, hub):
    assert downloads.list(US) == []
    started = downloads.start(US, REPO)
    assert started.state == "active"
    assert started.finished_at is None
    done = wait_for_state(downloads, "done")
    assert done.id == started.id
    assert done.received_bytes == done.total_bytes == SIZE + 2
    assert (done.files_done, done.files_total, done.current_file, done.bytes_per_sec) == (2, 2, None, 0)
    assert done.finished_at is not None
    assert done.finished_at >= done.started_at > 1_600_000_000
    assert done.error is None
    assert (hub.snapshot(REPO) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_while_it_runs_file_and_speed_are_reported(downloads, server):
    server.piece_s = 0.02
    downloads.start(US, REPO)
    wait_for(lambda: only(downloads).received_bytes > 5 * PIECE)
    now = only(downloads)
    assert (now.state, now.current_file, now.files_done, now.files_total) == ("active", WEIGHTS, 1, 2)
    assert 0 < now.bytes_per_sec < 100 * PIECE


@pytest.mark.thorough
def test_pause_keeps_what_came_and_resume_goes_on(downloads, server, hub):
    server.piece_s = 0.005
    name = downloads.start(US, REPO).id
    wait_for(lambda: only(downloads).received_bytes > 10 * PIECE)
    assert downloads.pause(US, name).state == "paused"
    (partial,) = hub.folder_of(REPO).glob("blobs/*.incomplete")
    time.sleep(0.3)
    have = partial.stat().st_size
    time.sleep(0.1)
    assert partial.stat().st_size == have, "it is still fetched"
    assert only(downloads).current_file is None
    server.piece_s = 0.0
    assert downloads.resume(US, name).state == "active"
    wait_for_state(downloads, "done")
    assert server.downloads(WEIGHTS)[-1] == f"GET {WEIGHTS} from {have}"


def test_a_paused_download_waits_while_others_run(downloads, server):
    server.piece_s = 0.02
    name = downloads.start(US, REPO).id
    downloads.pause(US, name)
    downloads.start(THEM, "lab/nothing")
    wait_for(lambda: downloads.list(THEM)[0].state == "error")
    assert only(downloads).state == "paused"


@pytest.mark.thorough
def test_an_error_is_kept_with_its_words_and_can_be_resumed(downloads, server):
    server.broken_after = 100_000
    name = downloads.start(US, REPO).id
    failed = wait_for_state(downloads, "error")
    assert failed.error is not None
    assert failed.error.startswith("The connection to the hub failed: ")
    assert failed.finished_at is not None
    server.broken_after = None
    resumed = downloads.resume(US, name)
    assert (resumed.state, resumed.error, resumed.finished_at) == ("active", None, None)
    wait_for_state(downloads, "done")
    assert server.sent == SIZE


def test_after_an_answer_that_is_none_the_next_download_runs(downloads, server):
    server.page = b"<html>Please log in.</html>"
    downloads.start(US, REPO)
    assert "is not JSON" in str(wait_for_state(downloads, "error").error)
    server.page = None
    downloads.start(US, REPO)
    wait_for_state(downloads, "done")


def test_whatever_ends_a_download_the_next_one_runs(downloads, hub, monkeypatch):
    """There is one thread for all of them."""
    monkeypatch.setattr(Hub, "describe", lambda *_: 1 / 0)
    downloads.start(US, REPO)
    assert wait_for_state(downloads, "error").error == "ZeroDivisionError: division by zero"
    monkeypatch.undo()
    downloads.start(US, REPO)
    wait_for_state(downloads, "done")
    assert hub.snapshot(REPO)


def test_a_second_start_of_the_same_repository_is_the_same_download(downloads, server):
    server.piece_s = 0.02
    first = downloads.start(US, REPO)
    assert downloads.start(US, REPO).id == first.id
    downloads.pause(US, first.id)
    again = downloads.start(US, REPO)
    assert (again.id, again.state) == (first.id, "active")


def test_deleting_ends_it_and_removes_what_is_not_whole(downloads, server, hub):
    server.piece_s = 0.01
    name = downloads.start(US, REPO).id
    wait_for(lambda: only(downloads).received_bytes > 5 * PIECE)
    downloads.remove(US, name)
    assert downloads.list(US) == []
    wait_for(lambda: not list(hub.folder_of(REPO).glob("blobs/*.incomplete")))
    assert list(hub.folder_of(REPO).glob("blobs/*")), "a whole file was removed"


def test_deleting_a_paused_one_removes_its_partial_file_at_once(downloads, server, hub):
    server.piece_s = 0.01
    name = downloads.start(US, REPO).id
    wait_for(lambda: only(downloads).received_bytes > 5 * PIECE)
    downloads.pause(US, name)
    wait_for(lambda: downloads._running is None)
    downloads.remove(US, name)
    assert not list(hub.folder_of(REPO).glob("blobs/*.incomplete"))


def test_deleting_a_finished_one_keeps_the_model(downloads, hub):
    name = downloads.start(US, REPO).id
    wait_for_state(downloads, "done")
    downloads.remove(US, name)
    assert (hub.snapshot(REPO) / WEIGHTS).is_file()


def test_what_has_ended_is_neither_paused_nor_resumed(downloads):
    name = downloads.start(US, REPO).id
    wait_for_state(downloads, "done")
    with pytest.raises(Conflict, match="has ended"):
        downloads.pause(US, name)
    with pytest.raises(Conflict, match="is done"):
        downloads.resume(US, name)


def test_the_last_five_are_kept_and_unfinished_ones_are_never_dropped(downloads, server):
    server.piece_s = 0.02
    downloads.start(US, REPO)
    for number in range(7):
        downloads.start(US, f"lab/none{number}")
        downloads.pause(US, downloads.list(US)[0].id) if number >= 4 else None
        if number >= 3:
            break
    with pytest.raises(Conflict, match="5 downloads are unfinished"):
        downloads.start(US, "lab/one-more")
    downloads.remove(US, downloads.list(US)[-1].id)
    wait_for(lambda: all(download.state == "error" for download in downloads.list(US)))
    for number in range(3):
        downloads.start(US, f"lab/later{number}")
    assert len(downloads.list(US)) == 5
    assert downloads.list(US)[0].repo_id == "lab/later2"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name", ["", "lab", "a/b/c", "../x", "lab/ti ny", "-", "/x", "lab/..", "https://x/y", "lab/x\n"]
)
def test_what_is_no_name_of_a_repository_is_refused(downloads, name):
    with pytest.raises(InvalidRequest) as refused:
        downloads.start(US, name)
    assert refused.value.param == "repo_id"
    assert downloads.list(US) == []


def test_nobody_sees_or_changes_what_another_tenant_downloads(downloads, server):
    server.piece_s = 0.02
    name = downloads.start(US, REPO).id
    assert downloads.list(THEM) == []
    for act in (downloads.pause, downloads.resume, downloads.remove):
        with pytest.raises(NotFound):
            act(THEM, name)
    assert only(downloads).state == "active"


def test_there_is_one_thread_and_none_before_the_first_download(downloads, server):
    def named() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "downloads"]

    assert named() == []
    server.piece_s = 0.02
    downloads.start(US, REPO)
    downloads.start(US, "lab/nothing")
    assert named() == ["downloads"]
    downloads.close()
    assert named() == []


def pulling(server: FakeHub, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "start_llm", "pull", "lab/tiny"],
        cwd=REPOSITORY,
        env=environment(home, server.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.long
def test_a_process_that_is_killed_in_a_file_leaves_it_to_the_next(server, tmp_path, sign):
    server.piece_s = 0.02
    first = pulling(server, tmp_path)
    try:
        wait_for(lambda: server.sent > SIZE // 3, 60)
        first.send_signal(sign)
        output, errors = first.communicate(timeout=20)
    finally:
        first.kill()
    assert first.returncode == (-9 if sign == signal.SIGKILL else 130), errors
    assert sign == signal.SIGKILL or "the same command goes on" in output
    server.piece_s = 0.0
    second = pulling(server, tmp_path)
    output, errors = second.communicate(timeout=60)
    assert "config.json" in errors, "the page about a model without a config is an error"
    snapshot = Hub(tmp_path / "hub").snapshot(REPO)
    assert snapshot is not None
    assert (snapshot / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert server.sent <= SIZE + 16 * PIECE, "more came twice than what was under way"
    assert len(server.downloads(WEIGHTS)) == 2
