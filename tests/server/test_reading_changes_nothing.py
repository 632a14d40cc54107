"""GET and HEAD change nothing, and no web page of another site is served, whatever it asks for."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from start_llm.protocols.routes import ROUTES, RouteTable
from start_llm.server.endpoints import ENDPOINTS, PageEndpoint
from tests.conftest import TinyModel
from tests.server.client import CHAT, ask, engine_is_free, wait_until
from tests.server.paths import GET_PATHS, NAMED_ROUTES, POST_PATHS
from tests.serving import Server, serving

IN_USE, OTHER = "qwen3", "llama"
QUERIES = (
    "",
    f"?model={OTHER}",
    "?repo=lab/x",
    f"?model={OTHER}&repo=lab/x&path=a&id=a&repo_id=lab/x",
    "?since=0&limit=2",
)
CHROME_IMAGE = {
    "Accept": "image/avif,image/webp,image/apng,image/*,*/*;q=0.8",
    "Referer": "http://evil.example/",
    "Sec-Fetch-Site": "cross-site",
    "Sec-Fetch-Mode": "no-cors",
    "Sec-Fetch-Dest": "image",
}
OLD_IMAGE = {name: text for name, text in CHROME_IMAGE.items() if not name.startswith("Sec-")}


class Effects:
    """What threads of connections do beyond answering. Python tells of it, and never lets a listener go."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._is_on = True
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or "process_request_thread" not in threading.current_thread().name:
            return
        if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.remove", "os.rename"):
            self.seen.append(f"{event} {arguments[-1]}")
        elif event == "open" and set(str(arguments[1] or "r")) & set("wax+"):
            self.seen.append(f"open {arguments[0]} to write")

    def end(self) -> None:
        self._is_on = False


@pytest.fixture(scope="module")
def effects() -> Iterator[Effects]:
    watched = Effects()
    yield watched
    watched.end()


@pytest.fixture(scope="module")
def place(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for everything that the server may write, with two models in it."""
    place = tmp_path_factory.mktemp("place")
    for family in (IN_USE, OTHER):
        shutil.copytree(tiny_model(family, hidden=128, layers=2), place / "models" / family)
    (place / "adapters").mkdir()
    return place


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    """It has room for one of its two models, so whoever loads the other one evicts the one in use."""
    folders = {"state_root": "state", "log_root": "logs", "adapter_dir": "adapters", "ssd_folder": "ssd"}
    places: dict[str, Any] = {name: str(place / folder) for name, folder in folders.items()}
    models = {"model_dir": str(place / "models"), "max_loaded": 1, "max_kv_size": 4096}
    with serving(Path(IN_USE), **models, **places, traces=True) as running:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "store": True}
        assert ask(running.port, "POST", CHAT, body).status == 200
        yield running


@pytest.fixture(scope="module")
def named(server: Server) -> Mapping[str, list[str]]:
    """For each pattern of a path with a name in it: such paths, of things that there are and are not."""
    body = {"input": "Hello", "max_output_tokens": 4}
    response = server.post("/v1/responses", body)["id"]
    request = server.get("/activity")["recent"][0]["id"]
    download = server.post("/downloads", {"repo_id": "lab/tiny"})["id"]
    wait_until(lambda: server.get("/downloads")["downloads"][0]["state"] == "error", within_s=60)
    names = {
        "/v1/models/": [OTHER, f"{OTHER}/load", f"{OTHER}/unload", f"{IN_USE}/unload", IN_USE],
        "/activity/": [request],
        "/downloads/": [download, f"{download}/pause", f"{download}/resume"],
        "/v1/adapters/": ["a"],
        "/v1/responses/": [response, f"{response}/input_items"],
        "/responses/": [response, f"{response}/input_items"],
    }
    return {prefix: [*paths, "x", quote("../../etc")] for prefix, paths in names.items()}


@pytest.fixture(scope="module")
def every_path(named: Mapping[str, list[str]]) -> list[str]:
    fixed = sorted({*POST_PATHS, *GET_PATHS})
    paths = [*fixed, *(prefix + name for prefix, names in named.items() for name in names), "/none"]
    tried = {RouteTable(ROUTES).template(path) for path in paths}
    templates = {*fixed, *(template for _, template in NAMED_ROUTES)}
    assert templates <= tried, "a new kind of path needs names to try it with"
    return paths


def state(server: Server, place: Path) -> dict[str, Any]:
    """Everything that a page of another site must not be able to change."""
    host: Any = server.app._hosting.result()
    wait_until(lambda: engine_is_free(server.port), within_s=60)
    return {
        "models": [(item.id, item.state) for item in host.listed()],
        "used last": {name: item.last_used for name, item in host._residents.by_id.items()},
        "memory": [asdict(item.status.cache) for item in host.listed() if item.status] + [host.spare_bytes],
        "adapters": host.default.adapters.listed(),
        "downloads": server.get("/downloads"),
        "files": {
            str(path): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in place.rglob("*")
            if path.is_file()
        },
    }


@pytest.fixture(scope="module")
def settled(server: Server, place: Path, named: Mapping[str, list[str]]) -> None:
    """Wait until what earlier requests have left to write is written."""
    del named
    seen: list[Any] = [None]

    def is_quiet() -> bool:
        seen.append(state(server, place))
        threading.Event().wait(1.5)
        return seen[-1] == seen[-2]

    wait_until(is_quiet, within_s=60)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.usefixtures("settled")
def test_reading_loads_evicts_fetches_and_writes_nothing(
    server: Server, place: Path, every_path: list[str], effects: Effects, method: str
):
    before = state(server, place)
    for path in every_path:
        for query in QUERIES:
            effects.seen.clear()
            reply = ask(server.port, method, path + query, headers=OLD_IMAGE)
            assert reply.status in (200, 400, 404, 405), f"{method} {path}{query}"
            assert not effects.seen, f"{method} {path}{query}"
        assert state(server, place) == before, f"{method} {path}"


@pytest.mark.thorough
@pytest.mark.usefixtures("settled")
def test_a_page_of_another_site_is_served_nothing_by_any_method(
    server: Server, place: Path, every_path: list[str], effects: Effects
):
    before = state(server, place)
    body = {"model": OTHER, "prompt": "x", "input": "x", "id": "a", "repo": "lab/x", "repo_id": "lab/x"}
    effects.seen.clear()
    for path in every_path:
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            sent = body if method in ("POST", "PUT", "PATCH") else None
            reply = ask(server.port, method, path, sent, CHROME_IMAGE)
            assert reply.status == 403, f"{method} {path}"
    assert not effects.seen
    assert state(server, place) == before


@pytest.mark.parametrize("headers", [CHROME_IMAGE, OLD_IMAGE], ids=["browser of today", "old browser"])
@pytest.mark.usefixtures("settled")
def test_an_image_of_a_web_page_loads_no_model_and_evicts_none(
    server: Server, place: Path, headers: dict[str, str]
):
    before = state(server, place)
    ask(server.port, "GET", f"/v1/adapters?model={OTHER}", headers=headers)
    assert state(server, place) == before


def test_no_endpoint_for_reading_takes_a_lease_or_a_body():
    for route in ROUTES:
        if route.method == "GET":
            assert not route.body
            assert isinstance(ENDPOINTS[route.name], PageEndpoint)


def test_a_model_that_is_not_loaded_has_no_adapters(server: Server):
    assert server.get(f"/v1/adapters?model={OTHER}") == {"adapters": []}
    assert server.get("/v1/adapters") == server.get(f"/v1/adapters?model={IN_USE}") == {"adapters": []}
