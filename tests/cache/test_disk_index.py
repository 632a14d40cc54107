"""The index of the disk tier: what a scan finds, what follows what, and what is oldest."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from start_llm.cache.disk.disk_folder import DiskFolder, DiskLimits, Room
from start_llm.cache.disk.disk_index import CachedFile, DiskIndex, scan
from start_llm.cache.disk.write_limit import DailyWriteLimit
from start_llm.telemetry.metrics import DiskMetrics

ROOT, FIRST, SECOND, THIRD = (bytes([number] * 16) for number in range(4))


def cached(key: bytes, parent: bytes, used_ns: int = 0, nbytes: int = 10) -> CachedFile:
    return CachedFile("pages", key, parent, nbytes, used_ns)


def made(folder: Path, file: CachedFile) -> Path:
    path = file.path(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(file.nbytes))
    os.utime(path, ns=(file.used_ns, file.used_ns))
    return path


def test_a_scan_finds_what_was_written(tmp_path: Path):
    files = [cached(FIRST, ROOT, 5), CachedFile("states", SECOND, FIRST, 7, 9)]
    for file in files:
        made(tmp_path, file)
    by_name = {scanned.cached.name: scanned.cached for scanned in scan(tmp_path) if scanned.cached}
    assert by_name.keys() == {file.name for file in files}
    for file in files:
        same = by_name[file.name]
        assert (same.parent, same.nbytes, same.used_ns) == (file.parent, file.nbytes, file.used_ns)
        assert same.header is None


@pytest.mark.parametrize(
    "name",
    [
        "pages/01/x.safetensors",
        f"pages/02/{ROOT.hex()}-{FIRST.hex()}.safetensors",  # in another key's folder
        f"pages/01/{ROOT.hex()}-{FIRST.hex()}",
        "Qwen3/model-00001-of-00002.safetensors.tmp",
        ".tmp",
        "..tmp",
        "pages/.safetensors.tmp",
        f"{ROOT.hex()}-{FIRST.hex()}.safetensors.tmp",
        f"pages/01/{ROOT.hex()}-{FIRST.hex().upper()}x.safetensors",
        f"others/01/{ROOT.hex()}-{FIRST.hex()}.safetensors",
        f"{ROOT.hex()}-{FIRST.hex()}.safetensors",
    ],
)
def test_other_names_are_none_of_ours(tmp_path: Path, name: str):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"12345")
    (scanned,) = scan(tmp_path)
    assert (scanned.cached, scanned.nbytes, scanned.is_left_over) == (None, 5, False)


def test_the_start_removes_what_a_killed_server_has_left_and_no_file_of_another_program(tmp_path: Path):
    left = cached(FIRST, ROOT).path(tmp_path)
    left = left.with_name(left.name + ".tmp")
    foreign = tmp_path / "Qwen3" / "model-00001-of-00002.safetensors.tmp"
    for path in (left, foreign):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"12345")
    folder = DiskFolder(tmp_path, DiskLimits(max_size=1000), DiskMetrics())
    for scanned in scan(tmp_path):
        folder.add_scanned(scanned)
    assert (left.exists(), foreign.exists()) == (False, True)


def test_no_link_is_followed(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    made(tmp_path / "elsewhere", cached(FIRST, ROOT))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pages").symlink_to(tmp_path / "elsewhere" / "pages")
    assert [scanned.cached for scanned in scan(tmp_path / "folder")] == [None]


def test_a_folder_that_cannot_be_read_hides_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, real = cached(FIRST, ROOT), os.scandir
    made(tmp_path, file)
    (tmp_path / "lost+found").mkdir()

    def scandir(folder: Path | str) -> Any:
        if Path(folder).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert [scanned.cached.name for scanned in scan(tmp_path) if scanned.cached] == [file.name]


def test_it_knows_what_follows_a_prefix():
    index, files = DiskIndex(), [cached(FIRST, ROOT), cached(SECOND, ROOT), cached(THIRD, FIRST)]
    for file in files:
        index.add(file)
    assert index.after("pages", ROOT) == files[:2]
    assert index.after("states", ROOT) == []
    index.remove(files[0])
    assert index.after("pages", ROOT) == files[1:2]
    assert index.get("pages", FIRST) is None
    assert index.nbytes == 20


def test_a_file_of_the_same_name_replaces_the_other():
    index = DiskIndex()
    index.add(cached(FIRST, ROOT, nbytes=10))
    index.add(new := cached(FIRST, ROOT, nbytes=30))
    assert (len(index), index.nbytes, index.after("pages", ROOT)) == (1, 30, [new])


def test_of_what_was_used_together_the_deepest_is_the_oldest():
    index, files = DiskIndex(), [cached(FIRST, ROOT, 7), cached(SECOND, FIRST, 8), cached(THIRD, SECOND, 9)]
    for file in files:
        index.add(file)
    assert index.oldest_first() == files
    index.touch([(files[0], 0), (files[1], 32)], 10**9)
    assert index.oldest_first() == [files[2], files[1], files[0]]
    assert {file.name for file in index.take_touched()} == {files[0].name, files[1].name}
    assert index.take_touched() == []


def test_what_is_gone_is_not_touched():
    index, file = DiskIndex(), cached(FIRST, ROOT)
    index.touch([(file, 0)], 5)
    assert index.take_touched() == []


def test_files_of_a_clock_that_was_ahead_were_used_now(tmp_path: Path):
    made(tmp_path, cached(FIRST, ROOT, time.time_ns() + 10**15))
    (file,) = scan(tmp_path)
    assert file.cached
    assert file.cached.used_ns <= time.time_ns()


# ----------------------------------------------------------------------------------------------- the quota


def folder_of(path: Path, used_ns: list[int], max_size: int) -> DiskFolder:
    """A folder whose files have 100 bytes each."""
    folder = DiskFolder(path, DiskLimits(max_size=max_size), DiskMetrics())
    for number, used in enumerate(used_ns):
        file = cached(bytes([9, number] * 8), ROOT, used, nbytes=100)
        made(path, file)
        folder.index.add(file)
    return folder


@pytest.mark.parametrize(
    ("nbytes", "used_ns", "room", "left"),
    [
        (100, 25, Room.FITS, [30, 40]),
        (100, 5, Room.TOO_OLD, [10, 20, 30, 40]),
        (300, 25, Room.TOO_OLD, [10, 20, 30, 40]),
        (500, 50, Room.TOO_LARGE, [10, 20, 30, 40]),
        (500, 5, Room.TOO_LARGE, [10, 20, 30, 40]),
    ],
)
def test_a_file_takes_the_room_of_what_was_used_before_it_alone(
    nbytes: int, used_ns: int, room: Room, left: list[int], tmp_path: Path
):
    folder = folder_of(tmp_path, [10, 20, 30, 40], max_size=400)
    assert folder.make_room(cached(FIRST, ROOT, used_ns, nbytes), frozenset()) is room
    assert [file.used_ns for file in folder.index.oldest_first()] == left
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(left)
    kept_since_ns = {5: 10, 25: 30}[used_ns] if room is Room.TOO_OLD else 0
    assert folder.kept_since_ns == kept_since_ns


@pytest.mark.parametrize(("is_lost", "left"), [(True, [20, 30]), (False, [30, 40])])
def test_files_that_are_lost_go_first_and_others_that_are_left_out_when_it_is_their_turn(
    is_lost: bool, left: list[int], tmp_path: Path
):
    folder = folder_of(tmp_path, [10, 20, 30, 40], max_size=400)
    folder.leave_out(folder.index.oldest_first()[-1], is_lost=is_lost)
    assert folder.make_room(cached(FIRST, ROOT, 25, 100), frozenset()) is Room.FITS
    assert [file.used_ns for file in folder.index.oldest_first()] == left
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(left)


@pytest.mark.parametrize(
    ("nbytes", "room", "left"),
    [
        (100, Room.FITS, [10, 20, 30, 40]),
        (150, Room.FITS, [20, 30, 40]),
        (400, Room.FITS, [40]),
        (401, Room.TOO_LARGE, [10, 20, 30, 40]),
    ],
)
def test_a_file_does_not_count_beside_what_is_written_in_its_place(
    nbytes: int, room: Room, left: list[int], tmp_path: Path
):
    folder = folder_of(tmp_path, [10, 20, 30, 40], max_size=400)
    old = folder.index.oldest_first()[-1]
    folder.leave_out(old, is_lost=True)
    assert folder.make_room(cached(old.key, ROOT, 50, nbytes), frozenset()) is room
    assert [file.used_ns for file in folder.index.oldest_first()] == left


def test_a_damaged_file_that_cannot_be_removed_still_takes_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = folder_of(tmp_path, [10, 20], max_size=400)
    (file, _), real = folder.index.oldest_first(), Path.unlink

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "unlink", refused)
    folder.remove(file)
    folder.keep_quota(frozenset())
    assert (folder.index.get(*file.name), folder.index.nbytes) == (None, 200)
    folder.index.add(file)
    folder.keep_quota(frozenset())
    assert folder.index.nbytes == 200, "it is written again, and counts once"
    monkeypatch.setattr(Path, "unlink", real)
    folder.remove(file)
    folder.keep_quota(frozenset())
    assert folder.index.nbytes == 100


def test_what_cannot_be_removed_for_want_of_room_is_as_good_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = folder_of(tmp_path, [10, 20], max_size=100)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: os.close(10**6))
    folder.keep_quota(frozenset())
    assert [file.used_ns for file in folder.index.oldest_first()] == [10, 20]
    assert (folder.index.nbytes, folder.metrics.evictions) == (200, 0)


@pytest.mark.parametrize(
    ("limit", "room"),
    [(2 * 2**20, Room.TOO_LARGE), (4 * 2**20, Room.FITS), (2**19, Room.FULL), (50, Room.FULL)],
)
def test_a_file_that_is_too_large_does_not_make_the_folder_full(limit: int, room: Room, tmp_path: Path):
    folder = folder_of(tmp_path, [], max_size=limit)
    assert folder.make_room(cached(FIRST, ROOT, 10, 3 * 2**20), frozenset()) is room


@pytest.mark.parametrize(("log_used_ns", "stay"), [(50, True), (5, False)])
def test_a_database_whose_log_was_used_lately_stays_whole(log_used_ns: int, stay: bool, tmp_path: Path):
    folder = folder_of(tmp_path, [10, 20], max_size=200)
    folder.database_names = ("this model",)
    paths = [tmp_path / "transcripts" / f"other model.db{end}" for end in ("", "-wal")]
    paths[0].parent.mkdir()
    for path, used_ns in zip(paths, (5, log_used_ns), strict=True):
        path.write_bytes(bytes(50))
        os.utime(path, ns=(used_ns, used_ns))
    folder.keep_quota(frozenset())
    assert [path.exists() for path in paths] == [stay, stay]


# ------------------------------------------------------------------------------------------------- the limit


def test_a_day_ends_at_midnight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now = [1_000_000_000.0]
    monkeypatch.setattr("start_llm.cache.disk.write_limit.time.time", lambda: now[0])
    limit = DailyWriteLimit(tmp_path / "written.json", 100)
    limit.note(99)
    assert not limit.is_reached
    limit.note(1)
    assert limit.is_reached
    limit.save()
    later = DailyWriteLimit(tmp_path / "written.json", 100)
    later.load()
    assert (later.today_bytes, later.is_reached) == (100, True)
    now[0] += 86_400
    assert (later.today_bytes, later.is_reached) == (0, False)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"day": 3, "bytes": "many"}', '{"day": "x", "bytes": 1e999}']
)
def test_a_count_that_cannot_be_read_is_none(tmp_path: Path, content: str):
    (tmp_path / "written.json").write_text(content)
    limit = DailyWriteLimit(tmp_path / "written.json", 1)
    limit.load()
    assert (limit.today_bytes, limit.is_reached) == (0, False)


def test_a_disk_that_is_full_leaves_the_count_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limit = DailyWriteLimit(tmp_path / "written.json", 100)
    limit.note(7)
    limit.save()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(json, "dump", full)
    limit.note(1)
    limit.save()
    later = DailyWriteLimit(tmp_path / "written.json", 100)
    assert later.load()
    assert later.today_bytes == 7


def test_no_limit_is_never_reached(tmp_path: Path):
    limit = DailyWriteLimit(tmp_path / "none" / "written.json", 0)
    limit.note(10**15)
    limit.save()
    assert not limit.is_reached
