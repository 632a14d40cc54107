"""The files of the disk tier: a page, or a state with the tokens since its page, in a safetensors container.

Any safetensors reader can open them. Data begins at a multiple of 4,096 bytes. The first tensor, `crc32`, has
the checksums of the header and of each other tensor; the second one, `tokens`, has the token ids. A file is
written beside its place and renamed, so a file in its place is whole, except after a power cut: then its
checksums are wrong.

Runs on the disk thread. Sees bytes, memory views and file descriptors, and never calls MLX.
"""

import json
import os
import zlib
from array import array
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from start_llm.storage.private_files import private_folder, private_opener

type FileKind = Literal["pages", "states"]
"""Also the name of the folder that has the files of this kind."""

KINDS: tuple[FileKind, ...] = ("pages", "states")
FORMAT = "start_llm 1"
TEMPORARY = ".tmp"
_ALIGNMENT = 4096
_FIRST_READ = 64 * 1024
_LONGEST_HEADER = 16 * 2**20
_MOST_VECTORS = 512
_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


class RejectedFile(Exception):
    """A file cannot be used.

    Attributes:
        reason: `missing`, `truncated`, `header`, `format`, `key`, `tokens`, `layout` or `checksum`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TensorLayout(NamedTuple):
    """A tensor's type, as safetensors calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a file.

    Attributes:
        key: key of the prefix that ends with these tokens.
        parent: key of the prefix before them.
        tokens: the tokens between the two.
        tensors: by name, in the order of their data.
        numbers: for each non-trimmable leaf the numbers that it needs to be restored.
        kv_format: how its KV is quantised; empty if it is not.
    """

    kind: FileKind
    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    tensors: Mapping[str, TensorLayout]
    numbers: tuple[tuple[int, ...], ...] = ()
    kv_format: str = ""

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.encoded()) + sum(layout.nbytes for layout in self._all_tensors().values())

    def _all_tensors(self) -> dict[str, TensorLayout]:
        """All tensors in the order of their data. There is a checksum for the header and for all but the
        first.
        """
        return {
            "crc32": TensorLayout("U32", (len(self.tensors) + 2,)),
            "tokens": TensorLayout("U32", (len(self.tokens),)),
            **self.tensors,
        }

    def encoded(self) -> bytes:
        """Return the container's header: its length, JSON, and spaces up to where the data begins."""
        metadata = {
            "format": FORMAT,
            "kind": self.kind,
            "key": self.key.hex(),
            "parent": self.parent.hex(),
            "numbers": json.dumps(self.numbers),
        }
        if self.kv_format:
            metadata["kv_format"] = self.kv_format
        entries: dict[str, Any] = {"__metadata__": metadata}
        place = 0
        for name, layout in self._all_tensors().items():
            end = place + layout.nbytes
            entries[name] = {"dtype": layout.dtype, "shape": layout.shape, "data_offsets": [place, end]}
            place = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


# ------------------------------------------------------------------------------------------------------ write


def write_file(path: Path, header: FileHeader, tensors: Sequence[memoryview]) -> int:
    """Write a file and put it into its place. Returns its size. An error leaves nothing behind.

    Args:
        tensors: the bytes of each tensor, in the order of the header.

    Raises:
        OSError: it cannot be written.
    """
    start, tokens = memoryview(header.encoded()), memoryview(array("I", header.tokens)).cast("B")
    checksums = array("I", [zlib.crc32(part) for part in (start, tokens, *tensors)])
    parts = [start, memoryview(checksums).cast("B"), tokens, *tensors]
    temporary = path.with_name(path.name + TEMPORARY)
    private_folder(path.parent)
    try:
        with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            _write_all(file, [part for part in parts if part.nbytes])
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return sum(part.nbytes for part in parts)


@contextmanager
def _opened(path: Path, flags: int) -> Generator[int]:
    file = private_opener(str(path), flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield file
    finally:
        os.close(file)


def _write_all(file: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(file, parts[:_MOST_VECTORS]))


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of these parts after `done` bytes."""
    for index, part in enumerate(parts):
        if done < part.nbytes:
            return [part[done:], *parts[index + 1 :]]
        done -= part.nbytes
    return []


# ------------------------------------------------------------------------------------------------------- read


class OpenedFile:
    """A file that is being read. Its header and its tokens have been checked.

    Attributes:
        header: what the file holds.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        start = _read_start(file)
        entries = _entries(start)
        self._places = _places(entries, len(start), os.fstat(file).st_size)
        checked = [start, self._bytes("tokens")]
        self._checksums = array("I", self._bytes("crc32"))
        if self._checksums[:2] != array("I", map(zlib.crc32, checked)):
            raise RejectedFile("checksum")
        self.header = _header(entries, tuple(array("I", checked[1])))
        if len(self._checksums) != len(self.header.tensors) + 2:
            raise RejectedFile("header")

    def read_into(self, targets: Sequence[Sequence[memoryview]]) -> None:
        """Read all tensors and check them.

        Args:
            targets: for each tensor the buffers that take its bytes, together of its size.

        Raises:
            RejectedFile: something is wrong. The buffers then hold anything.
            OSError: the file cannot be read.
        """
        for name, checksum, parts in zip(self.header.tensors, self._checksums[2:], targets, strict=True):
            begin, end = self._places[name]
            filled = [part for part in parts if part.nbytes]
            if sum(part.nbytes for part in filled) != end - begin:
                raise RejectedFile("layout")
            _read_all(self._file, filled, begin)
            crc = 0
            for part in filled:
                crc = zlib.crc32(part, crc)
            if crc != checksum:
                raise RejectedFile("checksum")

    def verify(self) -> None:
        """Read all tensors and check them.

        Raises:
            RejectedFile, OSError: see `read_into`.
        """
        self.read_into([[memoryview(bytearray(layout.nbytes))] for layout in self.header.tensors.values()])

    def _bytes(self, name: str) -> bytes:
        begin, end = self._places[name]
        return os.pread(self._file, end - begin, begin)


@contextmanager
def opened_file(path: Path, kind: FileKind, key: bytes) -> Generator[OpenedFile]:
    """Open a file that should be of this kind and have this key.

    Raises:
        RejectedFile: it is missing, damaged, or another file.
        OSError: it cannot be read.
    """
    try:
        with _opened(path, os.O_RDONLY) as file:
            opened = _parsed(file)
            if (opened.header.kind, opened.header.key) != (kind, key):
                raise RejectedFile("key")
            yield opened
    except FileNotFoundError:
        raise RejectedFile("missing") from None


def _parsed(file: int) -> OpenedFile:
    """Return an opened file; whatever else its header may say of itself makes it a bad one."""
    try:
        return OpenedFile(file)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise RejectedFile("header") from None


def _read_start(file: int) -> bytes:
    """Return the header with its length in front."""
    start = os.pread(file, _FIRST_READ, 0)
    length = 8 + int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > _LONGEST_HEADER:
        raise RejectedFile("header")
    if len(start) < length:
        start += os.pread(file, length - len(start), len(start))
    if len(start) < length:
        raise RejectedFile("truncated")
    return start[:length]


def _entries(start: bytes) -> dict[str, Any]:
    """Return the container's header as it was written."""
    entries = json.loads(start[8:])
    if entries["__metadata__"]["format"] != FORMAT:
        raise RejectedFile("format")
    return entries


def _places(entries: Mapping[str, Any], data: int, size: int) -> dict[str, tuple[int, int]]:
    """Return where each tensor begins and ends in the file. They follow each other and end with the file.

    Args:
        data: where the data begins.
        size: size of the file.
    """
    places: dict[str, tuple[int, int]] = {}
    reached = 0
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if begin != reached or end - begin != _layout(entry).nbytes:
            raise RejectedFile("header")
        places[name] = data + begin, data + end
        reached = end
    if data + reached != size:
        raise RejectedFile("truncated")
    if list(places)[:2] != ["crc32", "tokens"]:
        raise RejectedFile("header")
    return places


def _layout(entry: Mapping[str, Any]) -> TensorLayout:
    layout = TensorLayout(entry["dtype"], tuple(entry["shape"]))
    if not all(type(size) is int and size >= 0 for size in layout.shape):
        raise RejectedFile("header")
    return layout


def _header(entries: Mapping[str, Any], tokens: tuple[int, ...]) -> FileHeader:
    metadata = entries["__metadata__"]
    names = [name for name in entries if name not in ("__metadata__", "crc32", "tokens")]
    return FileHeader(
        kind=metadata["kind"],
        key=bytes.fromhex(metadata["key"]),
        parent=bytes.fromhex(metadata["parent"]),
        tokens=tokens,
        tensors={name: _layout(entries[name]) for name in names},
        numbers=tuple(tuple(map(int, numbers)) for numbers in json.loads(metadata["numbers"])),
        kv_format=metadata.get("kv_format", ""),
    )


def _read_all(file: int, parts: list[memoryview], begin: int) -> None:
    while parts:
        count = os.preadv(file, parts[:_MOST_VECTORS], begin)
        if not count:
            raise RejectedFile("truncated")
        parts, begin = _after(parts, count), begin + count
