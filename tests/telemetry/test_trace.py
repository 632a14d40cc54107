"""The trace: its place, its readers, its size, and its lines."""

from __future__ import annotations

import json
import os
import re
import resource
import stat
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import SettingsError
from start_llm.core.events import Restored
from start_llm.core.explanation import Explanation
from start_llm.telemetry.metrics import CacheMetrics
from start_llm.telemetry.request_record import RequestFacts, RequestRecord
from start_llm.telemetry.trace import Trace, session_digest
from start_llm.telemetry.trace_files import TraceFiles

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "trace.md"
NIGHT = datetime(2026, 7, 31, 23, 59, 59).astimezone()
DAY = "2026-07-31"
SESSION = "0123456789abcdef"
NAME = f"cache-session-{SESSION}.log"
FACTS = RequestFacts(
    id="chatcmpl-1",
    tenant=b"",
    session=SESSION,
    session_source="client",
    endpoint="/v1/chat/completions",
    model="tiny",
    messages=3,
    images=1,
    prompt_tokens=40,
    stable_prefix_msg_count=2,
    cache_key_delta_chars=1,
    bound_messages=2,
    bound_tokens=30,
    replaced_tokens=25,
)
RESTORED = Restored(30, "no_state", stored=30, disk_tokens=10, disk_s=0.5, at=100.1)
RECORD = RequestRecord(
    FACTS, arrived=100.0, restored=RESTORED, ending="stop", written=5, first_text=100.25, left=101.5
)
EXPLANATION = Explanation(
    prompt_tokens=40,
    bound_messages=2,
    bound_tokens=30,
    refusal=None,
    restored=RESTORED,
    again=0,
    against=None,
    differences=(),
)
LINE: dict[str, Any] = {
    "request_id": "chatcmpl-1",
    "session": SESSION,
    "session_source": "client",
    "parent_session": None,
    "branch": None,
    "endpoint": "/v1/chat/completions",
    "model": "tiny",
    "adapter": None,
    "messages": 3,
    "mended": [],
    "images": 1,
    "prompt_tokens": 40,
    "stable_prefix_msg_count": 2,
    "cache_key_delta_chars": 1,
    "bound_messages": 2,
    "bound_tokens": 30,
    "replaced_tokens": 25,
    "binding_refusal": None,
    "ending": "stop",
    "cached_tokens": 30,
    "computed_tokens": 10,
    "completion_tokens": 5,
    "ttft_seconds": 0.25,
    "total_seconds": 1.5,
    "cache_hit": True,
    "miss_reason": "no_state",
    "kept_tokens": 30,
    "lost_tokens": 0,
    "disk_tokens": 10,
    "disk_seconds": 0.5,
    "divergent_message": None,
    "divergent_token": None,
    "drift_class": None,
    "drift_rule": None,
    "cache_metrics_bumped_this_request": {
        "vlm_retreat": 0,
        "hybrid_trim_miss": 1,
        "exact_key_rejected_by_model_lcp": 0,
    },
}
TEXTS = ("Where might Amundsen's lighthouse stand?", "After Svalbard's dunes.")


def texts() -> tuple[str, str]:
    return TEXTS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


@contextmanager
def room_for(count: int) -> Generator[None]:
    """No file of this process may grow beyond so many bytes: a disk that is full in the middle of a line."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Desk:
    """A trace in a folder of its own, a clock that stands still, and what was said at the terminal."""

    def __init__(self, root: Path, *, with_prompts: bool = False, **limits: int) -> None:
        self.root = root
        self.notices: list[str] = []
        self.cache = CacheMetrics()
        self.now = NIGHT
        self.trace = Trace(
            TraceFiles(root, **limits),
            self.cache,
            self.notices.append,
            with_prompts=with_prompts,
            now=lambda: self.now,
        )

    @property
    def file(self) -> Path:
        return self.root / DAY / NAME

    def write(self, session: str = SESSION, **changes: Any) -> None:
        record = replace(RECORD, facts=replace(FACTS, session=session, **changes))
        self.trace.write(record, EXPLANATION, texts)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


# -------------------------------------------------------------------------------------------- what it says


def documented() -> dict[str, str]:
    """Names of fields to what is said of them."""
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", SCHEMA.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_field_is_documented_and_every_documented_field_is_there(tmp_path):
    desk = Desk(tmp_path, with_prompts=True)
    desk.write()
    (line,) = desk.lines()
    assert list(line) == list(documented())
    assert LINE.keys() < documented().keys()


def test_a_line_has_what_is_known_of_the_request_and_the_moment_with_its_zone(tmp_path):
    desk = Desk(tmp_path)
    desk.cache.misses["no_state"] = 4
    desk.write()
    (line,) = desk.lines()
    assert line == line | LINE
    moment = datetime.fromisoformat(line["time"])
    assert (moment, moment.utcoffset()) == (NIGHT, NIGHT.utcoffset())
    assert line["cache_metrics_snapshot"] == {
        "vlm_retreat": 0,
        "hybrid_trim_miss": 4,
        "exact_key_rejected_by_model_lcp": 0,
    }


def test_prompts_and_replies_are_not_written_unless_that_was_asked_for(tmp_path):
    plain, clear = Desk(tmp_path / "plain"), Desk(tmp_path / "clear", with_prompts=True)
    for desk in (plain, clear):
        desk.write()
    written = everything(plain.root)
    assert written
    assert not [word for text in TEXTS for word in text.split() if word.encode() in written]
    (line,) = clear.lines()
    assert (line["prompt"], line["reply"]) == TEXTS


def test_texts_that_are_not_wanted_are_not_made(tmp_path):
    def never() -> tuple[str, str]:
        raise AssertionError("nobody wants them")

    desk = Desk(tmp_path)
    desk.trace.write(RECORD, EXPLANATION, never)
    assert len(desk.lines()) == 1


def test_any_text_is_one_line_that_can_be_read_again(tmp_path):
    odd = "a\nb\u2028c\ud800\x00\r é 🐟"
    desk = Desk(tmp_path, with_prompts=True)
    desk.trace.write(RECORD, EXPLANATION, lambda: (odd, odd))
    desk.write()
    assert [line["prompt"] for line in desk.lines()] == [odd, TEXTS[0]]


def test_a_session_is_named_by_16_digits_and_by_others_for_another_tenant():
    names = [
        session_digest(*pair) for pair in ((b"", "a"), (b"", "b"), (b"a", ""), (b"t", "a"), (b"t", "../x"))
    ]
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in names)
    assert len(set(names)) == len(names)
    assert session_digest(b"t", "a") == session_digest(b"t", "a")
    assert session_digest(b"", "\ud800")


# ------------------------------------------------------------------------------------------------- its files


def test_requests_of_a_session_share_a_file_and_those_of_another_have_their_own(tmp_path):
    desk = Desk(tmp_path)
    for session in (SESSION, "f" * 16, SESSION):
        desk.write(session)
    counts = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / DAY).iterdir()}
    assert counts == {NAME: 2, f"cache-session-{'f' * 16}.log": 1}


def test_a_new_day_has_a_new_folder(tmp_path):
    desk = Desk(tmp_path)
    desk.write()
    desk.now += timedelta(seconds=2)
    desk.write()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.log")) == [
        f"2026-07-31/{NAME}",
        f"2026-08-01/{NAME}",
    ]


@contextmanager
def permissive() -> Generator[None]:
    """Let everybody read a file that is made without rights of its own."""
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_nobody_else_may_look_into_what_is_made(tmp_path):
    desk = Desk(tmp_path / "new")
    with permissive():
        desk.write()
    assert [mode(path) for path in (desk.root, desk.root / DAY, desk.file)] == [0o700, 0o700, 0o600]


def test_a_file_has_its_rights_before_anything_is_in_it(tmp_path):
    desk = Desk(tmp_path)
    with permissive(), room_for(0):
        desk.write()
    assert (mode(desk.file), desk.file.stat().st_size) == (0o600, 0)


def test_a_folder_that_was_there_is_closed_and_what_is_around_it_stays_as_it_was(tmp_path):
    (tmp_path / DAY).mkdir(mode=0o755)
    tmp_path.chmod(0o755)
    Desk(tmp_path).write()
    assert (mode(tmp_path), mode(tmp_path / DAY)) == (0o755, 0o700)


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path):
    desk, precious = Desk(tmp_path / "logs"), tmp_path / "precious"
    precious.write_text("mine")
    desk.trace.start()
    desk.file.symlink_to(precious)
    desk.write()
    assert (precious.read_text(), mode(precious) & 0o044) == ("mine", 0o044 & mode(precious))
    assert len(desk.notices) == 1


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path):
    desk, other = Desk(tmp_path / "logs"), tmp_path / "other"
    for folder in (desk.root, other):
        folder.mkdir()
    (desk.root / DAY).symlink_to(other)
    desk.write()
    assert list(other.iterdir()) == []
    assert len(desk.notices) == 1


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path):
    desk = Desk(tmp_path)
    desk.trace.start()
    os.mkfifo(desk.file)
    desk.write()
    reader = os.open(desk.file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        desk.write()
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    assert len(desk.notices) == 1


# --------------------------------------------------------------------------------------------- their size


def length_of_a_line(root: Path) -> int:
    desk = Desk(root)
    desk.write()
    return desk.file.stat().st_size


def test_a_file_that_is_full_goes_aside_and_no_line_is_cut(tmp_path):
    line = length_of_a_line(tmp_path / "measure")
    desk = Desk(tmp_path / "logs", max_file_bytes=3 * line)
    aside = desk.file.with_name(f"{NAME}.1")
    for number in range(3):
        desk.write(messages=number)
    assert not aside.exists()
    for number in range(3, 8):
        desk.write(messages=number)
    numbers = [
        [json.loads(row)["messages"] for row in path.read_text().splitlines()] for path in (aside, desk.file)
    ]
    assert numbers == [[3, 4, 5], [6, 7]]
    assert mode(desk.file) == mode(aside) == 0o600
    assert desk.notices == []


def test_a_line_that_is_longer_than_a_file_may_be_has_one_of_its_own(tmp_path):
    desk = Desk(tmp_path, max_file_bytes=10)
    for number in range(3):
        desk.write(messages=number)
    assert [line["messages"] for line in desk.lines()] == [2]
    assert desk.notices == []


def aged(path: Path, days: int, size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    moment = time.time() - days * 86400
    os.utime(path, (moment, moment))
    return path


def test_beyond_the_cap_the_oldest_of_our_files_go_and_nothing_else(tmp_path):
    ours = [
        aged(tmp_path / f"2026-01-0{age}" / f"cache-session-{age:016x}.log{suffix}", 10 - age)
        for age, suffix in ((1, ""), (2, ".1"), (3, ""), (4, ""), (5, ""))
    ]
    outside = aged(tmp_path / "outside" / f"cache-session-{1:016x}.log", 99)
    others = [
        outside,
        aged(tmp_path / "README.md", 99),
        aged(tmp_path / "proxy.log", 99),
        aged(tmp_path / "2026-01-01" / "notes.txt", 99),
        aged(tmp_path / "2026-01-01" / "cache-session-short.log", 99),
        aged(tmp_path / "2026-01-01" / f"cache-session-{1:016x}.log.2", 99),
        aged(tmp_path / "2026-01-01" / "deeper" / f"cache-session-{1:016x}.log", 99),
    ]
    (tmp_path / "2026-01-02" / f"cache-session-{9:016x}.log").symlink_to(outside)
    (tmp_path / "2025-01-01").symlink_to(tmp_path / "outside")
    desk = Desk(tmp_path, max_bytes=4000)
    desk.write()
    assert [path.exists() for path in ours] == [False, False, False, True, True]
    assert all(path.exists() for path in others)
    assert len(desk.lines()) == 1


def test_the_cap_holds_while_lines_are_written(tmp_path):
    line = length_of_a_line(tmp_path / "measure")
    desk = Desk(tmp_path / "logs", max_bytes=20 * line, max_file_bytes=4 * line)
    for number in range(100):
        desk.write(f"{number % 9:016x}")
        assert sum(path.stat().st_size for path in desk.root.rglob("*.log*")) <= 20 * line
    kept = sum(len(path.read_text().splitlines()) for path in desk.root.rglob("*.log*"))
    assert kept > 10, "not more than has to go"


# ---------------------------------------------------------------------------------------- when it goes wrong


def test_a_disk_that_is_full_is_reported_once_and_leaves_no_half_of_a_line(tmp_path):
    desk = Desk(tmp_path)
    desk.write(messages=1)
    with room_for(desk.file.stat().st_size + 50):
        desk.write(messages=2)
        desk.write(messages=3)
    desk.write(messages=4)
    assert [line["messages"] for line in desk.lines()] == [1, 4]
    assert len(desk.notices) == 1
    assert "cannot be written" in desk.notices[0]


def test_a_folder_that_cannot_be_made_is_reported_once(tmp_path):
    desk = Desk(tmp_path)
    (tmp_path / DAY).write_text("in the way")
    desk.write()
    desk.write()
    assert len(desk.notices) == 1
    (tmp_path / DAY).unlink()
    desk.write()
    assert len(desk.lines()) == 1


def test_a_folder_that_was_deleted_is_made_again(tmp_path):
    desk = Desk(tmp_path / "logs")
    desk.write()
    desk.file.unlink()
    desk.file.parent.rmdir()
    desk.root.rmdir()
    desk.write()
    assert (len(desk.lines()), desk.notices) == (1, [])


@pytest.mark.parametrize("below", ["", "deeper"])
def test_something_else_in_the_place_of_the_root_stops_the_start(tmp_path, below):
    (tmp_path / "logs").write_text("a file")
    desk = Desk(tmp_path / "logs" / below)
    with pytest.raises(SettingsError, match=r"LOG_ROOT=.*expected a folder"):
        desk.trace.start()


def test_a_root_that_cannot_be_written_is_reported_at_the_start_and_stops_nothing(tmp_path):
    desk = Desk(tmp_path / ("x" * 300))
    desk.trace.start()
    assert len(desk.notices) == 1
    desk.write()
    assert len(desk.notices) == 1


def test_lines_of_many_threads_are_all_there_and_whole(tmp_path):
    desk = Desk(tmp_path, max_file_bytes=2**30)
    threads = [
        threading.Thread(target=lambda start=start: [desk.write(messages=start + n) for n in range(50)])
        for start in range(0, 400, 50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["messages"] for line in desk.lines()) == list(range(400))


def test_two_servers_that_write_into_one_folder_lose_no_lines(tmp_path, monkeypatch):
    """The other one writes while a full file is put aside, and must not put the new one aside too."""
    first, other = (TraceFiles(tmp_path, max_file_bytes=100) for _ in range(2))
    first.append(DAY, SESSION, b"a" * 90 + b"\n")
    moving = threading.Event()

    def rename_slowly(*arguments: Any, **folders: int) -> None:
        moving.set()
        time.sleep(0.2)
        rename(*arguments, **folders)

    rename = os.rename
    monkeypatch.setattr("start_llm.telemetry.trace_files.os.rename", rename_slowly)
    writers = [
        threading.Thread(target=files.append, args=(DAY, SESSION, line))
        for files, line in ((first, b"b" * 20 + b"\n"), (other, b"c" * 20 + b"\n"))
    ]
    writers[0].start()
    assert moving.wait(10)
    writers[1].start()
    for writer in writers:
        writer.join(10)
    assert (tmp_path / DAY / f"{NAME}.1").read_bytes() == b"a" * 90 + b"\n"
    assert sorted((tmp_path / DAY / NAME).read_bytes().split()) == [b"b" * 20, b"c" * 20]
