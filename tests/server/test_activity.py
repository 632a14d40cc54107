"""The status page at `/`, and the data that it shows: `/activity`."""

from __future__ import annotations

import base64
import hashlib
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from start_llm.server.status_page import status_page
from tests.server.client import CHAT, TEXT, Client, ask, message, stats, wait_until
from tests.server.conftest import LONG_PROMPT
from tests.serving import Server, serving

KEY, OTHER = "first-key", "second-key"
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SECRET = "the treasure lies under the oak"
ANOTHER = "the treasure lies under the elm"


def keyed(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def activity(port: int, key: str = "", query: str = "") -> Any:
    reply = ask(port, "GET", f"/activity{query}", headers=keyed(key) if key else None)
    assert reply.status == 200, reply.body
    return reply.json


def talk(port: int, first: str, session: str, key: str = "") -> Any:
    """One question with history, whose first message may differ from the time before."""
    messages = [{"role": "user", "content": first * 4}, {"role": "assistant", "content": "Hello."}]
    body = {"messages": [*messages, {"role": "user", "content": "go on"}], "session_id": session}
    reply = ask(port, "POST", CHAT, body | {"temperature": 0}, keyed(key) if key else None)
    assert reply.status == 200, reply.body
    return reply.json


# ------------------------------------------------------------------------------------------------------ page


@pytest.mark.parametrize("headers", [None, {"Accept": "*/*"}, {"Accept": "application/json"}])
def test_programs_get_the_greeting_as_before(scripted: Server, scripted_model: Path, headers: Any):
    reply = ask(scripted.port, "GET", "/", headers=headers)
    assert reply.json == {"server": "start_llm", "model": scripted_model.name}
    assert set(reply.headers) == {"server", "date", "x-request-id", "content-type", "content-length"}


@pytest.mark.parametrize("path", ["/", "//", "/?from=bookmark"])
def test_browsers_get_the_page(scripted: Server, path: str):
    reply = ask(scripted.port, "GET", path, headers=BROWSER)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert reply.body == status_page(asks_key=False).body
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["referrer-policy"] == "no-referrer"
    assert reply.headers["cache-control"] == "no-store"


def test_head_has_the_same_headers_and_the_connection_goes_on(scripted: Server):
    with Client(scripted.port) as client:
        page = client.ask("HEAD", "/", headers=BROWSER)
        greeting = client.ask("HEAD", "/")
        whole = client.ask("GET", "/", headers=BROWSER)
    assert page.body == greeting.body == b""
    assert int(page.headers["content-length"]) == len(whole.body)
    assert greeting.headers["content-type"] == "application/json"
    assert page.headers["content-security-policy"] == whole.headers["content-security-policy"]


def test_only_the_pages_own_style_and_script_may_run(scripted: Server):
    reply = ask(scripted.port, "GET", "/", headers=BROWSER)
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    text = reply.body.decode()
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        (source,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
    assert "unsafe" not in reply.headers["content-security-policy"]
    refused = ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types")
    assert {policy[name] for name in refused} == {"'none'"}
    assert policy["connect-src"] == "'self'"


def test_the_page_is_whole_and_asks_nobody_else():
    text = status_page(asks_key=False).body.decode()
    assert "page.css */" not in text
    assert "page.js */" not in text
    assert set(re.findall(r"\b(?:https?:)?//[\w.-]+\.\w+", text)) == {"http://www.w3.org"}, "a namespace"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\son\w+=", text)


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
def test_the_page_has_the_access_policy(scripted: Server, headers: dict[str, str]):
    assert ask(scripted.port, "GET", "/", headers=BROWSER | headers).status == 403


# ---------------------------------------------------------------------------------------------------- records


@pytest.fixture(scope="module")
def two_keys(scripted_model: Path) -> Iterator[Server]:
    with serving(scripted_model, access_keys=(KEY, OTHER)) as server:
        talk(server.port, SECRET, "of-the-first", KEY)
        talk(server.port, ANOTHER, "of-the-first", KEY)
        talk(server.port, "something quite different", "of-the-second", OTHER)
        ask(server.port, "POST", CHAT, {"messages": SECRET}, keyed(KEY))
        ask(server.port, "GET", "/nothing", headers=keyed("wrong"))
        wait_until(lambda: len(activity(server.port, OTHER)["recent"]) == 1, within_s=5)
        yield server


def test_activity_needs_a_key_and_the_page_does_not(two_keys: Server):
    assert ask(two_keys.port, "GET", "/", headers=BROWSER).status == 200
    for path in ("/activity", "/activity/req_1"):
        assert ask(two_keys.port, "GET", path).status == 401
        assert ask(two_keys.port, "GET", path, headers=keyed("wrong")).status == 401


def test_a_request_is_reported_with_its_figures(two_keys: Server):
    newest, first = activity(two_keys.port, KEY)["recent"]
    assert (first["name"], first["endpoint"], first["ending"]) == ("of-the-first", CHAT, "stop")
    for request in (newest, first):
        assert request["prompt_tokens"] == request["cached_tokens"] + request["computed_tokens"]
        assert request["written_tokens"] > 0
        assert 0 < request["ttft_seconds"] <= request["seconds"] < 60
        assert abs(time.time() - request["ended_at"]) < 600
    assert newest["again_tokens"] > 0
    assert newest["reason"] == "message 1 (user) says something else"


def test_a_conversation_has_its_turns(two_keys: Server):
    (conversation,) = activity(two_keys.port, KEY)["conversations"]
    assert conversation["name"] == "of-the-first"
    first, second = conversation["turns"]
    assert first["cached_tokens"] == first["again_tokens"] == 0
    assert second["again_tokens"] > 0
    assert first["new_tokens"] == sum(second[f"{kind}_tokens"] for kind in ("cached", "new", "again"))


def test_keys_do_not_see_each_other(two_keys: Server):
    report = activity(two_keys.port, OTHER)
    assert [entry["name"] for entry in report["recent"]] == ["f-the-second"]
    assert [entry["name"] for entry in report["conversations"]] == ["f-the-second"]
    assert "of-the-first" not in str(report)
    assert CHAT not in {entry["path"] for entry in report["refused"]}


def test_the_words_that_differ_are_shown_on_demand_and_to_their_own_key_only(two_keys: Server):
    report = activity(two_keys.port, KEY)
    assert [request["has_difference"] for request in report["recent"]] == [True, False]
    assert "treasure" not in str(report)
    path = f"/activity/{report['recent'][0]['id']}"
    details = ask(two_keys.port, "GET", path, headers=keyed(KEY)).json
    assert "oak" in details["computed"]
    assert "elm" in details["asked"]
    assert details["reason"] == report["recent"][0]["reason"]
    assert ask(two_keys.port, "GET", path, headers=keyed(OTHER)).status == 404
    assert ask(two_keys.port, "GET", "/activity/req_none", headers=keyed(KEY)).status == 404


def test_refusals_have_status_and_reason(two_keys: Server):
    """Those without a right key are nobody's, so that everybody sees them."""
    refusals = {item["path"]: item for item in activity(two_keys.port, KEY)["refused"]}
    bad, stranger = refusals[CHAT], refusals["/nothing"]
    assert (bad["method"], bad["status"], bad["times"]) == ("POST", 400, 1)
    assert "messages" in bad["reason"]
    assert (stranger["status"], stranger["reason"][:33]) == (401, "This is not a key of this server:")
    assert {item["path"]: item for item in activity(two_keys.port, OTHER)["refused"]}["/nothing"] == stranger


def test_without_keys_numbers_of_all_are_shown_and_names_and_texts_of_none_but_the_own(scripted_model: Path):
    with serving(scripted_model) as server:
        for first in (SECRET, ANOTHER):
            talk(server.port, first, "private-name", "any-key")
        ask(server.port, "GET", f"/{SECRET.replace(' ', '-')}", headers=keyed("any-key"))
        report = activity(server.port)
        assert [entry["again_tokens"] > 0 for entry in report["recent"]] == [True, False]
        assert [entry["has_difference"] for entry in report["recent"]] == [False, False]
        assert "private-name"[-12:] not in str(report)
        assert "treasure" not in str(report)
        (refused,) = report["refused"]
        assert (refused["status"], refused["path"], refused["reason"]) == (404, "", "Not Found")
        own = activity(server.port, "any-key")
        assert {entry["name"] for entry in own["recent"]} == {"private-name"}
        assert "treasure" in own["refused"][0]["path"]


def test_a_line_that_is_no_request_is_noted_without_its_text(scripted: Server):
    with Client(scripted.port) as client:
        client.send(b"NONSENSE OF A STRANGER\r\n\r\n")
        assert client.reply().status == 400
    (refusal,) = [entry for entry in activity(scripted.port)["refused"] if not entry["path"]]
    assert refusal["status"] == 400
    assert "STRANGER" not in str(refusal)


# ------------------------------------------------------------------------------------------------ the present


def test_a_program_that_names_a_version_gets_what_is_newer(scripted: Server):
    for session in ("seen", "other"):
        talk(scripted.port, "hello", session)
    ask(scripted.port, "GET", "/nothing-here")
    wait_until(lambda: stats(scripted.port)["requests"]["in_flight"] == 0, within_s=5)
    report = activity(scripted.port)
    assert report["is_whole"]
    since = f"?since={report['version']}"
    same = activity(scripted.port, query=since)
    assert (same["is_whole"], same["version"]) == (False, report["version"])
    assert same["recent"] == same["conversations"] == same["refused"] == []
    talk(scripted.port, "hello", "seen")
    ask(scripted.port, "GET", "/nothing-here")
    wait_until(lambda: bool(activity(scripted.port, query=since)["recent"]), within_s=5)
    newer = activity(scripted.port, query=since)
    assert [entry["name"] for entry in newer["recent"]] == ["seen"]
    assert [(entry["name"], len(entry["turns"])) for entry in newer["conversations"]] == [("seen", 1)]
    assert [(entry["path"], entry["times"]) for entry in newer["refused"]] == [("/nothing-here", 2)]


@pytest.mark.parametrize("version", ["another", "another-1", "-1", "%00", "0-9999999999999999999", ""])
def test_an_unknown_version_gets_everything(scripted: Server, version: str):
    assert activity(scripted.port, query=f"?since={version}")["is_whole"]
    own = activity(scripted.port)["version"].partition("-")[0]
    assert activity(scripted.port, query=f"?since={own}-x{version}")["is_whole"]


def test_the_state_of_the_server(scripted: Server, scripted_model: Path):
    report = activity(scripted.port)
    assert report["device"]
    assert report["started_at"] <= report["now"]
    (model,) = report["models"]
    assert (model["id"], model["state"]) == (scripted_model.name, "loaded")
    assert model["context_window"] > 0
    memory = report["memory"]
    assert set(memory["parts"]) == {"weights", "pages", "checkpoints", "sequence_caches", "live", "images"}
    assert memory["budget_bytes"] == sum(memory["parts"].values()) + memory["free_bytes"]
    assert memory["parts"]["weights"] > 0
    assert report["ssd"]["state"] == "off"
    assert set(report["speculation"]) == {"pays", "drafted_tokens", "accepted_tokens", "saved_seconds"}
    assert set(report["saved"]) == {"hour", "day"}


@pytest.mark.thorough
def test_running_requests_show_how_far_they_are(endless: Server):
    with Client(endless.port) as reading, Client(endless.port) as writing:
        writing.request("POST", TEXT, {"prompt": "hi", "max_tokens": 100_000, "stream": True})
        wait_until(lambda: _phases(endless) == ["writing"], within_s=10)
        reading.request("POST", TEXT, {"prompt": LONG_PROMPT, "max_tokens": 1, "stream": True})
        wait_until(lambda: "reading" in _phases(endless), within_s=10)
        wait_until(lambda: _running(endless)["reading"]["done_tokens"] > 0, within_s=30)
        now = _running(endless)
        assert now["reading"]["prompt_tokens"] == len(LONG_PROMPT) > now["reading"]["done_tokens"]
        assert now["writing"]["written_tokens"] > 0
        assert now["writing"]["done_tokens"] == now["writing"]["prompt_tokens"]
        assert now["reading"]["seconds"] < 60
    wait_until(lambda: not _phases(endless), within_s=20)
    assert activity(endless.port)["recent"][0]["ending"] == "cancelled"


@pytest.mark.long
def test_activity_is_quick_while_a_prompt_is_read(endless: Server):
    with Client(endless.port) as client, Client(endless.port) as poller:
        client.request("POST", TEXT, {"prompt": LONG_PROMPT, "max_tokens": 1, "stream": True})
        wait_until(lambda: _phases(endless) == ["reading"], within_s=10)
        seconds = []
        for _ in range(100):
            began = time.perf_counter()
            poller.send(message("GET", "/activity"))
            assert poller.reply().status == 200
            seconds.append(time.perf_counter() - began)
            time.sleep(0.01)
        assert _phases(endless) == ["reading"]
    assert statistics.median(seconds) < 0.005
    wait_until(lambda: not _phases(endless), within_s=20)


def _running(server: Server) -> dict[str, Any]:
    return {request["phase"]: request for request in activity(server.port)["running"]}


def _phases(server: Server) -> list[str]:
    return [request["phase"] for request in activity(server.port)["running"]]
