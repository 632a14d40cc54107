"""`/library`, `/fit` and `/downloads` on a running server."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from start_llm.core.errors import Conflict, Overloaded
from start_llm.core.model_listing import Download, Fit, FitReport, LibraryEntry, Machine
from start_llm.protocols.fields import Fields
from start_llm.server.library_pages import LibraryPages
from start_llm.server.page_request import PageRequest
from start_llm.server.served_models import ServedModel
from start_llm.telemetry.metrics import EngineMetrics
from tests.model_cards import model_card
from tests.server.breakable import OneModel
from tests.server.client import CHAT, Reply, ask, wait_until
from tests.server.test_stuck import a_status
from tests.serving import Server, serving

ENTRY_KEYS = {
    "repo_id",
    "model_type",
    "size_bytes",
    "quant_bits",
    "vision",
    "supported",
    "serving",
    "assessment",
}
FIT_KEYS = {
    *("machine", "context_tokens", "typical_context_tokens", "typical_decode_tps", "measured_decode_tps"),
    *("measured_at", "report", "sku_matrix_ctx", "sku_matrix"),
}
REPORT_KEYS = {
    *("fits", "weights_bytes", "kv_bytes", "transient_bytes", "image_bytes", "total_bytes"),
    *("usable_bytes", "max_safe_context", "predicted_decode_tps"),
}
DOWNLOAD_KEYS = {
    *("repo_id", "state", "current_file", "received_bytes", "total_bytes", "files_done", "files_total"),
    *("bytes_per_sec", "started_at", "finished_at"),
}
KEYS = ("ours", "theirs")


@pytest.fixture(scope="module")
def server(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its library is a folder with one model, the loaded one, and whatever this user has."""
    place = tmp_path_factory.mktemp("models")
    (place / "loaded").symlink_to(endless_model)
    with serving(place / "loaded", access_keys=KEYS, model_dir=str(place)) as running:
        yield running


def asked(server: Server, method: str, path: str, body: object = None, key: str = "ours") -> Reply:
    return ask(server.port, method, path, body, {"x-api-key": key})


def test_the_library_has_the_keys_that_clients_know(server: Server):
    reply = asked(server, "GET", "/library")
    assert reply.status == 200
    entries = {entry["repo_id"]: entry for entry in reply.json["models"]}
    assert all(entry.keys() >= ENTRY_KEYS for entry in entries.values())
    loaded = entries["loaded"]
    assert (loaded["model_type"], loaded["serving"], loaded["complete"]) == ("qwen3", True, True)
    assert loaded["assessment"].keys() == {"fits", "max_safe_context", "predicted_decode_tps"}
    assert not entries["demo"]["serving"]


def test_fit_has_the_keys_that_clients_know(server: Server):
    reply = asked(server, "GET", "/fit")
    assert reply.status == 200
    fit = reply.json
    assert fit.keys() >= FIT_KEYS
    assert fit["report"].keys() >= REPORT_KEYS
    assert fit["machine"].keys() == {"chip", "ram_bytes", "bandwidth_gbs"}
    assert all(
        row.keys() == {"sku", "ram_gb", "fits", "max_context", "decode_tps"} for row in fit["sku_matrix"]
    )
    stats = asked(server, "GET", "/stats").json["admission"]
    assert fit["context_tokens"] == stats["max_safe_context"]
    assert fit["report"]["weights_bytes"] == stats["weights_bytes"]
    assert fit["typical_context_tokens"] == 8192
    assert fit["report"]["total_bytes"] == sum(
        fit["report"][name] for name in ("weights_bytes", "kv_bytes", "transient_bytes", "image_bytes")
    )


def test_fit_judges_another_model_by_name(server: Server):
    fit = asked(server, "GET", "/fit?model=demo").json
    assert fit["model"] == "demo"
    assert fit["measured_decode_tps"] is None
    assert fit["context_tokens"] == fit["report"]["max_safe_context"]


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ("model=nothing", 404, "model"),
        ("repo=nothing", 400, "repo"),
        ("repo=lab/x&model=demo", 400, "repo"),
        ("repo=lab/x", 404, "repo"),
        ("model=%ff", 404, "model"),
    ],
)
def test_what_cannot_be_judged_is_an_error_that_names_the_field(server, query, status, field):
    reply = asked(server, "GET", f"/fit?{query}")
    assert reply.status == status
    assert reply.error["param"] == field


@pytest.mark.parametrize(("body", "status"), [({}, 400), ({"repo": "x"}, 400), ({"repo": "lab/x"}, 502)])
def test_the_hub_is_asked_by_a_post_alone(server: Server, body: dict[str, str], status: int):
    reply = asked(server, "POST", "/fit", body)
    assert (reply.status, reply.error["param"]) == (status, "repo")


def test_a_download_without_a_network_ends_with_its_error(server: Server):
    started = asked(server, "POST", "/downloads", {"repo_id": "lab/tiny"})
    assert started.status == 202
    assert started.json.keys() >= DOWNLOAD_KEYS
    name = started.json["id"]

    def state() -> str:
        (download,) = asked(server, "GET", "/downloads").json["downloads"]
        return download["state"]

    wait_until(lambda: state() == "error", within_s=30)
    (failed,) = asked(server, "GET", "/downloads").json["downloads"]
    assert "The hub cannot be reached: " in failed["error"]
    assert "error" not in started.json
    assert asked(server, "GET", "/downloads", key="theirs").json == {"downloads": []}
    for method, path in (("POST", f"/downloads/{name}/resume"), ("DELETE", f"/downloads/{name}")):
        assert asked(server, method, path, key="theirs").status == 404
    assert asked(server, "POST", f"/downloads/{name}/pause").status in (200, 409)
    assert asked(server, "POST", f"/downloads/{name}/resume").status == 202
    gone = asked(server, "DELETE", f"/downloads/{name}")
    assert (gone.status, gone.json["deleted"]) == (200, True)
    assert asked(server, "GET", "/downloads").json == {"downloads": []}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'repo_id' is required"),
        ({"repo_id": ""}, "'repo_id' is required"),
        ({"repo_id": 5}, "'repo_id' must be a string"),
        ({"repo_id": "x"}, "owner/name"),
        ({"repo_id": "../../etc/passwd"}, "owner/name"),
        ({"repo_id": "https://evil.example/x"}, "owner/name"),
    ],
)
def test_a_body_that_names_no_repository_is_400(server: Server, body: Any, words: str):
    reply = asked(server, "POST", "/downloads", body)
    assert (reply.status, reply.error["param"]) == (400, "repo_id")
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/library", "GET, HEAD"),
        ("DELETE", "/fit", "GET, HEAD, POST"),
        ("DELETE", "/downloads", "GET, HEAD, POST"),
        ("GET", "/downloads/x", "DELETE"),
        ("GET", "/downloads/x/pause", "POST"),
        ("DELETE", "/downloads/x/resume", "POST"),
    ],
)
def test_other_methods_are_405_and_name_those_that_are_allowed(server, method, path, allowed):
    reply = asked(server, method, path)
    assert (reply.status, reply.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/downloads/x/pause"), ("POST", "/downloads/x/resume"), ("DELETE", "/downloads/x")],
)
def test_a_download_that_nobody_began_is_404_and_needs_a_key(server, method, path):
    assert asked(server, method, path).status == 404
    assert ask(server.port, method, path).status == 401
    assert (
        ask(server.port, method, path, None, {"x-api-key": "ours", "Origin": "https://evil.example"}).status
        == 403
    )


@pytest.mark.parametrize("path", ["/downloads/x/y", "/downloads/x/pause/z", "/library/x", "/fit/x"])
def test_paths_below_are_404(server: Server, path: str):
    assert asked(server, "GET", path).status == 404


def test_the_server_starts_no_download_thread_and_asks_nobody_by_itself(server: Server):
    shelf: Any = server.app._listener.context.library.library
    assert shelf.hub.snapshot("lab/tiny") is None


@pytest.mark.thorough
def test_after_some_replies_the_measured_speed_is_reported(server: Server):
    before = asked(server, "GET", "/fit").json
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 60}
    assert ask(server.port, "POST", CHAT, body, {"x-api-key": "ours"}).status == 200
    after = asked(server, "GET", "/fit").json
    assert after["measured_decode_tps"] > 0
    assert after["measured_at"] > 1_700_000_000_000
    assert before["measured_decode_tps"] is None or before["measured_at"] <= after["measured_at"]


# ------------------------------------------------------------------------------------------------ the pages

REPORT = FitReport(
    fits=True,
    context_tokens=5000,
    typical_context_tokens=5000,
    weights_bytes=10,
    kv_bytes=20,
    transient_bytes=30,
    usable_bytes=100,
    read_bytes=30,
    decode_tps=12.5,
    prefill_tps=100.0,
    verdict="fits",
)
MACHINE = Machine("Toy 16 GB", "Toy", 16 * 2**30, 2**30, 100.0)


class FakeLibrary:
    """Has one model of each kind, and one download."""

    def entries(self) -> Sequence[LibraryEntry]:
        return [
            LibraryEntry(
                repo_id="lab/x",
                place="hub",
                path="x",
                model_type=None,
                size_bytes=5,
                quant_bits=4,
                vision=True,
                supported=False,
                complete=False,
                serving=False,
                report=None,
            )
        ]

    def fit(self, model: str | None, repo: str | None) -> Fit:
        return Fit(
            model=repo or model or "loaded",
            machine=MACHINE,
            report=REPORT,
            arithmetic=["1 + 1"],
            sku_context=5000,
            skus=[(MACHINE, REPORT)],
        )

    def fit_on_hub(self, repo: str) -> Fit:
        return self.fit(None, repo)

    def list(self, tenant: bytes) -> Sequence[Download]:
        return [self._download(tenant.decode())]

    def start(self, tenant: bytes, repo_id: str) -> Download:
        return self._download(f"{tenant.decode()} starts {repo_id}")

    def pause(self, tenant: bytes, name: str) -> Download:
        raise Conflict(f"{tenant.decode()} pauses {name}")

    def resume(self, tenant: bytes, name: str) -> Download:
        return self._download(f"{tenant.decode()} resumes {name}")

    def remove(self, tenant: bytes, name: str) -> Download:
        return self._download(f"{tenant.decode()} removes {name}")

    def _download(self, repo_id: str) -> Download:
        return Download(
            id="dl_1",
            repo_id=repo_id,
            state="error",
            current_file=None,
            received_bytes=1,
            total_bytes=2,
            files_done=3,
            files_total=4,
            bytes_per_sec=5,
            started_at=6,
            finished_at=7,
            error="why",
        )


def pages(stalls: list[float] | None = None) -> LibraryPages:
    nothing: Any = None
    status = a_status(EngineMetrics(stalls=deque(stalls or []), stepped_at=5.5))
    card = model_card("loaded", window=4000)
    status = replace(status, card=card)
    return LibraryPages(
        FakeLibrary(),
        FakeLibrary(),
        OneModel(ServedModel(nothing, nothing, service=nothing, status=status, adapters=nothing)),
    )


def request(name: str = "", **fields: Any) -> PageRequest:
    return PageRequest(tenant=b"us", fields=Fields(fields), name=name)


def test_an_entry_without_an_assessment_says_null():
    _, body = pages().models(request())
    (entry,) = json.loads(json.dumps(body))["models"]
    assert (entry["assessment"], entry["model_type"], entry["complete"]) == (None, None, False)


def test_a_measured_speed_is_that_of_the_loaded_model_alone():
    measured = pages([0.05] * 40)
    _, loaded = measured.fit(request())
    assert (loaded["measured_decode_tps"], loaded["measured_at"], loaded["context_tokens"]) == (
        20.0,
        5500,
        4000,
    )
    assert loaded["typical_context_tokens"] == 4000
    _, other = measured.fit(request(repo="loaded"))
    assert (other["measured_decode_tps"], other["measured_at"], other["context_tokens"]) == (None, None, 5000)
    _, few = pages([0.05] * 31).fit(request())
    assert few["measured_decode_tps"] is None


def test_while_no_model_is_loaded_another_one_is_judged_all_the_same():
    class NoneLoaded(OneModel):
        @property
        def default(self) -> Any:
            raise Overloaded("No model is loaded now.")

        @property
        def status(self) -> Any:
            return self._model.status

    served = pages().served
    assert isinstance(served, OneModel)
    _, other = replace(pages(), served=NoneLoaded(served._model)).fit(request(repo="lab/x"))
    assert (other["model"], other["measured_decode_tps"], other["context_tokens"]) == ("lab/x", None, 5000)


def test_the_machines_are_rows():
    _, body = pages().fit(request())
    assert body["sku_matrix"] == [
        {"sku": "Toy 16 GB", "ram_gb": 16, "fits": True, "max_context": 5000, "decode_tps": 12.5}
    ]
    assert body["sku_matrix_ctx"] == 5000
    assert body["arithmetic"] == ["1 + 1"]


def test_a_failed_download_tells_its_error():
    status, body = pages().downloads(request())
    assert status == 200
    assert body["downloads"] == [
        {
            "id": "dl_1",
            "repo_id": "us",
            "state": "error",
            "current_file": None,
            "received_bytes": 1,
            "total_bytes": 2,
            "files_done": 3,
            "files_total": 4,
            "bytes_per_sec": 5,
            "started_at": 6,
            "finished_at": 7,
            "error": "why",
        }
    ]


def test_each_change_reaches_the_download_of_the_tenant():
    assert pages().start(request(repo_id="lab/x"))[1]["repo_id"] == "us starts lab/x"
    assert pages().resume(request("dl_1"))[1]["repo_id"] == "us resumes dl_1"
    assert pages().remove(request("dl_1"))[1]["repo_id"] == "us removes dl_1"
    with pytest.raises(Conflict, match="us pauses dl_1"):
        pages().pause(request("dl_1"))
