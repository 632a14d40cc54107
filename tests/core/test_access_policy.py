"""The access policy, and the headers that a body needs."""

import hmac

import pytest

from start_llm.access import access_policy as module
from start_llm.access.access_policy import AccessPolicy, demand_json, is_loopback
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.core.errors import Forbidden, InvalidRequest, Unauthorized, UnsupportedMediaType

HERE = "127.0.0.1"
OUTSIDE = "192.168.1.5"


def admits(
    access_policy: AccessPolicy, address: str = HERE, *, asks_key: bool = True, **headers: str
) -> bool:
    """True if it lets a request with these headers in. `x_api_key` is x-api-key."""
    try:
        access_policy.admit(
            [(name.replace("_", "-"), text) for name, text in headers.items()], address, asks_key=asks_key
        )
    except (Forbidden, Unauthorized):
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "localhost.",
        "127.0.0.1:8080",
        "127.0.0.1:65535",
        "127.0.0.9",
        "[::1]:8080",
        "[::1]",
        "[0:0:0:0:0:0:0:1]:1",
    ],
)
def test_loopback_is_served_under_every_name_of_it(host):
    assert admits(AccessPolicy(), host=host)
    assert admits(AccessPolicy(), OUTSIDE, host=host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "[::1.]",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "evil.example#localhost",
        "evil.example/localhost",
        "localhost:80@evil.example",
        "0.0.0.0",
        "0.0.0.0:8080",
        "[::]:8080",
        "192.168.1.5",
        "2130706433",
        "0x7f.1",
        "",
        ":8080",
        "[evil]",
        "localhost, evil.example",
        "localhost:x",
        "localh\u00f6st",
        "\u2460.example",
    ],
)
def test_a_name_that_a_page_may_have_made_lead_here_is_refused(host):
    assert not admits(AccessPolicy(), host=host)


def test_the_address_that_was_connected_to_is_a_name():
    assert admits(AccessPolicy(), OUTSIDE, host="192.168.1.5:8080")
    assert admits(AccessPolicy(), "::ffff:192.168.1.5", host="192.168.1.5")
    assert admits(AccessPolicy(), "fe80::1", host="[FE80:0::1]:8080")
    assert not admits(AccessPolicy(), OUTSIDE, host="192.168.1.6")


def test_listed_names_are_served_too():
    access_policy = AccessPolicy(names=frozenset({"studio.local"}))
    assert admits(access_policy, OUTSIDE, host="Studio.Local:8080")
    assert not admits(access_policy, OUTSIDE, host="studio.local.evil.example")


def test_who_names_no_host_is_no_browser():
    assert admits(AccessPolicy())


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8080",
        "null",
        "",
        "file://",
        "http://localhost:3000",
        "http://localhost",
        "http://localhost:8080.evil.example",
        "http://localhost:8080@evil.example",
        "chrome-extension://abcdef",
        "vscode-webview://x",
        "http://[",
        "http://localhost:8080, http://evil.example",
    ],
)
def test_a_page_of_another_origin_is_refused(origin):
    assert not admits(AccessPolicy(), host="localhost:8080", origin=origin)
    assert not admits(
        AccessPolicy(("key",)), host="localhost:8080", origin=origin, authorization="Bearer key"
    )


def test_a_page_of_this_very_origin_is_served():
    assert admits(AccessPolicy(), host="localhost:8080", origin="http://localhost:8080")
    assert admits(AccessPolicy(), host="LOCALHOST:8080", origin="http://localhost:8080")


@pytest.mark.parametrize(
    ("site", "host", "is_served"),
    [
        ("same-origin", "localhost:8080", True),
        ("same-origin", "studio.local:8080", True),
        ("none", "localhost:8080", True),
        ("none", "studio.local:8080", True),
        ("same-site", "localhost:8080", True),
        ("same-site", "127.0.0.1:8080", True),
        ("same-site", "[::1]:8080", True),
        ("same-site", "studio.local:8080", False),
        ("cross-site", "localhost:8080", False),
        ("cross-site", "studio.local:8080", False),
        ("CROSS-SITE", "localhost", False),
        ("", "localhost", False),
        ("a-word-of-tomorrow", "localhost", False),
    ],
)
def test_what_a_browser_says_of_the_site_is_obeyed(site, host, is_served):
    access_policy = AccessPolicy(names=frozenset({"studio.local"}))
    assert admits(access_policy, OUTSIDE, host=host, sec_fetch_site=site) == is_served


def test_a_listed_page_is_served_from_any_site_and_no_other():
    access_policy = AccessPolicy(origins=AllowedOrigins(("https://app.example",)))

    def is_served(**origin: str) -> bool:
        return admits(access_policy, host="localhost", sec_fetch_site="cross-site", asks_key=True, **origin)

    assert is_served(origin="https://app.example")
    assert not is_served(origin="https://other.example")
    assert not is_served(), "an image of that page: it says no origin"


def test_who_says_two_things_of_the_site_is_refused():
    with pytest.raises(InvalidRequest, match="sec-fetch-site"):
        AccessPolicy().admit([("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", "cross-site")], HERE)


def test_same_site_without_a_host_is_refused():
    assert not admits(AccessPolicy(), sec_fetch_site="same-site")


def test_an_origin_without_a_host_is_refused():
    assert not admits(AccessPolicy(), origin="http://localhost:8080")
    assert not admits(AccessPolicy(), origin="null")


@pytest.mark.parametrize(
    ("headers", "opens"),
    [
        ({}, False),
        ({"authorization": ""}, False),
        ({"authorization": "Bearer"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Bearer on"}, False),
        ({"authorization": "Bearer onee"}, False),
        ({"authorization": "Bearer ONE"}, False),
        ({"authorization": "Basic one"}, False),
        ({"authorization": "Bearer one,two"}, False),
        ({"authorization": "Bearer \xe9\udc80"}, False),
        ({"x_api_key": ""}, False),
        ({"x_api_key": "three"}, False),
        ({"authorization": "Bearer three", "x_api_key": "one"}, False),
        ({"authorization": "Bearer one"}, True),
        ({"authorization": "bearer  two "}, True),
        ({"authorization": "two"}, True),
        ({"x_api_key": "one"}, True),
        ({"authorization": "Bearer", "x_api_key": "one"}, True),
        ({"authorization": "Bearer one", "x_api_key": "three"}, True),
    ],
)
def test_only_a_key_opens(headers, opens):
    access_policy = AccessPolicy(("one", "two"))
    assert admits(access_policy, **headers) == opens
    assert admits(access_policy, asks_key=False, **headers)
    assert admits(AccessPolicy(), **headers)


def test_how_long_it_takes_tells_nothing_of_a_key(monkeypatch):
    """Every key is compared, as a digest, and whole."""
    compared: list[tuple[str, str]] = []

    def compare(sent: str, other: str) -> bool:
        compared.append((sent, other))
        return hmac.compare_digest(sent, other)

    monkeypatch.setattr(module, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    for given in ("one", "two", "three", ""):
        compared.clear()
        assert admits(AccessPolicy(("one", "two")), authorization=f"Bearer {given}") == (
            given in ("one", "two")
        )
        assert len(compared) == 2
        assert "one" not in str(compared)


@pytest.mark.parametrize("name", ["host", "origin", "authorization", "x-api-key", "content-type"])
def test_a_header_that_decides_is_there_once(name):
    with pytest.raises(InvalidRequest, match=f"{name} is given twice"):
        AccessPolicy().admit([(name, "localhost"), (name.title(), "evil.example")], HERE)
    AccessPolicy().admit(
        [("host", "localhost"), ("Host", "localhost"), ("accept", "a"), ("accept", "b")], HERE
    )


@pytest.mark.parametrize(
    "kind",
    ["application/json", "Application/JSON", "application/json; charset=utf-8", " application/json ;x=y"],
)
def test_a_body_that_says_that_it_is_json_is_read(kind):
    demand_json(kind)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "text/json",
        "application/jsonp",
        "application/json, text/plain",
        "*/*",
    ],
)
def test_a_body_that_a_page_could_send_unasked_is_refused(kind):
    with pytest.raises(UnsupportedMediaType, match="must be application/json"):
        demand_json(kind)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.5", False),
        ("localhost.local", False),
        ("0", False),
        ("", False),
    ],
)
def test_what_is_loopback(name, expected):
    assert is_loopback(name) == expected
