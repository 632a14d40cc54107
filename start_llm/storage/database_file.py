"""A private SQLite file of rows with checksums.

SQLite notices a damaged structure, but not a changed byte in a value. So each row has a checksum. The file is
read and checked as a whole when it is opened; after that it is only written.
"""

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from start_llm.storage.private_files import private_file, private_folder

FORMAT = 3
"""Version of the tables and of the rows in them. Raise it when a store changes what it writes."""

_SCHEMA = """
CREATE TABLE rows (
    name BLOB, key BLOB, written_ns INTEGER, used_ns INTEGER, checksum INTEGER, value BLOB,
    PRIMARY KEY (name, key)
) WITHOUT ROWID
"""
_READ = "SELECT name, key, written_ns, used_ns, checksum, value FROM rows ORDER BY used_ns"
_PUT = "INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?)"
_TOUCH = "UPDATE rows SET used_ns = ? WHERE name = ? AND key = ?"
_DELETE = "DELETE FROM rows WHERE name = ? AND key = ?"
_MAX_WAL_BYTES = 4 * 2**20
_FREE_SHARE = 4
"""Free pages are given back to the file system when they are more than a quarter of the file."""
_MAX_TIME_NS = 2**62
_MOST_SHOWN = 200
UNREADABLE = (ValueError, TypeError, KeyError, IndexError, RecursionError)
"""Errors that decoding a row can raise if it does not hold what it should."""
_NO_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_PERM,
    }
)
"""Errors that say nothing about the contents of the file."""


class RowName(NamedTuple):
    """The table and the key of a row."""

    table: bytes
    key: bytes


class StoredRow(NamedTuple):
    """A row. The times are nanoseconds of wall time.

    Attributes:
        written_ns: when its value was written.
        used_ns: when it was written or used last. It has no checksum, so that a use does not need the value.
    """

    name: RowName
    written_ns: int
    used_ns: int
    value: bytes


class UnusableFile(Exception):
    """The file is damaged, or another version has written it. The text completes "the file is ..."."""


class DatabaseFile:
    """The file and its connection. Used by one thread at a time. No other process can use it meanwhile."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    @property
    def nbytes(self) -> int:
        """Size of the file and of its write-ahead log."""
        total = 0
        for path in (self._path, self._beside("-wal")):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def open(self) -> list[StoredRow]:
        """Open the file, or make it, and return its rows, the least recently used first.

        Raises:
            UnusableFile: its contents cannot be trusted. It is closed; `delete` it and open it again.
            OSError, sqlite3.Error: it cannot be opened or written, or another process uses it.
        """
        private_folder(self._path.parent)
        private_file(self._path)
        self._connection = connection = sqlite3.connect(
            self._path, timeout=0, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
            return _rows(connection)
        except UnusableFile:
            self.close()
            raise
        except Exception as error:
            # Of a damaged file sqlite3 raises more than its own errors: a message that is no UTF-8, a size
            # that is too large (lesson 165).
            self.close()
            if isinstance(error, OSError) or _code(error) in _NO_DAMAGE:
                raise
            raise UnusableFile(f"damaged: {_in_one_line(str(error) or type(error).__name__)}") from error

    def write(
        self, puts: Iterable[StoredRow], touches: Iterable[tuple[RowName, int]], deletes: Iterable[RowName]
    ) -> None:
        """Write all of these changes or, if this raises, none of them.

        Args:
            touches: rows, which need not exist, and when they were used.

        Raises:
            sqlite3.OperationalError: they cannot be written now.
            sqlite3.DatabaseError: the file is damaged.
        """
        connection = self._connection
        if connection is None:
            raise sqlite3.OperationalError("the file is closed")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_DELETE, deletes)
            connection.executemany(
                _PUT, ((*row.name, row.written_ns, row.used_ns, _checksum(row), row.value) for row in puts)
            )
            connection.executemany(_TOUCH, ((used_ns, *name) for name, used_ns in touches))
        _return_free_pages(connection)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def delete(self) -> None:
        """Delete the file, which must be closed.

        Raises:
            OSError: it cannot be deleted.
        """
        for path in (self._beside("-wal"), self._beside("-shm"), self._path):
            path.unlink(missing_ok=True)

    def _beside(self, ending: str) -> Path:
        return self._path.with_name(self._path.name + ending)


def encode_json(value: object) -> bytes:
    """Return a value as JSON, for a key or a value of a row. Bytes become hexadecimal digits.

    Lone surrogates are kept as they are. Written as escapes, two of them could become one character.
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=bytes.hex)
    return text.encode(errors="surrogatepass")


def decode_json(data: bytes) -> Any:
    """Return the value of `encode_json`.

    Raises:
        ValueError: it is none.
    """
    return json.loads(data.decode(errors="surrogatepass"))


def _code(error: Exception) -> int | None:
    """Return SQLite's primary error code; None if the error is not SQLite's own."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _in_one_line(text: str) -> str:
    """Return what SQLite says of a file, which may quote the damage, as one line that can be printed."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return " ".join(shown.split())[:_MOST_SHOWN]


def _prepare(connection: sqlite3.Connection) -> None:
    """Check the version, or write it into a new file. From now on this connection alone can use the file."""
    connection.text_factory = bytes
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute("PRAGMA secure_delete=ON")  # rows hold conversations
    connection.execute("PRAGMA journal_mode=WAL")
    # What is committed outlives the process. A power cut may take the last transactions, but breaks nothing.
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(f"PRAGMA journal_size_limit={_MAX_WAL_BYTES}")
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        version = _number(connection, "user_version")
        if version == 0 and _number(connection, "schema_version") == 0:
            connection.execute(_SCHEMA)
            connection.execute(f"PRAGMA user_version={FORMAT}")
        elif version != FORMAT:
            raise UnusableFile(f"of format {version}, and this version reads format {FORMAT}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return connection.execute(f"PRAGMA {pragma}").fetchone()[0]


def _rows(connection: sqlite3.Connection) -> list[StoredRow]:
    """Read and check everything."""
    problems = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problems != (b"ok",):
        raise UnusableFile(f"damaged: {_in_one_line(problems[0].decode(errors='replace'))}")
    return [_row(columns) for columns in connection.execute(_READ)]


def _row(columns: tuple[object, ...]) -> StoredRow:
    match columns:
        case (bytes(table), bytes(key), int(written_ns), int(used_ns), checksum, bytes(value)):
            row = StoredRow(RowName(table, key), written_ns, used_ns, value)
            if 0 <= used_ns < _MAX_TIME_NS and checksum == _checksum(row):
                return row
        case _:
            pass
    raise UnusableFile("damaged: a row has a wrong checksum")


def _checksum(row: StoredRow) -> int:
    (table, key), written_ns, _, value = row
    head = struct.pack("<qII", written_ns, len(table), len(key))
    return zlib.crc32(value, zlib.crc32(head + table + key))


def _return_free_pages(connection: sqlite3.Connection) -> None:
    if _number(connection, "freelist_count") * _FREE_SHARE > _number(connection, "page_count"):
        connection.execute("PRAGMA incremental_vacuum").fetchall()
