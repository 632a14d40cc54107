"""Changes to a table are there after a restart, whole or not at all, and nobody waits for the disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.storage import database as module
from start_llm.storage.database import Database
from start_llm.storage.database_file import FORMAT, DatabaseFile, decode_json, encode_json
from start_llm.storage.disk_thread import DiskThread
from tests.databases import WallClock, opened, pending
from tests.slices import is_whole

ROOT = Path(__file__).resolve().parents[2]
TRY = """
import sqlite3, sys
from pathlib import Path
from start_llm.storage.database_file import DatabaseFile
try:
    DatabaseFile(Path(sys.argv[1])).open()
except sqlite3.OperationalError as error:
    print(error)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "a.db"


def kept(database: Database, name: str = "things") -> list[tuple[bytes, bytes]]:
    """Keys and values, the least recently used first."""
    return [(row.key, row.value) for row in database.table(name).rows()]


def fill(path: Path, count: int = 3) -> list[tuple[bytes, bytes]]:
    rows = [(f"{number}".encode(), os.urandom(1000)) for number in range(count)]
    with opened(path) as database:
        table = database.table("things")
        for key, value in rows:
            table.put(key, value)
    return rows


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ----------------------------------------------------------------------------------------------- what is kept


def test_rows_outlive_the_process_each_in_its_table(path):
    with opened(path) as database:
        first, other = database.table("one"), database.table("other")
        first.put(b"a", b"1")
        other.put(b"a", b"2")
        first.put(b"", b"\0")
        first.put(b"only a key")
    with opened(path) as database:
        assert kept(database, "one") == [(b"a", b"1"), (b"", b"\0"), (b"only a key", b"")]
        assert kept(database, "other") == [(b"a", b"2")]
        assert kept(database, "third") == []
        assert database.metrics.loaded == 4


def test_rows_are_read_once(path):
    fill(path)
    with opened(path) as database:
        table = database.table("things")
        assert [len(table.rows()), len(table.rows())] == [3, 0]


def test_the_least_recently_used_row_comes_first(path):
    for _ in range(2):  # the second time the rows are there already
        with opened(path) as database:
            table = database.table("things")
            for key in (b"a", b"b", b"c", b"d"):
                table.put(key)
            table.touch(b"b")
            table.touch(b"a")
            table.put(b"e")
            table.put(b"a")
            table.touch(b"missing")
        with opened(path) as database:
            assert [key for key, _ in kept(database)] == [b"c", b"d", b"b", b"e", b"a"]


def test_order_holds_although_the_clock_is_set_back(path):
    clock = WallClock()
    for number in range(4):
        with opened(path, wall_clock=clock) as database:
            database.table("things").put(f"{number}".encode())
        clock.now -= 1000
    with opened(path, wall_clock=clock) as database:
        rows = database.table("things").rows()
    assert [row.key for row in rows] == [b"0", b"1", b"2", b"3"]
    assert {(row.age_s, row.idle_s) for row in rows} == {(0, 0)}


def test_ages_are_reported_in_wall_time(path):
    clock = WallClock()
    with opened(path, wall_clock=clock) as database:
        table = database.table("things")
        for key in (b"written", b"used", b"used before"):
            table.put(key)
        clock.now += 10
        table.touch(b"used")
        table.touch(b"used before", idle_s=4)
    clock.now += 100
    with opened(path, wall_clock=clock) as database:
        ages = {
            row.key: (round(row.age_s, 3), round(row.idle_s, 3)) for row in database.table("things").rows()
        }
    assert ages == {b"written": (110, 110), b"used": (110, 100), b"used before": (110, 104)}


def test_a_deleted_row_is_gone_and_one_that_is_put_again_is_there(path):
    fill(path)
    with opened(path) as database:
        table = database.table("things")
        for key in (b"0", b"1"):
            table.delete(key)
        table.put(b"1", b"again")
        table.put(b"new", b"")
        table.touch(b"new")
        table.delete(b"new")
    with opened(path) as database:
        assert [key for key, _ in kept(database)] == [b"2", b"1"]


def test_a_rejected_row_is_counted_and_gone(path):
    fill(path)
    with opened(path) as database:
        database.table("things").reject(b"1")
        assert database.metrics.rejected == 1
    with opened(path) as database:
        assert [key for key, _ in kept(database)] == [b"0", b"2"]


def test_what_is_noted_after_the_end_is_lost(path):
    with opened(path) as database:
        table = database.table("things")
        database.close()
        wait_until(lambda: not database.metrics.is_on)
        table.put(b"late")
        table.touch(b"late")
        assert pending(database) == 0
    with opened(path) as database:
        assert kept(database) == []


def test_the_end_of_the_thread_alone_writes_what_is_pending(path):
    thread = DiskThread(lambda error: None)
    thread.start()
    Database(path, thread, print).table("things").put(b"a")
    assert thread.close(10)
    shutil.copytree(path.parent, path.parent.with_name("copy"))  # the connection is open still
    with opened(path.parent.with_name("copy") / path.name) as database:
        assert kept(database) == [(b"a", b"")]


@pytest.mark.thorough
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_comes_back_as_it_was(value):
    assert decode_json(encode_json(value)) == value


@given(st.text(st.characters(categories=["Cs"]), max_size=4))
def test_lone_surrogates_come_back_as_they_were(text):
    """A high and a low one beside each other do not become one character."""
    assert decode_json(encode_json([text])) == [text]


# ---------------------------------------------------------------------------------------- nobody waits for it


def test_only_the_disk_thread_writes(path, monkeypatch):
    threads = list[str]()
    write = DatabaseFile.write

    def noted(self, *changes):
        threads.append(threading.current_thread().name)
        write(self, *changes)

    monkeypatch.setattr(DatabaseFile, "write", noted)
    with opened(path, write_after_s=0.01) as database:
        table = database.table("things")
        for number in range(20):
            table.put(b"%d" % number)
            table.touch(b"0")
            table.delete(b"1")
            time.sleep(0.002)
    assert {*threads} == {"disk"}


def test_changes_are_noted_although_the_disk_hangs(path):
    go = threading.Event()
    thread = DiskThread(lambda error: None)
    thread.start()
    database = Database(path, thread, print, write_after_s=0)
    table = database.table("things")

    def hang() -> None:
        go.wait(30)

    thread.submit(hang)
    began = time.monotonic()
    for number in range(10_000):
        table.put(b"%d" % (number % 5000), b"x" * 100)
    took = time.monotonic() - began
    assert (pending(database), database.metrics.written) == (5000, 0)
    go.set()
    database.close()
    assert thread.close(10)
    assert database.metrics.written == 5000
    assert took < 2, "10,000 changes take some 20 ms"


def test_a_key_that_changes_often_is_written_once(path):
    with opened(path) as database:
        table = database.table("things")
        for number in range(1000):
            table.put(b"a", b"%d" % number)
    assert database.metrics.written == 1
    with opened(path) as database:
        assert kept(database) == [(b"a", b"999")]


def test_changes_are_written_soon_and_mere_uses_rarely(path):
    clock = WallClock()
    with opened(path, write_after_s=0.01, wall_clock=clock) as database:
        table = database.table("things")
        table.put(b"a")
        wait_until(lambda: database.metrics.written == 1)
        table.touch(b"a")
        table.put(b"b")
        wait_until(lambda: database.metrics.written == 2)
        assert pending(database) == 1
        clock.now += 3600
        table.put(b"c")
        wait_until(lambda: database.metrics.written == 4)
        assert pending(database) == 0


def test_many_threads_lose_nothing(path):
    def work(name: int) -> None:
        for number in range(300):
            table.put(b"%d %d" % (name, number), b"%d" % number)
            table.delete(b"%d %d" % (name, number - 10))

    with opened(path, write_after_s=0.001) as database:
        table = database.table("things")
        workers = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    with opened(path) as database:
        assert {key for key, _ in kept(database)} == {
            b"%d %d" % (name, number) for name in range(4) for number in range(290, 300)
        }


# ------------------------------------------------------------------------------------------- private, bounded


@pytest.mark.parametrize("mask", [0, 0o077])
def test_nobody_else_can_read_it(path, mask):
    before = os.umask(mask)
    try:
        with opened(path, write_after_s=0.01) as database:
            database.table("things").put(b"a")
            wait_until(lambda: database.metrics.written == 1)
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(before)
    assert modes == {"a.db": 0o600, "a.db-wal": 0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_others_could_read_becomes_private(path):
    fill(path)
    path.chmod(0o644)
    with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.thorough
def test_the_file_does_not_grow_with_what_is_gone(path):
    """Two hundred rows of 20 kB are kept of four thousand."""
    sizes = list[int]()
    with opened(path, write_after_s=3600) as database:
        table = database.table("things")
        for number in range(4000):
            table.put(b"%d" % number, bytes(20_000))
            table.delete(b"%d" % (number - 200))
            if number % 200 == 199:
                database._write()
                sizes.append(database.metrics.nbytes)
    assert max(sizes) < 3 * 200 * 20_000 + 8 * 2**20
    assert path.stat().st_size < 2 * 200 * 20_000
    assert [file.name for file in path.parent.iterdir()] == ["a.db"]


def test_an_emptied_file_becomes_small(path):
    fill(path, 2000)
    assert path.stat().st_size > 2_000_000
    with opened(path) as database:
        table = database.table("things")
        for row in table.rows():
            table.delete(row.key)
    assert path.stat().st_size < 100_000


# ----------------------------------------------------------------------------------------------------- damage


def assert_whole_or_fresh(path: Path, rows: list[tuple[bytes, bytes]], what: str) -> bool:
    """After damage there is all or nothing, and the file can be used. Return whether there is nothing."""
    notices = list[str]()
    with opened(path, notices) as database:
        kept_rows = kept(database)
        assert sorted(kept_rows) in ([], sorted(rows)), what
        assert bool(notices) == bool(database.metrics.resets), (what, notices)
        assert database.metrics.is_on, (what, notices)
        database.table("more").put(b"new")
    with opened(path) as database:
        assert kept(database, "more") == [(b"new", b"")], what
    return not kept_rows


@pytest.mark.thorough
def test_a_flipped_bit_never_changes_a_row(path, tmp_path):
    rows, chance = fill(path, 12), random.Random(7)
    whole, damaged = path.read_bytes(), tmp_path / "damaged.db"
    places = [*range(100), *(chance.randrange(len(whole)) for _ in range(150))]
    fresh = 0
    for place in places[:: 1 if is_whole() else 3]:
        changed = bytearray(whole)
        changed[place] ^= 1 << chance.randrange(8)
        damaged.write_bytes(changed)
        fresh += assert_whole_or_fresh(damaged, rows, f"byte {place}")
    assert 0 < fresh < len(places), "some of its bytes say nothing"


def test_a_flipped_bit_in_a_value_is_always_found(path):
    rows, chance = fill(path, 3), random.Random(7)
    whole = path.read_bytes()
    for key, value in rows * 10:
        changed = bytearray(whole)
        changed[whole.index(value[:400]) + chance.randrange(400)] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        assert assert_whole_or_fresh(path, rows, f"value of {key}")


def test_damage_that_is_no_text_is_reported_in_one_line(path):
    """SQLite quotes it in its messages, and Python cannot decode them (lesson 165)."""
    fill(path, 12)
    whole, chance, notices = path.read_bytes(), random.Random(7), list[str]()
    for _ in range(60):
        place = whole.index(b"CREATE TABLE") + chance.randrange(-60, 150)
        path.write_bytes(whole[:place] + chance.randbytes(48) + whole[place + 48 :])
        with opened(path, notices) as database:
            assert database.metrics.is_on
    assert len(notices) == 60
    assert all(line.isprintable() and len(line) < 300 for line in notices)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.db", "a.db-wal"])
def test_a_file_in_pieces_or_with_holes_is_read_whole_or_begun_anew(path, tmp_path, name):
    """Also the write-ahead log, which a killed process leaves behind."""
    chance, here = random.Random(7), tmp_path / "copy"
    with opened(path, write_after_s=0.01) as database:
        table, rows = database.table("things"), [(b"%d" % number, os.urandom(900)) for number in range(20)]
        for key, value in rows:
            table.put(key, value)
        wait_until(lambda: database.metrics.written == 20)
        shutil.copytree(path.parent, tmp_path / "left")
    if name == "a.db":
        (tmp_path / "left" / "a.db-wal").unlink()
        shutil.copy(path, tmp_path / "left" / "a.db")
    whole = (tmp_path / "left" / name).read_bytes()
    for _ in range(40):
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(tmp_path / "left", here)
        start, end = sorted(chance.randrange(len(whole) + 1) for _ in range(2))
        damage = chance.choice(
            [whole[:start], whole[:start] + bytes(end - start) + whole[end:], whole[:start] + whole[end:]]
        )
        (here / name).write_bytes(damage)
        assert_whole_or_fresh(here / "a.db", rows, f"{start} {end} {len(damage)}")


def states_in_a_log(path: Path, count: int) -> list[list[tuple[bytes, bytes]]]:
    """Commit so many changes, one after the other; return what there is after each, and leave the log."""
    left, states = path.parent.with_name("left"), list[list[tuple[bytes, bytes]]]()
    rows = dict[bytes, bytes]()
    with opened(path, write_after_s=0.001) as database:
        table = database.table("things")
        for number in range(count):
            key = b"%d" % (number % 5)
            rows[key] = os.urandom(300)
            table.put(key, rows[key])
            wait_until(lambda number=number: database.metrics.written == number + 1)
            states.append(sorted(rows.items()))
        shutil.copytree(path.parent, left)
    return states


def torn_logs(log: bytes) -> Iterator[bytes]:
    """Logs of which not all was written: an end is missing, or whole sectors."""
    yield from (log[:end] for end in range(0, len(log), 997))
    for begin in range(0, len(log), 512 * 3):
        yield log[:begin] + bytes(512) + log[begin + 512 :]
        yield log[:begin] + bytes(len(log) - begin)


@pytest.mark.thorough
def test_a_log_that_was_not_written_whole_gives_an_earlier_state(path, tmp_path):
    states, here = states_in_a_log(path, 12), tmp_path / "copy"
    log = (tmp_path / "left" / "a.db-wal").read_bytes()
    indexes = list[int]()
    for torn in torn_logs(log):
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(tmp_path / "left", here)
        (here / "a.db-wal").write_bytes(torn)
        with opened(here / "a.db") as database:
            indexes.append([[], *states].index(sorted(kept(database))))
            assert database.metrics.is_on
    assert len({*indexes}) > 10, "one after the other"


@pytest.mark.thorough
def test_a_page_of_zeros_is_found(path, tmp_path):
    rows, damaged = fill(path, 40), tmp_path / "damaged.db"
    whole = path.read_bytes()
    fresh = 0
    for begin in range(0, len(whole), 4096):
        damaged.write_bytes(whole[:begin] + bytes(4096) + whole[begin + 4096 :])
        fresh += assert_whole_or_fresh(damaged, rows, f"page at {begin}")
    assert fresh >= len(whole) // 4096 - 2, "all but those that say nothing"


@pytest.mark.sample(2)
@pytest.mark.parametrize("content", [b"", b"\0", b"something else " * 1000, bytes(10_000)])
def test_a_file_of_something_else_is_begun_anew(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    assert assert_whole_or_fresh(path, [], repr(content[:9]))


@pytest.mark.parametrize(
    "change", [f"PRAGMA user_version={FORMAT + 1}", "DROP TABLE rows", "UPDATE rows SET value = 'text'"]
)
def test_a_file_of_another_format_is_begun_anew_and_that_is_reported(path, change):
    fill(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(change)
    connection.close()
    notices = list[str]()
    with opened(path, notices) as database:
        assert kept(database) == []
        assert (database.metrics.resets, database.metrics.is_on) == (1, True)
    assert len(notices) == 1
    assert notices[0].startswith("a.db is ")


@pytest.mark.parametrize(
    "change",
    [
        "name = x'00'",
        "key = x'00'",
        "written_ns = written_ns - 1",
        "used_ns = -9 * 1000000000000000000",
        "used_ns = 5 * 1000000000000000000",
        "used_ns = NULL",
        "checksum = checksum + 1",
        "value = value || x'00'",
        "value = (SELECT value FROM rows WHERE key = x'30')",
    ],
)
def test_a_row_that_somebody_changed_is_not_believed(path, change):
    fill(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"UPDATE rows SET {change} WHERE key = x'31'")
    connection.close()
    assert assert_whole_or_fresh(path, [], change)


# -------------------------------------------------------------------------------------- it cannot be used now


def assert_off(path: Path, reason: str) -> None:
    notices = list[str]()
    with opened(path, notices) as database:
        table = database.table("things")
        table.put(b"a")
        table.touch(b"a")
        assert (table.rows(), pending(database), database.metrics.is_on) == ([], 0, False)
    assert len(notices) == 1
    assert reason in notices[0]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").touch()
    assert_off(tmp_path / "file" / "a.db", "Not a directory")


def test_a_folder_in_its_place_is_reported(tmp_path):
    assert_off(tmp_path, "Is a directory")


def test_a_link_is_not_followed(tmp_path):
    fill(tmp_path / "other.db")
    (tmp_path / "a.db").symlink_to(tmp_path / "other.db")
    assert_off(tmp_path / "a.db", "symbolic links")


def test_two_servers_do_not_share_a_file(path):
    with opened(path) as database:
        database.table("things").put(b"a")
        assert_off(path, "locked")
    with opened(path) as database:
        assert kept(database) == [(b"a", b"")]


def test_no_other_process_gets_the_file_after_a_second_try_in_this_one(path):
    """Closing a file ends the locks that the process has on it, whatever opened it for them."""
    with opened(path):
        assert_off(path, "locked")
        command = [sys.executable, "-c", TRY, str(path)]
        tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert tried.stdout == "database is locked\n"


def test_what_cannot_be_written_is_written_later(path, monkeypatch):
    monkeypatch.setattr(module, "_RETRY_AFTER_S", 0.02)
    notices, value = list[str](), os.urandom(100_000)
    with opened(path, notices, write_after_s=0.01) as database:
        table = database.table("things")
        table.put(b"before")
        wait_until(lambda: database.metrics.written == 1)
        connection = database._file._connection
        assert connection
        connection.execute("PRAGMA max_page_count=10")
        table.put(b"a", value)
        wait_until(lambda: database.metrics.failures > 2)
        for key in (b"b", b"c"):
            table.put(key)
        table.put(b"a", value + b"!")
        table.touch(b"before")
        table.delete(b"b")
        assert (len(notices), "disk is full" in notices[0]) == (1, True)
        connection.execute("PRAGMA max_page_count=100000")
        wait_until(lambda: database.metrics.written > 1)
    with opened(path) as database:
        assert kept(database) == [(b"c", b""), (b"a", value + b"!"), (b"before", b"")]


def test_what_changes_while_it_cannot_be_written_is_newer(path, monkeypatch):
    write = DatabaseFile.write

    def full(self, *changes):
        monkeypatch.setattr(DatabaseFile, "write", write)
        table.put(b"a", b"newer")
        table.touch(b"b")
        raise sqlite3.OperationalError("database or disk is full")

    with opened(path, []) as database:
        table = database.table("things")
        for key in (b"a", b"b", b"c"):
            table.put(key, b"older")
            table.touch(key)
        database._is_closing = True  # uses are written too
        monkeypatch.setattr(DatabaseFile, "write", full)
        database._write()
        assert database.metrics.failures == 1
    with opened(path) as database:
        assert kept(database) == [(b"c", b"older"), (b"a", b"newer"), (b"b", b"older")]


def test_a_process_that_may_not_write_goes_on_and_writes_later(path):
    """The limit of a file's size stands for a full disk."""
    code = """
import resource, signal, sys, time
from pathlib import Path
from start_llm.storage import database
from start_llm.storage.disk_thread import DiskThread
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
database._RETRY_AFTER_S = 0.05
thread = DiskThread(print)
thread.start()
kept = database.Database(Path(sys.argv[1]), thread, print, write_after_s=0.01)
table = kept.table("things")
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
for number in range(40):
    table.put(b"%d" % number, bytes(20_000))
while kept.metrics.failures < 3:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
kept.close()
print(thread.close(10))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "True", done.stdout
    assert done.stdout.count("cannot be written") == 1
    with opened(path) as database:
        assert len(kept(database)) == 40


def test_the_end_tells_what_it_could_not_write(path, monkeypatch):
    def full(self, *changes):
        raise sqlite3.OperationalError("database or disk is full")

    fill(path, 1)
    sentences = list[str]()
    with opened(path, sentences) as database:
        monkeypatch.setattr(DatabaseFile, "write", full)
        database.table("things").put(b"a")
    assert [sentence.partition(":")[0].partition(" (")[0] for sentence in sentences] == [
        "a.db cannot be written",
        "a.db could not be written",
    ]
    with opened(path) as database:
        assert [key for key, _ in kept(database)] == [b"0"]


def test_if_too_much_is_pending_nothing_is_kept(path):
    fill(path)
    notices = list[str]()
    with opened(path, notices, write_after_s=0.01, max_pending_bytes=100_000) as database:
        table = database.table("things")
        table.put(b"a", bytes(100_000))
        table.put(b"b")
        wait_until(lambda: len(notices) == 1)
        assert (pending(database), database.metrics.is_on, path.exists()) == (0, False, False)
    assert "given up" in notices[0]
    assert len(notices) == 1
    with opened(path) as database:
        assert kept(database) == []


def test_damage_that_is_found_while_it_is_written_ends_it(path, monkeypatch):
    fill(path)
    notices = list[str]()

    def write(self, *changes):
        raise sqlite3.DatabaseError("database disk image is malformed")

    with opened(path, notices, write_after_s=0.01) as database:
        monkeypatch.setattr(DatabaseFile, "write", write)
        database.table("things").put(b"a")
        wait_until(lambda: len(notices) == 1)
        assert (database.metrics.is_on, path.exists()) == (False, False)
    assert "malformed" in notices[0]


# ----------------------------------------------------------------------------------------------------- killed

COUNT = """
import sys, time
from pathlib import Path
from start_llm.storage.database import Database
from start_llm.storage.disk_thread import DiskThread
thread = DiskThread(print)
thread.start()
database = Database(Path(sys.argv[1]), thread, print, write_after_s=0.001)
first, second = database.table("first"), database.table("second")
number = max((int(row.key) for row in second.rows()), default=-1)
print(number, flush=True)
while True:
    number += 1
    first.put(b"%d" % number, b"%d" % number * 500)
    second.put(b"%d" % number, b"%d" % number)
    first.delete(b"%d" % (number - 50))
    second.delete(b"%d" % (number - 50))
    if number % 20 == 0:
        time.sleep(0.001)
        print(number, database.metrics.written, flush=True)
"""
CHANGES_OF_A_NUMBER = 4


@pytest.mark.thorough
def test_a_killed_process_leaves_what_was_there_at_some_moment(path):
    chance = random.Random(7)
    last = -1
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", COUNT, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout
            begun = int(process.stdout.readline())
            assert begun == last, "the next process finds what this one has found"
            time.sleep(chance.uniform(0.05, 0.4))
            process.send_signal(signal.SIGKILL)
            lines = [line.split() for line in process.stdout.read().splitlines(keepends=True) if "\n" in line]
        with opened(path) as database:
            first = sorted(int(row.key) for row in database.table("first").rows())
            second = sorted(database.table("second").rows(), key=lambda row: int(row.key))
        last = int(second[-1].key) if second else -1
        there, before = [*range(max(last - 49, 0), last + 1)], [last - 50] if last >= 50 else []
        assert (first, [int(row.key) for row in second]) in [
            (there, there),
            ([*there, last + 1], there),
            ([*before, *there], [*before, *there]),
            (there, [*before, *there]),
        ], "every change up to one, and none after it"
        assert all(row.value == row.key for row in second)
        if lines:
            assert last >= begun + int(lines[-1][1]) // CHANGES_OF_A_NUMBER - 50, "what was written is there"
