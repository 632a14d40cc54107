"""A hub on loopback with one repository, lab/tiny, that breaks when a test asks for it."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

COMMIT = "5" * 40
WEIGHTS = "model.safetensors"
PIECE = 2**16


class FakeHub(ThreadingHTTPServer):
    """Serves one repository the way the Hub does.

    `requests` are the files asked for, with the byte at which a resumed download began. At byte
    `broken_after` of the weights the connection is reset; with `breaks_cleanly` it is closed, and whole the
    next time; with `stalls` nothing more comes. With `piece_s` each 64 KiB of the weights take that long.
    With `ignores_range` all of a file comes, whatever is asked for; `status` is that of every file; `etag` is
    what the hub then says of the weights. `numbers` are the weights of each type that it tells of. `sent`
    counts the bytes of the weights. A search finds `found`, and its query is `asked`. With `page` that is the
    answer to everything, as that of a proxy which wants a name and a password; with `redirects` everything is
    at its own address.
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
        self.piece_s = 0.0
        self.ignores_range = False
        self.status: int | None = None
        self.etag: str | None = None
        self.numbers: dict[str, int] = {}
        self.results: list[dict[str, object]] = []
        self.asked: dict[str, list[str]] = {}
        self.page: bytes | None = None
        self.redirects = False
        self.sent = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self, name: str) -> list[str]:
        return [path for path in self.requests if path.split(" from ")[0] == f"GET {name}"]


class HubHandler(BaseHTTPRequestHandler):
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.serve()

    def do_GET(self) -> None:
        self.serve()

    def serve(self) -> None:
        path, _, query = self.path.partition("?")
        if self.server.redirects:
            self.reply(302, b"", {"Location": self.path})
        elif self.server.page is not None:
            self.reply(200, self.server.page, {"Content-Type": "text/html"})
        elif path == "/api/models":
            self.server.asked = parse_qs(query)
            results = {} if self.server.status else self.server.results
            self.reply(self.server.status or 200, json.dumps(results).encode())
        elif not path.startswith(("/api/models/lab/tiny", "/lab/tiny/")):
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/lab/tiny/tree/"):
            self.reply(
                200, json.dumps([entry(name, data) for name, data in self.server.files.items()]).encode()
            )
        elif path.startswith("/api/"):
            self.reply(200, json.dumps(self.info()).encode())
        else:
            self.file(path.removeprefix(f"/lab/tiny/resolve/{COMMIT}/"))

    def info(self) -> dict[str, object]:
        numbers = self.server.numbers
        details = {"safetensors": {"parameters": numbers, "total": sum(numbers.values())}} if numbers else {}
        return {"id": "lab/tiny", "sha": COMMIT, "siblings": [], **details}

    def file(self, name: str) -> None:
        data = self.server.files[name]
        wanted = "" if self.server.ignores_range else self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
        self.server.requests.append(f"{self.command} {name}" + (f" from {start}" if start else ""))
        if self.server.status:
            self.reply(self.server.status, b"")
            return
        etag = (self.server.etag if name == WEIGHTS else None) or digest(name, data)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        cut = None
        if (self.command, name) == ("GET", WEIGHTS):
            end = self.server.broken_after
            cut = None if end is None else max(end - start, 0)
            if self.server.piece_s:
                self.slow_file(data[start:], headers)
                return
            self.server.sent += len(data[start:][:cut])
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

    def slow_file(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(206 if "Content-Range" in headers else 200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(body), PIECE):
            self.wfile.write(body[at : at + PIECE])
            self.server.sent += len(body[at : at + PIECE])
            time.sleep(self.server.piece_s)

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
        """Say nothing."""


def digest(name: str, data: bytes) -> str:
    """SHA-256 of weights, which the Hub keeps apart from git; git's own digest of other files."""
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(name: str, data: bytes) -> Mapping[str, object]:
    large = {"lfs": {"oid": digest(name, data), "size": len(data), "pointerSize": 134}}
    fields = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
    return fields | (large if name.endswith(".safetensors") else {"oid": digest(name, data)})


@contextmanager
def hub_of(files: dict[str, bytes]) -> Generator[FakeHub]:
    hub = FakeHub(files)
    threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
