"""A repository's files come once, from a fake hub on loopback, whatever the network does."""

import hashlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from start_llm.core.errors import ModelError
from start_llm.models.download import resolve

MIB = 2**20
REPOSITORY = Path(__file__).resolve().parents[2]
COMMIT = "5" * 40
RESOLVE = """
import sys
from start_llm.core.errors import ModelError
from start_llm.models.download import resolve
try:
    print(resolve(sys.argv[1]))
except ModelError as error:
    print("ModelError:", error)
"""


class Hub(ThreadingHTTPServer):
    """Serves one repository the way the Hub does.

    `requests` are the files asked for, with the byte at which a resumed download began. After `broken_after`
    bytes of the weights the connection is reset; with `breaks_cleanly` it is closed, and whole the next time;
    with `stalls` nothing more comes.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.requests: list[str] = []
        self.broken_after: int | None = None
        self.breaks_cleanly = False
        self.stalls = False
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> list[str]:
        return [path for path in self.requests if path.split(" from ")[0] == f"GET {name}"]


class HubHandler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def serve(self) -> None:
        path = self.path.partition("?")[0]
        if not path.startswith(("/api/models/lab/tiny", "/lab/tiny/")):
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/lab/tiny/tree/"):
            self.reply(
                200, json.dumps([entry(name, data) for name, data in self.server.files.items()]).encode()
            )
        elif path.startswith("/api/"):
            self.reply(200, json.dumps({"id": "lab/tiny", "sha": COMMIT, "siblings": []}).encode())
        else:
            self.file(path.removeprefix(f"/lab/tiny/resolve/{COMMIT}/"))

    def file(self, name: str) -> None:
        data = self.server.files[name]
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.server.requests.append(f"{self.command} {name}" + (f" from {start}" if start else ""))
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = self.server.broken_after if (self.command, name) == ("GET", "model.safetensors") else None
        self.reply(206 if start else 200, data[start:], headers, cut)

    def reply(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[:cut])
        if cut is not None:
            self.break_off()

    def break_off(self) -> None:
        if self.server.stalls:
            self.server.closing.wait(30)
        elif self.server.breaks_cleanly:
            self.server.broken_after = None
        else:
            time.sleep(0.2)  # what was sent arrives before the reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in http.server
        pass


def entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


@contextmanager
def hub_of(files: dict[str, bytes]) -> Generator[Hub]:
    hub = Hub(files)
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()


@pytest.fixture(scope="module")
def files(tiny_model) -> dict[str, bytes]:
    folder = tiny_model("qwen3", hidden=64, layers=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    code = dict.fromkeys(("modeling_tiny.py", "sub/tokenizer.py", "setup.sh"), b"open('ran', 'w')\n")
    return files | code | {"pytorch_model.bin": b"pickle", "notes.md": b"# Notes"}


@pytest.fixture
def hub(files) -> Iterator[Hub]:
    with hub_of(files) as running:
        yield running


def environment(home: Path, endpoint: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "MODEL_PATH"))}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}
    return kept | quiet | {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(REPOSITORY)}


def resolved(home: Path, endpoint: str, name: str = "lab/tiny") -> str:
    """What a process of its own gets for a repository: a folder, or the text of the error."""
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
def downloading_server(hub: Hub, home: Path) -> Generator[subprocess.Popen[str]]:
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
        while not partial_files(home) or not hub.downloads("model.safetensors"):
            assert time.monotonic() < deadline
            assert server.poll() is None
            time.sleep(0.05)
        yield server
    finally:
        server.kill()
        server.wait()


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


@pytest.mark.thorough
def test_a_broken_download_is_explained_and_the_next_start_fetches_only_what_is_missing(hub, files, tmp_path):
    hub.broken_after = 100_000
    text = resolved(tmp_path, hub.url)
    assert text.startswith("ModelError: The model 'lab/tiny' is not on this machine, and the network did not")
    assert "Start again to resume" in text
    assert partial_files(tmp_path) == []

    hub.broken_after = None
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert hub.downloads("model.safetensors") == ["GET model.safetensors"] * 2
    assert hub.downloads("config.json") == ["GET config.json"]


@pytest.mark.thorough
def test_a_connection_that_breaks_for_a_moment_goes_on_where_it_was(hub, tmp_path):
    # The hub's library writes 10 MiB at a time.
    weights = hub.files["model.safetensors"] = os.urandom(22 * MIB)
    hub.broken_after, hub.breaks_cleanly = 21 * MIB, True
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == weights
    assert hub.downloads("model.safetensors") == [
        "GET model.safetensors",
        f"GET model.safetensors from {20 * MIB}",
    ]


@pytest.mark.thorough
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
    left = partial_files(tmp_path)
    assert left

    hub.broken_after = None
    folder = Path(resolved(tmp_path, hub.url))
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert sorted(partial_files(tmp_path)) == sorted(left), "somebody else may be writing to them"
    for partial in left:
        os.utime(partial, (0, 0))
    resolved(tmp_path, hub.url)
    assert partial_files(tmp_path) == []


def test_a_repository_that_does_not_exist_is_named(hub, tmp_path):
    text = resolved(tmp_path, hub.url, "lab/nothing")
    assert text.startswith("ModelError: The model 'lab/nothing' cannot be downloaded: 404")


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
