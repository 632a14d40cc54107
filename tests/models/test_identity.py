"""Stored KV is used again only for the very same model, so whatever makes another model shows."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from start_llm.models import identity as module
from start_llm.models.identity import IDENTITY_BYTES, digest_of, transcripts_identity, weights_digest
from start_llm.models.identity import identity as identity_with
from start_llm.models.known_digests import KnownDigests, weight_files_of
from start_llm.models.loader import LoadedModel, load

PIECE = 5000
WIDTH = 50
ROWS = 1000
"""50,000 elements: many pieces of the above, or three rows of words and a rest."""


def identity(model: LoadedModel) -> bytes:
    return identity_with(model, digest_of(model))


type Change = Callable[[Path], object]


def digest(values: mx.array, *, name: str = "w", piece: int = PIECE) -> bytes:
    return weights_digest([(name, values)], piece=piece)


def noise(dtype: mx.Dtype, *shape: int) -> mx.array:
    """Random bits of any type."""
    if dtype == mx.bool_:
        return mx.random.bernoulli(shape=shape, key=mx.random.key(1))
    bits = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8, 8: mx.uint32}[dtype.size]
    *outer, last = shape
    words = mx.random.randint(0, 2**31 - 1, [*outer, last * max(dtype.size // 4, 1)], key=mx.random.key(1))
    return words.astype(bits).view(dtype)


def swapped(values: mx.array, first: Any, second: Any) -> mx.array:
    other = mx.array(values)
    other[first], other[second] = values[second], values[first]
    return other


def with_bit(values: mx.array, row: int, column: int, bit: int) -> mx.array:
    """One bit of one element turned round."""
    kind = {4: mx.uint32, 2: mx.uint16, 1: mx.uint8}[values.dtype.size]
    bits = mx.array(values.view(kind))
    bits[row, column] = bits[row, column] ^ mx.array(1 << bit, dtype=kind)
    return bits.view(values.dtype)


# ---------------------------------------------------------------------------------------------------- weights

TYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8, mx.bool_]


@pytest.fixture(params=[PIECE, 1 << 20], ids=["many pieces", "one piece"])
def piece(request) -> int:
    return request.param


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equal_weights_give_an_equal_digest_and_any_change_of_one_type_another(dtype, piece):
    values = noise(dtype, ROWS, WIDTH)
    values[0, 0], values[0, 1], values[-1, -1] = 0, 1, 1
    changed = mx.array(values)
    changed[-1, -1] = 0
    seen = [
        values,
        changed,
        swapped(values, (0, 0), (0, 1)),
        swapped(values, (0, 0), (ROWS - 1, WIDTH - 1)),
        swapped(values, 0, 1),
        swapped(values, 3, ROWS - 1),
        values[::-1],
        values.reshape(WIDTH, ROWS),
        values[:-1],
        values.view(mx.uint8) if dtype != mx.uint8 else values,
    ]
    assert len({digest(parsed, piece=piece) for parsed in seen}) == len(seen)
    assert digest(mx.array(values), piece=piece) == digest(values, piece=piece)


@pytest.mark.parametrize("dtype", [parsed for parsed in TYPES if parsed != mx.bool_], ids=str)
def test_every_bit_counts(dtype):
    values = noise(dtype, 20, WIDTH)
    bits = 8 * dtype.size
    seen = {digest(with_bit(values, 19, WIDTH - 1, bit)) for bit in range(bits)} | {digest(values)}
    assert len(seen) == bits + 1


def test_numbers_that_differ_in_their_sign_may_not_change_places(piece):
    values = mx.abs(noise(mx.bfloat16, ROWS, WIDTH).astype(mx.float32))
    values = mx.where(mx.arange(ROWS)[:, None] % 2 == 0, values[:1], -values[:1])
    seen = [values, *(swapped(values, (0, column), (1, column)) for column in range(20))]
    seen += [swapped(values, 0, 1), -values]
    assert len({digest(parsed, piece=piece) for parsed in seen}) == len(seen)


def test_equal_bits_of_two_types_are_two_weights():
    values = noise(mx.uint32, 10, WIDTH)
    kinds = [mx.uint32, mx.int32, mx.float32]
    halves = [mx.float16, mx.bfloat16, mx.uint16]
    assert len({digest(values.view(kind)) for kind in kinds}) == 3
    assert len({digest(values.view(kind)) for kind in halves}) == 3


def test_parameters_of_equal_shape_may_not_change_their_names():
    first, second = noise(mx.float32, 3, 3), noise(mx.float32, 3, 3) + 1
    straight = weights_digest([("a", first), ("b", second)])
    assert weights_digest([("b", second), ("a", first)]) == straight, "the order that they come in is nothing"
    assert weights_digest([("a", second), ("b", first)]) != straight
    assert weights_digest([("a", first), ("c", second)]) != straight
    assert weights_digest([("a", first)]) != straight


@pytest.mark.parametrize("dtype", [*TYPES, mx.int64, mx.complex64], ids=str)
def test_scalars_and_empty_arrays_and_odd_sizes_have_a_digest(dtype):
    shapes = [(), (0,), (0, 3), (3, 0), (1,), (1, 1), (3,), (7, 11, 13), (2, 1001)]
    zeros = [mx.zeros(shape, dtype=dtype) for shape in shapes]
    assert len({digest(parsed, piece=100) for parsed in zeros}) == len(shapes)
    assert digest(mx.ones((), dtype=dtype)) != digest(zeros[0])


@pytest.mark.parametrize("size", [1, 3, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 3 << 14])
def test_the_first_and_the_last_of_any_number_of_words_count(size):
    values = noise(mx.uint32, size)
    ends = [values + (mx.arange(size) == place) for place in {0, size // 2, size - 1}]
    assert len({digest(parsed, piece=1 << 20) for parsed in [values, *ends]}) == len(ends) + 1


def test_how_an_array_lies_in_memory_is_nothing(piece):
    values = noise(mx.float16, ROWS, WIDTH)
    lying = mx.contiguous(values.T).T
    assert digest(lying, piece=piece) == digest(values, piece=piece)
    assert digest(mx.concatenate([values, values])[ROWS:], piece=piece) == digest(values, piece=piece)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int8], ids=str)
@pytest.mark.parametrize("turned", [False, True], ids=["as stored", "transposed"])
def test_temporary_memory_is_that_of_a_few_pieces(dtype, turned):
    piece = 1 << 16
    values = mx.zeros((1 << 11, 1 << 10), dtype=dtype)
    values = values.T if turned else values
    mx.eval(values)
    weights_digest([("keys are made", mx.zeros(1))])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    digest(values, piece=piece)
    assert values.nbytes > 4 * dtype.size * piece
    assert mx.get_peak_memory() - before < 4 * 4 * piece
    assert mx.get_active_memory() <= before


# ------------------------------------------------------------------------------------------------------ model


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    return tiny_model("qwen3", hidden=64, layers=1, vocab=512)


@pytest.fixture(scope="module")
def model(folder) -> LoadedModel:
    return load(folder)


@pytest.fixture
def changed(folder, tmp_path) -> Callable[[Change], bytes]:
    """The identity of a copy of the model in which something was changed."""

    def identity_after(change: Change) -> bytes:
        copy = shutil.copytree(folder, tmp_path / "model")
        change(copy)
        return identity(load(copy))

    return identity_after


def in_json(name: str, change: Callable[[Any], object]) -> Change:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return edit


def swap_merges(tokenizer: Any) -> None:
    merges = tokenizer["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]


def swap_words(tokenizer: Any) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[65:67]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def one_weight(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights = mx.load(path)
    assert isinstance(weights, dict)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name][3, 5] += 1
    mx.save_safetensors(path, weights, {"format": "mlx"})


CHANGES: dict[str, Change] = {
    "one weight": one_weight,
    "a number of the config": in_json("config.json", lambda config: config.update(rope_theta=12345.0)),
    "a key of the config": in_json("config.json", lambda config: config.update(remark="")),
    "the order of merges": in_json("tokenizer.json", swap_merges),
    "the ids of words": in_json("tokenizer.json", swap_words),
    "the normaliser": in_json("tokenizer.json", lambda parsed: parsed.update(normalizer={"type": "NFC"})),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CHANGES)
def test_a_change_in_the_folder_makes_another_model(case, changed, model):
    assert changed(CHANGES[case]) != identity(model)


def reordered(content: Any) -> None:
    items = list(content.items())
    content.clear()
    content.update(reversed(items))


def padded(tokenizer: Any) -> None:
    tokenizer["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}


SAME: dict[str, Change] = {
    "a copy": lambda folder: None,
    "the order of keys in the config": in_json("config.json", reordered),
    "a length to which texts are cut": in_json("tokenizer.json", padded),
    "the template": lambda folder: (folder / "chat_template.jinja").open("a").write("\n"),
    "another file": lambda folder: (folder / "README.md").write_text("# Model"),
}


@pytest.mark.parametrize("case", SAME)
def test_what_changes_nothing_that_is_computed_leaves_the_identity(case, changed, model):
    assert changed(SAME[case]) == identity(model)
    assert len(identity(model)) == IDENTITY_BYTES


def test_use_of_a_model_leaves_its_identity(folder):
    used = load(folder)
    before = identity(used)
    used.tokenizer.encode("Some text, and more of it", as_document=True)
    mx.eval(used.network(mx.array([[1, 2, 3]])))
    assert identity(used) == before


def test_two_parameters_of_a_network_may_not_change_places(model):
    def identity_of(parameters: dict[str, Any]) -> bytes:
        return identity(replace(model, network=SimpleNamespace(parameters=lambda: parameters)))

    parameters = model.network.parameters()
    attention = parameters["model"]["layers"][0]["self_attn"]
    assert identity_of(parameters) == identity(model)
    attention["k_proj"], attention["v_proj"] = attention["v_proj"], attention["k_proj"]
    assert identity_of(parameters) != identity(model)


def test_another_template_makes_other_transcripts(folder, tmp_path, model):
    copy = shutil.copytree(folder, tmp_path / "model")
    same = transcripts_identity(load(copy), identity(model))
    (copy / "chat_template.jinja").open("a").write("\n")
    assert (
        transcripts_identity(load(copy), identity(model))
        != same
        == transcripts_identity(model, identity(model))
    )


@pytest.mark.parametrize("library", ["mlx", "mlx-lm"])
def test_another_version_of_a_library_makes_old_pages_strange(model, library, monkeypatch):
    before = identity(model)
    monkeypatch.setattr(module, "version", lambda name: "0" if name == library else version(name))
    assert identity(model) != before


class Reads:
    """Counts how often weights are read."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return bytes([self.count])


def known(path: Path, notices: list[str] | None = None) -> KnownDigests:
    return KnownDigests(path, ([] if notices is None else notices).append)


def test_a_digest_is_known_until_a_file_changes(folder, tmp_path):
    copy, reads = shutil.copytree(folder, tmp_path / "model"), Reads()

    def get() -> bytes:
        return known(tmp_path / "state" / "digests.json").get(copy, weight_files_of(copy), reads)

    assert [get(), get()] == [b"\1", b"\1"]
    os.utime(copy / "model.safetensors", ns=(1, 1))
    assert [get(), get()] == [b"\2", b"\2"]
    (copy / "more.safetensors").write_bytes(b"")
    assert [get(), get()] == [b"\3", b"\3"]
    (copy / "README.md").write_text("# Model")
    assert get() == b"\3"


def other_values(path: Path, place: int) -> None:
    """Change one byte of a file and nothing else that `stat` shows, but for what nobody can set."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_other_weights_of_equal_size_and_time_are_others(tmp_path):
    """A file that is written over in its place, and one that takes its place as `rsync -t` does it."""
    copy, reads = tmp_path / "model", Reads()
    copy.mkdir()
    (copy / "model.safetensors").write_bytes(bytes(20_000))
    digests, weights = known(tmp_path / "digests.json"), copy / "model.safetensors"
    assert digests.get(copy, weight_files_of(copy), reads) == b"\1"
    other_values(weights, weights.stat().st_size - 1)
    assert digests.get(copy, weight_files_of(copy), reads) == b"\2"
    shutil.copy2(weights, tmp_path / "new")
    other_values(tmp_path / "new", 100)
    (tmp_path / "new").replace(weights)
    assert digests.get(copy, weight_files_of(copy), reads) == b"\3"
    assert digests.get(copy, weight_files_of(copy), reads) == b"\3"


def test_other_weights_in_an_image_whose_inodes_and_times_are_equal_are_others(folder, tmp_path, monkeypatch):
    """A read-only file system has all of that from whoever built it."""
    copy, reads = shutil.copytree(folder, tmp_path / "model"), Reads()
    digests, weights = known(tmp_path / "digests.json"), copy / "model.safetensors"
    status, stat_of = weights.stat(), Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: status if path == weights else stat_of(path, **how))
    assert digests.get(copy, weight_files_of(copy), reads) == b"\1"
    content = weights.read_bytes()
    weights.write_bytes(content[:-5000] + bytes(5000))
    assert digests.get(copy, weight_files_of(copy), reads) == b"\2"


def test_weights_that_are_exchanged_while_they_are_loaded_are_not_remembered(folder, tmp_path):
    copy, reads = shutil.copytree(folder, tmp_path / "model"), Reads()
    digests, before = known(tmp_path / "digests.json"), weight_files_of(copy)
    other_values(copy / "model.safetensors", 5000)
    assert digests.get(copy, before, reads) == b"\1"
    assert digests.get(copy, weight_files_of(copy), reads) == b"\2"
    assert digests.get(copy, before, reads) == b"\3", "nor is what is known said of what was loaded"


def test_files_that_cannot_be_read_are_not_remembered(folder, tmp_path):
    digests, reads = known(tmp_path / "digests.json"), Reads()
    assert weight_files_of(tmp_path / "none") == []
    assert [digests.get(folder, [], reads) for _ in range(2)] == [b"\1", b"\2"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 2, "models": 3}', '{"format": 1, "models": {}}', "\xff", "[" * 9999],
)
def test_digests_that_cannot_be_read_are_computed_and_that_is_reported_once(folder, tmp_path, content):
    path, reads, notices = tmp_path / "digests.json", Reads(), list[str]()
    path.write_text(content, encoding="latin-1")
    files = weight_files_of(folder)
    assert known(path, notices).get(folder, files, reads) == b"\1"
    assert known(path, notices).get(folder, files, reads) == b"\1"
    assert len(notices) == 1
    assert notices[0].startswith(f"{path} cannot be used (")


def test_digests_that_cannot_be_kept_are_computed(folder, tmp_path):
    (tmp_path / "state").write_text("a file")
    path, reads, files = tmp_path / "state" / "digests.json", Reads(), weight_files_of(folder)
    assert [known(path).get(folder, files, reads) for _ in range(2)] == [b"\1", b"\2"]


def test_a_new_page_format_makes_old_pages_strange(model, monkeypatch):
    before = identity(model)
    monkeypatch.setattr(module, "PAGE_FORMAT", module.PAGE_FORMAT + 1)
    assert identity(model) != before


def test_the_digest_is_the_same_in_every_process_and_on_every_machine():
    values = mx.arange(100_000, dtype=mx.uint32)
    assert digest(values, piece=1 << 20).hex() == "f90395ef834a087487b56e208efd012e"
