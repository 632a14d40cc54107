"""Whatever happened to a file that a start reads: the server starts, does without it, and says so.

Each opener is given damaged copies of a file that it has written. None may raise, whatever the damage, and
what it does not use it names in one sentence. The file `.env` is refused instead, with the line: a line that
is left out could be the key that keeps others out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from start_llm.cache.disk.disk_folder import DiskLimits
from start_llm.cache.disk.disk_index import WRITTEN
from start_llm.cache.disk.disk_tier import DiskTier
from start_llm.cache.disk.page_file import FileHeader, TensorLayout, write_file
from start_llm.config import settings as settings_table
from start_llm.config.env_file import read_env_file
from start_llm.config.settings import SettingSource
from start_llm.core.errors import InvalidRequest, ModelError, SettingsError
from start_llm.library.folders import Library, Place, check_loadable
from start_llm.library.hub import Hub
from start_llm.models.adapter_loader import Adapters
from start_llm.models.known_digests import KnownDigests, weight_files_of
from start_llm.models.loader import author_sampling, load
from start_llm.models.machines import machine_named
from start_llm.protocols.response_store import ResponseStore
from start_llm.proxy.ports import Process, ProcessRecord
from start_llm.storage.disk_thread import DiskThread
from start_llm.storage.running_servers import RunningServer, ServerFile, running_servers
from start_llm.telemetry.metrics import DiskMetrics
from start_llm.wiring.from_settings import make_seal, transcript_stores
from tests import tiny_adapters
from tests.conftest import TinyModel
from tests.damage import damages
from tests.databases import opened
from tests.serving import Server, serving
from tests.slices import is_thorough, is_whole

type Notices = list[str]

SHARE = 1 if is_whole() else 5 if is_thorough() else 20
"""One of so many damaged files is tried."""
ROWS = [(b"%d" % number, bytes([number]) * 900) for number in range(12)]
KEY, PARENT = bytes(range(16)), bytes(range(16, 32))


def tries(whole: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    yield from damages(whole, max(count // SHARE, 8), seed=count)


def assert_reported_once(notices: Notices, what: str) -> None:
    assert len(notices) == 1, (what, notices)
    assert notices[0].isprintable() and len(notices[0]) < 500, (what, notices)


# ------------------------------------------------------------------------------------------------- databases


def a_database(path: Path) -> bytes:
    with opened(path) as database:
        for name in ("variants", "reasoning", "prefixes", "names", "responses"):
            table = database.table(name)
            for key, value in ROWS:
                table.put(key, value)
    return path.read_bytes()


@pytest.mark.thorough
def test_a_damaged_database_is_begun_anew_and_that_is_reported(tmp_path: Path):
    path = tmp_path / "a.db"
    whole, resets = a_database(path), 0
    for what, content in tries(whole, 1000):
        for beside in tmp_path.iterdir():
            beside.unlink()
        path.write_bytes(content)
        notices: Notices = []
        with opened(path, notices) as database:
            rows = [(row.key, row.value) for row in database.table("names").rows()]
            assert sorted(rows) in ([], sorted(ROWS)), what
            assert database.metrics.is_on, (what, notices)
            resets += database.metrics.resets
            if database.metrics.resets:
                assert_reported_once(notices, what)
        with opened(path):
            pass  # it says nothing any more
    assert resets > 8 // SHARE


@pytest.mark.thorough
def test_rows_that_make_no_sense_to_a_store_are_left_out(tmp_path: Path):
    """Of a file that is whole, and whose rows somebody else has written."""
    path, settings = tmp_path / "a.db", settings_table.load()
    rows = json.dumps([["a"], [1], {"b": [None, 2.5]}, "text", [["x", 1, None, []]]]).encode()
    for what, content in tries(rows, 100):
        path.unlink(missing_ok=True)
        with opened(path) as database:
            for name in ("variants", "reasoning", "prefixes", "names", "responses"):
                database.table(name).put(content[:60], content)
                database.table(name).put(b"x" * 16, content)
        with opened(path) as database:
            transcript_stores(settings, database.table)
            ResponseStore(10**6, 100, table=database.table("responses"))
            assert database.metrics.is_on, what


# ------------------------------------------------------------------------------------------------ disk tier


def a_page(folder: Path) -> Path:
    tensors = {"kv.0.0": TensorLayout("F32", (1, 2, 40, 30)), "kv.0.1": TensorLayout("BF16", (1, 2, 4, 3))}
    header = FileHeader("pages", KEY, PARENT, (5, 0, 2**31, 7), tensors, ((3, 4), ()))
    path = folder / "pages" / KEY.hex()[:2] / f"{PARENT.hex()}-{KEY.hex()}.safetensors"
    write_file(path, header, [memoryview(bytes(range(96)) * 100), memoryview(bytes(48))])
    return path


def opened_tier(folder: Path, notices: Notices) -> DiskTier:
    """Start a tier, let it read every file that it finds, and end it."""
    errors: list[Exception] = []
    thread = DiskThread(errors.append)
    tier = DiskTier(folder, DiskLimits(max_size=10**8), thread, DiskMetrics(), notices.append)
    assert tier.start()
    thread.start()
    while not tier.index.is_complete:
        pass
    files = tier.index.oldest_first()
    tier.look(files)
    tier.verify_later(files)
    assert tier.traffic.wait_for_checks(10)
    assert thread.close(10)
    tier.close()
    assert not errors
    return tier


@pytest.mark.thorough
def test_a_damaged_page_is_removed_and_that_is_reported(tmp_path: Path):
    path = a_page(tmp_path)
    whole, rejected = path.read_bytes(), 0
    for what, content in tries(whole, 250):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        notices: Notices = []
        tier = opened_tier(tmp_path, notices)
        is_whole = content == whole
        assert (len(tier.index) == 1) == is_whole, what
        assert path.exists() == is_whole, what
        if not is_whole:
            rejected += 1
            assert_reported_once(notices, what)
    assert rejected


@pytest.mark.thorough
def test_a_damaged_count_of_what_was_written_counts_as_nothing(tmp_path: Path):
    opened_tier(tmp_path, [])
    path = tmp_path / WRITTEN
    for what, content in tries(b'{"day": "2026-11-26", "bytes": 1234}', 60):
        path.write_bytes(content)
        notices: Notices = []
        tier = opened_tier(tmp_path, notices)
        assert tier.worker._written_today.today_bytes >= 0, what
        assert len(notices) <= 1, (what, notices)
        opened_tier(tmp_path, again := [])
        assert not again, what


# -------------------------------------------------------------------------------------------- kept beside it


@pytest.mark.thorough
def test_damaged_digests_of_weights_are_computed_anew(tmp_path: Path, tiny_model: TinyModel):
    path, model = tmp_path / "weights.json", tiny_model("qwen3")
    notices: Notices = []
    digests = KnownDigests(path, notices.append)
    files = weight_files_of(model)
    digest = digests.get(model, files, lambda: bytes(range(16)))
    whole = path.read_bytes()
    for what, content in tries(whole, 250):
        path.write_bytes(content)
        notices.clear()
        assert digests.get(model, files, lambda: digest) == digest, what
        assert len(notices) <= 1, what
        assert notices or json.loads(content) == json.loads(whole), what
        notices.clear()
        digests.get(model, files, lambda: digest)
        assert not notices, what


def test_something_else_in_the_place_of_the_seals_key_is_reported(tmp_path: Path):
    settings = settings_table.load(SettingSource("test", {"STATE_ROOT": str(tmp_path)}))
    make_seal(settings, lambda _: None)
    path = tmp_path / "seal.key"
    for what, content in tries(path.read_bytes(), 60):
        path.write_bytes(content)
        notices: Notices = []
        assert make_seal(settings, notices.append).seal("a", "b", b"c"), what
        if len(content) != 32:
            assert_reported_once(notices, what)


def test_a_damaged_file_of_a_running_server_names_none(tmp_path: Path):
    file = ServerFile(tmp_path)
    server = RunningServer(
        pid=os.getpid(), url="http://127.0.0.1:1", proxy_url=None, version="1", started_at=1.5
    )
    file.write(server)
    (path,) = tmp_path.iterdir()
    for what, content in tries(path.read_bytes(), 100):
        path.write_bytes(content)
        for entry in running_servers(tmp_path):
            assert (type(entry.pid), type(entry.port), type(entry.started_at)) == (int, int, float), what
    file.remove()


def test_a_damaged_record_of_a_proxy_names_none(tmp_path: Path):
    record = ProcessRecord(tmp_path / "proxy.json")
    record.write(Process(17, "Thu Nov 26 12:18:53 2026"))
    path = tmp_path / "proxy.json"
    for what, content in tries(path.read_bytes(), 60):
        path.write_bytes(content)
        process = record.read()
        assert process is None or (type(process.pid), type(process.started)) == (int, str), what


# ---------------------------------------------------------------------------------------- written by people


def test_a_damaged_env_file_is_refused_with_its_line(tmp_path: Path):
    path = tmp_path / ".env"
    whole = b"MLX_PORT=8080\n# a comment\nMLX_API_KEY='secret'\nSSD_CACHE_DIR=\"/tmp/x y\"\nMODEL_PATH=demo\n"
    names = [row.name for row in settings_table.all_rows()]
    for what, content in tries(whole, 150):
        path.write_bytes(content)
        try:
            variables = read_env_file(path, names)
        except SettingsError as error:
            assert re.match(rf"{re.escape(str(path))}, line \d+: ", str(error)), what
            continue
        assert not any("\0" in value for value in variables.values()), what
        with suppress(SettingsError):
            settings_table.load(SettingSource(".env", variables))


def test_a_damaged_name_of_a_snapshot_names_none(tmp_path: Path):
    hub, commit = Hub(tmp_path), "0123456789abcdef" * 2
    folder = hub.folder_of("lab/tiny")
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    for what, content in tries(commit.encode(), 60):
        (folder / "refs" / "main").write_bytes(content)
        snapshot = hub.snapshot("lab/tiny")
        assert snapshot is None or snapshot.is_relative_to(folder), what
        assert Library((Place("hub", tmp_path),), machine_named("M2 16 GB")).folder("tiny") is None


FROM_FILES: dict[str, Callable[[Path], object]] = {
    "config.json": check_loadable,
    "model.safetensors": check_loadable,
    "generation_config.json": author_sampling,
}


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_damaged_model_is_an_error_of_its_own_kind(name: str, tmp_path: Path, tiny_model: TinyModel):
    folder = shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    path = folder / name
    whole = path.read_bytes()[:20_000] if path.exists() else b'{"temperature": 0.5, "top_k": 20}'
    for _, content in tries(whole, 60):
        path.write_bytes(content)
        with suppress(ModelError):
            FROM_FILES[name](folder)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_a_damaged_adapter_is_refused(name: str, tmp_path: Path, tiny_model: TinyModel):
    model = tiny_model("qwen3")
    folder = tiny_adapters.build(model, tmp_path / "adapter", 1)
    adapters = Adapters(load(model).network)
    whole = (folder / name).read_bytes()
    for _, content in tries(whole, 60):
        (folder / name).write_bytes(content)
        with suppress(InvalidRequest):
            adapters.load("a", folder)


# ------------------------------------------------------------------------------------------------ real starts

STARTS = 10 if is_thorough() else 1
ASKED = {
    "model": "m",
    "messages": [{"role": "user", "content": "fish " * 400}],
    "max_tokens": 4,
    "temperature": 0,
}


@contextmanager
def started(model: Path, root: Path) -> Generator[Server]:
    folders = {"state_root": str(root / "state"), "ssd_folder": str(root / "ssd"), "ssd_write_after_s": 0.1}
    with serving(model, **folders) as server:
        yield server


def reply(server: Server) -> tuple[str, int]:
    """Return the text and how many tokens of the prompt were known."""
    body = server.post("/v1/chat/completions", ASKED)
    return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def left(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A model, what a server has left of a conversation with it, and its reply."""
    root = tmp_path_factory.mktemp("left")
    model = tiny_model("qwen3", hidden=128, layers=2)
    with started(model, root) as server:
        text, _ = reply(server)
    with started(model, root) as server:
        assert reply(server)[1] > 256, "the folder is worth something"
        assert "damaged" not in server.printed()
    return model, root, text


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(STARTS))
def test_a_server_starts_with_six_damaged_files_and_says_so(
    seed: int, left: tuple[Path, Path, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    model, whole, text = left
    root = shutil.copytree(whole, tmp_path / "root")
    kept = [path for path in root.rglob("*") if path.suffix in (".db", ".json", ".key") and path.is_file()]
    damaged = [*kept, *sorted(root.rglob("*.safetensors"))[:1]]
    assert len(damaged) == 6
    for path in damaged:
        *_, (_, content) = damages(path.read_bytes(), 2 + seed, seed)
        path.write_bytes(content)
    with started(model, root) as server:
        assert reply(server)[0] == text
        notices, ssd = server.printed(), server.get("/stats")["ssd"]
    assert "Traceback" not in "".join(capfd.readouterr())
    assert ssd["conversations"]["kept"]
    assert "weights.json cannot be used (" in notices
    assert ("A file of the disk tier cannot be used (" in notices) == bool(ssd["rejected_files"])
    assert notices.count("It is deleted, and what it held is forgotten.") >= ssd["conversations"]["resets"]
    with started(model, root) as server:
        again, cached = reply(server)
        assert again == text
        assert cached > 256
        assert "damaged" not in server.printed()
