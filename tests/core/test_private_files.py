"""Private files belong to their owner alone, and a lock ends with its process."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from start_llm.storage.private_files import Lock, private_folder, private_opener

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from start_llm.storage.private_files import Lock
lock = Lock(Path(sys.argv[1]))
print(lock.take(), flush=True)
time.sleep(60)
"""


@contextmanager
def umask(mask: int) -> Generator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0, 0o022, 0o027, 0o077])
def test_all_that_is_made_is_private_whatever_the_umask(tmp_path, mask):
    with umask(mask):
        private_folder(tmp_path / "a" / "b")
        with open(tmp_path / "a" / "file", "w", opener=private_opener) as file:
            file.write("x")
        lock = Lock(tmp_path / "c" / "lock")
        assert lock.take()
        modes = [mode(tmp_path / name) for name in ("a", "a/b", "c", "a/file", "c/lock")]
        lock.release()
    assert modes == [0o700, 0o700, 0o700, 0o600, 0o600]


def test_what_is_there_stays_as_it_is(tmp_path):
    tmp_path.chmod(0o755)
    private_folder(tmp_path)
    assert mode(tmp_path) == 0o755


def test_a_file_in_the_place_of_a_folder_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "inner"):
        with pytest.raises(NotADirectoryError):
            private_folder(path)


def test_a_lock_has_one_holder(tmp_path):
    lock, other = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    assert lock.take()
    assert not other.take()
    assert other.holder() == str(os.getpid())
    other.release()
    assert (tmp_path / "lock").exists(), "it was not its own to give back"
    lock.release()
    assert not (tmp_path / "lock").exists()
    assert other.take()
    other.release()


def test_a_lock_can_be_taken_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    lock, other = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    monkeypatch.setattr(os, "write", full)
    assert lock.take()
    assert not other.take()
    assert other.holder() == "unknown"
    lock.release()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("call", ["flock", "samestat"])
def test_a_lock_that_the_system_refuses_keeps_no_file_open(tmp_path, monkeypatch, call):
    opened: list[int] = []
    real = os.open

    def noted(*those: Any) -> int:
        opened.append(real(*those))
        return opened[-1]

    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(*((fcntl, call) if call == "flock" else (os.path, call)), refused)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
        Lock(tmp_path / "lock").take()
    (file,) = opened
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        os.fstat(file)


def test_a_file_that_a_dead_server_has_left_locks_nobody_out(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "lock")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "True\n"
        mine = Lock(tmp_path / "lock")
        assert not mine.take()
        assert mine.holder() == str(process.pid)
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / "lock").exists()
    assert mine.take()
    mine.release()


def test_a_lock_that_was_taken_away_while_it_was_opened_is_none(tmp_path, monkeypatch):
    """Between opening and locking, its holder takes the file away, and a third one makes a new file."""
    path = tmp_path / "lock"
    holder, third = Lock(path), Lock(path)
    assert holder.take()
    tries: list[None] = []

    def open_late(name: Path, flags: int, mode: int) -> int:
        file = opened(name, flags, mode)
        if not tries:
            tries.append(None)
            holder.release()
            assert third.take()
        return file

    opened = os.open
    late = Lock(path)
    with monkeypatch.context() as patch:
        patch.setattr("start_llm.storage.private_files.os.open", open_late)
        assert not late.take()
    third.release()


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        Lock(tmp_path / "lock").take()
    assert (tmp_path / "target").read_text() == "precious"
