"""A repository's files come once, from a fake hub on loopback, whatever the network does."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from start_llm.core.errors import ModelError
from start_llm.library.download import resolve
from start_llm.library.hub import Hub
from start_llm.models.model_names import name_of
from tests.models.fake_hub import FakeHub, hub_of

MIB = 2**20
REPOSITORY = Path(__file__).resolve().parents[2]
RESOLVE = """
import sys
from start_llm.core.errors import ModelError
from start_llm.library.download import resolve
from start_llm.library.hub import Hub
try:
    print(resolve(sys.argv[1], Hub(pause=lambda seconds: None)))
except ModelError as error:
    print("ModelError:", error)
"""


@pytest.fixture(scope="module")
def files(tiny_model) -> dict[str, bytes]:
    folder = tiny_model("qwen3", hidden=64, layers=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    code = dict.fromkeys(("modeling_tiny.py", "sub/tokenizer.py", "setup.sh"), b"open('ran', 'w')\n")
    return files | code | {"pytorch_model.bin": b"pickle", "notes.md": b"# Notes"}


@pytest.fixture
def hub(files) -> Iterator[FakeHub]:
    with hub_of(files) as running:
        yield running


def environment(home: Path, endpoint: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODEL_PATH"))}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    return kept | quiet | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(REPOSITORY)}


def resolved(home: Path, endpoint: str, name: str = "lab/tiny") -> str:
    """Return the result for a repository in a process of its own: a folder, or the text of the error."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        env=environment(home, endpoint),
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def partial_files(home: Path) -> list[Path]:
    return list(home.rglob("*.incomplete"))


@contextmanager
def downloading_server(hub: FakeHub, home: Path) -> Generator[subprocess.Popen[str]]:
    """A server that is in the middle of the weights."""
    server = subprocess.Popen(
        [sys.executable, "-m", "start_llm", "serve", "--no-proxy", "--model", "lab/tiny", "--mlx-port", "0"],
        cwd=REPOSITORY,
        env=environment(home, hub.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 30
        while not any(path.stat().st_size == hub.broken_after for path in partial_files(home)):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
        yield server
    finally:
        server.kill()
        server.wait()


@pytest.mark.thorough
def test_a_repository_comes_once_and_without_any_code(hub, files, tmp_path):
    folder = Path(resolved(tmp_path, hub.url))
    came = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert came == {n: data for n, data in files.items() if n.endswith((".json", ".jinja", ".safetensors"))}
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= came.keys()
    assert hub.downloads("model.safetensors") == ["GET model.safetensors"]
    assert not [path for path in hub.requests if path.endswith((".py", ".sh", ".bin"))]

    before = len(hub.requests)
    assert resolved(tmp_path, hub.url) == str(folder)
    assert len(hub.requests) == before
    hub.shutdown()
    hub.server_close()
    assert resolved(tmp_path, hub.url) == str(folder), "a model that is here must start without a network"


@pytest.mark.long
def test_a_broken_download_is_explained_and_the_next_start_fetches_only_what_is_missing(hub, files, tmp_path):
    hub.broken_after = 100_000
    text = resolved(tmp_path, hub.url)
    assert text.startswith("ModelError: The model 'lab/tiny' is not on this machine, and the network did not")
    assert "Start again to resume" in text
    (partial,) = partial_files(tmp_path)
    assert partial.stat().st_size == 100_000

    hub.broken_after = None
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.downloads("model.safetensors")[0] == "GET model.safetensors"
    assert set(hub.downloads("model.safetensors")[1:]) == {"GET model.safetensors from 100000"}
    assert hub.sent == len(files["model.safetensors"])
    assert hub.downloads("config.json") == ["GET config.json"]
    assert partial_files(tmp_path) == []


@pytest.mark.long
def test_a_connection_that_breaks_for_a_moment_goes_on_where_it_was(hub, tmp_path):
    weights = hub.files["model.safetensors"] = os.urandom(22 * MIB)
    hub.broken_after, hub.breaks_cleanly = 21 * MIB, True
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.downloads("model.safetensors") == [
        "GET model.safetensors",
        f"GET model.safetensors from {21 * MIB}",
    ]


@pytest.mark.long
def test_ctrl_c_in_a_download_ends_the_server_at_once_and_the_next_start_goes_on(hub, files, tmp_path):
    hub.broken_after, hub.stalls = 100_000, True
    with downloading_server(hub, tmp_path) as server:
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        output, errors = server.communicate(timeout=20)
        assert time.monotonic() - began < 5
    assert server.returncode == 130
    assert "Interrupted before the server was ready." in output
    assert "Traceback" not in errors
    (left,) = partial_files(tmp_path)
    have = left.stat().st_size
    assert have == 100_000

    hub.broken_after = None
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.downloads("model.safetensors")[-1] == f"GET model.safetensors from {have}"
    assert hub.sent == len(files["model.safetensors"])
    assert partial_files(tmp_path) == []


@pytest.mark.long
def test_a_repository_that_does_not_exist_is_named(hub, tmp_path):
    text = resolved(tmp_path, hub.url, "lab/nothing")
    assert text.startswith("ModelError: The model 'lab/nothing' cannot be downloaded: 404")


@pytest.mark.long
def test_a_dead_network_is_explained(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    text = resolved(tmp_path, f"http://127.0.0.1:{port}")
    assert text.startswith("ModelError: The model 'lab/tiny' is not on this machine")
    assert "--model" in text


def test_a_folder_is_taken_as_it_is(tmp_path, tiny_model):
    folder = tiny_model("qwen3", hidden=64, layers=1)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert resolve(str(folder)) == resolve(f"{folder}/../{folder.name}") == resolve(str(link)) == folder


def test_a_model_that_is_here_starts_whatever_the_hub_answers(tmp_path):
    with hub_of({"config.json": b"{}", "model.safetensors": b"{}"}) as server:
        hub = Hub(tmp_path, pause=lambda _: None, endpoint=server.url)
        folder = resolve("lab/tiny", hub)
        server.page = b"<html>Please log in.</html>"
        assert resolve("lab/tiny", hub) == folder


def test_a_name_that_is_too_long_for_a_path_is_refused():
    with pytest.raises(ModelError, match="File name too long"):
        resolve("/" + "x" * 10_000)


def test_a_snapshot_has_the_name_of_its_repository_and_any_other_folder_its_own():
    assert name_of(Path(f"/cache/models--lab--Tiny-4bit/snapshots/{'5' * 40}")) == "Tiny-4bit"
    assert name_of(Path("/models/snapshots/mine")) == "mine"
    assert name_of(Path("/models/mine")) == "mine"


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "./no/where",
        "/no/where/at all",
        "~/no such folder",
        "~nobody-here/x",
        "a/b/c",
        "a b/c",
        "../x",
    ],
)
def test_what_is_neither_folder_nor_repository_is_refused_without_a_network(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match="no such folder, and not the name of a repository"):
        resolve(name)
