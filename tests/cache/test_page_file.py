"""Files of the disk tier: what is written is read, and a file with any change is refused."""

import json
import os
import random
import stat
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import load_file

from start_llm.cache.disk.page_file import (
    FORMAT,
    FileHeader,
    RejectedFile,
    TensorLayout,
    opened_file,
    write_file,
)

KEY, PARENT = bytes(range(16)), bytes(range(16, 32))
TOKENS = (5, 0, 2**31, 7)
TENSORS = {
    "kv.0.0": TensorLayout("F32", (1, 2, 4, 3)),
    "kv.0.1": TensorLayout("BF16", (1, 2, 4, 3)),
    "kv.1.0": TensorLayout("U8", (1, 2, 4, 0)),
}
HEADER = FileHeader("pages", KEY, PARENT, TOKENS, TENSORS, ((3, 4), ()))
RANDOM = random.Random(1)
CONTENT = [RANDOM.randbytes(layout.nbytes) for layout in TENSORS.values()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pages" / "00" / KEY.hex()
    assert write_file(path, HEADER, [memoryview(part) for part in CONTENT]) == HEADER.nbytes
    return path


def read(path: Path) -> list[bytes]:
    with opened_file(path, "pages", KEY) as file:
        assert file.header == HEADER
        targets = [bytearray(tensor.nbytes) for tensor in file.header.tensors.values()]
        file.read_into([[memoryview(tensor)] for tensor in targets])
    return [bytes(tensor) for tensor in targets]


def test_what_was_written_is_read(path: Path):
    assert read(path) == CONTENT
    assert path.stat().st_size == HEADER.nbytes


def test_any_reader_of_the_container_opens_it(path: Path):
    # The library for NumPy knows no bfloat16, so the tensor of that type is given as another one of its size.
    names = {**TENSORS, "kv.0.1": TensorLayout("F16", (1, 2, 4, 3))}
    write_file(path, FileHeader("pages", KEY, PARENT, TOKENS, names), [memoryview(part) for part in CONTENT])
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == list(TOKENS)
    assert tensors["kv.0.0"].shape == (1, 2, 4, 3)
    assert tensors["kv.0.0"].tobytes() == CONTENT[0]
    assert tensors["crc32"].dtype == np.uint32


def test_data_begins_at_a_multiple_of_4096(path: Path):
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0


def test_a_tensor_is_read_into_several_buffers(path: Path):
    first, rest = bytearray(40), bytearray(56)
    others = [[memoryview(bytearray(tensor.nbytes))] for tensor in list(TENSORS.values())[1:]]
    with opened_file(path, "pages", KEY) as file:
        file.read_into([[memoryview(first), memoryview(bytearray(0)), memoryview(rest)], *others])
    assert bytes(first + rest) == CONTENT[0]


def test_only_its_owner_can_read_it(path: Path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.long
def test_every_flipped_bit_is_found(path: Path):
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(RejectedFile):
            read(path)


def test_every_range_of_zeros_and_every_cut_are_found(path: Path):
    whole = path.read_bytes()
    zeroed = (whole[:place] + bytes(16) + whole[place + 16 :] for place in range(0, len(whole) - 16, 16))
    cut = (whole[:place] for place in range(0, len(whole), 7))
    for content in (*zeroed, *cut):
        if content != whole:
            path.write_bytes(content)
            with pytest.raises(RejectedFile):
                read(path)


@pytest.mark.parametrize("change", ["zeros", "cut", "longer", "foreign", "nothing"])
def test_what_is_no_such_file_is_refused(path: Path, change: str):
    whole = path.read_bytes()
    changed = {
        "zeros": [bytes(len(whole)), *(whole[:at] + bytes(len(whole) - at) for at in (8, 4096, 4200))],
        "cut": [whole[:at] for at in (1, 7, 8, 100, 4095, 4096, 4100, len(whole) - 1)],
        "longer": [whole + b"\0", whole + whole],
        "foreign": [b"GGUF" + whole, os.urandom(5000), (2).to_bytes(8, "little") + b"{}", b"\xff" * 64],
        "nothing": [b""],
    }
    for content in changed[change]:
        path.write_bytes(content)
        with pytest.raises(RejectedFile):
            read(path)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (FileHeader("pages", PARENT, PARENT, TOKENS, TENSORS), "key"),
        (FileHeader("states", KEY, PARENT, TOKENS, TENSORS), "key"),
    ],
)
def test_another_file_in_its_place_is_refused(path: Path, header: FileHeader, reason: str):
    write_file(path, header, [memoryview(part) for part in CONTENT])
    with pytest.raises(RejectedFile) as raised:
        read(path)
    assert raised.value.reason == reason


def test_the_format_of_another_version_is_refused(path: Path):
    path.write_bytes(path.read_bytes().replace(b"start_llm 1", b"start_llm 0"))
    with pytest.raises(RejectedFile) as raised:
        read(path)
    assert raised.value.reason == "format"


def test_a_file_that_is_not_there_is_missing(tmp_path: Path):
    with pytest.raises(RejectedFile) as raised, opened_file(tmp_path / "none", "pages", KEY):
        pass
    assert raised.value.reason == "missing"


def test_a_link_is_not_followed(path: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"):
        read(path)


def test_buffers_of_another_size_are_refused(path: Path):
    with opened_file(path, "pages", KEY) as file, pytest.raises(RejectedFile) as raised:
        file.read_into([[memoryview(bytearray(1))]] * 3)
    assert raised.value.reason == "layout"


def test_an_error_while_writing_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch):
    before = path.read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, HEADER, [memoryview(item) for item in CONTENT])
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == before


@pytest.mark.parametrize("numbers", [((float("inf"),),), ((float("nan"),),)])
def test_numbers_that_are_none_are_no_error_of_ours(path: Path, numbers: tuple[tuple[float, ...], ...]):
    header = FileHeader("pages", KEY, PARENT, TOKENS, TENSORS, cast("Any", numbers))
    write_file(path, header, [memoryview(part) for part in CONTENT])
    with pytest.raises(RejectedFile, match="header"), opened_file(path, "pages", KEY):
        pass


@pytest.mark.parametrize(
    "entries",
    [
        {"crc32": ("U8", [3]), "tokens": ("U8", [5])},
        {"crc32": ("U32", [2]), "tokens": ("U32", [1.0])},
        {"crc32": (["U8"], [8]), "tokens": ("U8", [5])},
        {"crc32": "U8", "tokens": 5},
    ],
)
def test_a_header_that_makes_no_sense_is_no_error_of_ours(tmp_path: Path, entries: dict[str, Any]):
    place, header = 0, dict[str, Any](__metadata__={"format": FORMAT})
    for name, entry in entries.items():
        header[name] = entry
        if isinstance(entry, tuple):
            end = place + int(entry[1][0]) * (1 if entry[0] == "U8" else 4)
            header[name] = {"dtype": entry[0], "shape": entry[1], "data_offsets": [place, end]}
            place = end
    text = json.dumps(header).encode()
    path = tmp_path / "a"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(place))
    with pytest.raises(RejectedFile, match=r"header|truncated"), opened_file(path, "pages", KEY):
        pass
