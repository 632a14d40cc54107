"""Which pages may use the server, and what their browsers are answered."""

import pytest

from start_llm.access.access_policy import AccessPolicy
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.core.errors import Forbidden

LISTED = AllowedOrigins(("http://localhost:3000", "app://obsidian.md", "vscode-webview://*"))
ASKED = {"access-control-request-method": "POST"}


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3000", "HTTP://LOCALHOST:3000", "app://obsidian.md"),
        *("vscode-webview://0abc", "vscode-webview://1def"),
    ],
)
def test_a_listed_page_may_ask_and_read(origin):
    assert LISTED.allow(origin)
    assert LISTED.headers({"origin": origin}) == {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    AccessPolicy(origins=LISTED).admit([("host", "localhost:8080"), ("origin", origin)], "127.0.0.1")


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost:3001", "https://localhost:3000", "http://localhost:3000.evil.example", ""),
        *("http://evil.example", "null", "app://obsidian.md.evil", "vscode-webviewer://x", "file://"),
    ],
)
def test_any_other_page_may_not(origin):
    assert not LISTED.allow(origin)
    assert LISTED.headers({"origin": origin}) == {}
    assert not LISTED.is_preflight("OPTIONS", {"origin": origin, **ASKED})
    with pytest.raises(Forbidden, match="ALLOWED_ORIGINS"):
        AccessPolicy(origins=LISTED).admit([("host", "localhost:8080"), ("origin", origin)], "127.0.0.1")


def test_a_program_that_is_no_page_gets_no_headers():
    assert LISTED.headers({}) == {}
    assert not LISTED.is_preflight("OPTIONS", ASKED)


def test_only_a_question_before_the_request_is_one():
    page = {"origin": "app://obsidian.md"}
    assert LISTED.is_preflight("OPTIONS", page | ASKED)
    assert not LISTED.is_preflight("OPTIONS", page)
    assert not LISTED.is_preflight("POST", page | ASKED)


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        ("content-type, x-stainless-lang,authorization", "content-type, x-stainless-lang,authorization"),
        ("", None),
        ("x-a: 1\r\nset-cookie", None),
    ],
)
def test_a_page_may_send_the_headers_that_it_asks_for(wanted, allowed):
    given = LISTED.preflight({"access-control-request-headers": wanted})
    assert given.get("Access-Control-Allow-Headers") == allowed


def test_a_page_of_the_internet_learns_that_this_network_lets_it_in():
    given = LISTED.preflight({"access-control-request-private-network": "true"})
    assert given["Access-Control-Allow-Private-Network"] == "true"
    assert "Access-Control-Allow-Private-Network" not in LISTED.preflight({})
