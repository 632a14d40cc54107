"""The table of endpoints, beside who answers them and what docs/api.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from start_llm.core.errors import MethodNotAllowed, NotFound
from start_llm.protocols.routes import ROUTES, RouteTable, shown
from start_llm.proxy.open_routes import OPEN_ROUTES
from start_llm.server.endpoints import ENDPOINTS, GenerateEndpoint, PageEndpoint, QueryEndpoint

API = Path(__file__).parents[2] / "docs" / "api.md"
TABLE = RouteTable(ROUTES)


def documented() -> dict[str, bool]:
    """The endpoints in docs/api.md, and whether it says that port 4000 has them."""
    rows = re.findall(r"^\| (`(?:GET|POST|DELETE) /.*?`) \|(.*?)\|", API.read_text(), re.MULTILINE)
    return {name: "yes" in port for cell, port in rows for name in re.findall("`(.+?)`", cell)}


def test_the_documents_list_every_endpoint_with_its_ports():
    assert documented() == {shown(route.name): route.on_proxy for route in ROUTES}


def test_the_documents_name_every_path_without_v1():
    (text,) = re.findall(r"These paths work without `/v1`, too: (.*?)\n\n", API.read_text(), re.DOTALL)
    for route in ROUTES:
        for path in route.aliases:
            assert f"/v1{path}" == route.path
            assert path in text or ("/responses` and all below it" in text and path.startswith("/responses/"))


def test_every_endpoint_is_answered_by_somebody():
    assert ENDPOINTS.keys() == {route.name for route in ROUTES}
    assert len(ENDPOINTS) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_an_endpoint_that_reads_a_body_says_which(route):
    endpoint = ENDPOINTS[route.name]
    if not isinstance(endpoint, PageEndpoint):
        assert route.body
    if isinstance(endpoint, GenerateEndpoint | QueryEndpoint):
        assert route.body != "other"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_an_endpoint_is_found_by_each_of_its_paths(route):
    for template in route.paths:
        for name in ("x", "a%2Fb", "x/y") if ":path" in template else ("x", "a%2Fb"):
            path = template.replace("{id}", name).replace("{id:path}", name)
            match = TABLE.find(route.method, path)
            assert (match.route, match.template, match.path(name)) == (route, template, path)
            assert match.name == (name if path != template else "")
            assert TABLE.find(route.method, f"{path}/").route == route if path != "/" else True


def test_a_fixed_path_is_not_taken_for_a_name():
    with pytest.raises(MethodNotAllowed) as refused:
        TABLE.find("GET", "/v1/responses/input_tokens")
    assert refused.value.headers == {"Allow": "POST"}


def test_an_action_is_not_taken_for_a_part_of_a_models_name():
    with pytest.raises(MethodNotAllowed, match="answers POST, not GET"):
        TABLE.find("GET", "/v1/models/lab/one/load")
    assert TABLE.find("POST", "/v1/models/lab/one/load").name == "lab/one"


@pytest.mark.parametrize(
    "path", ["/v1/responses/a/b", "/downloads/a/b", "/activity/a/b", "/v1/x", "//", "/v1"]
)
def test_what_has_no_endpoint_is_not_found(path):
    if path == "//":
        assert TABLE.template(path) == "/"
        return
    assert TABLE.template(path) is None
    with pytest.raises(NotFound):
        TABLE.find("GET", path)
    assert TABLE.asks_key(path)


def test_a_path_that_is_nearly_right_is_answered_with_the_right_one():
    with pytest.raises(NotFound, match="Did you mean /v1/messages"):
        TABLE.find("POST", "/v1/mesages")
    with pytest.raises(NotFound, match="does not compact"):
        TABLE.find("POST", "/v1/responses/compact")


def test_only_signs_of_life_need_no_key():
    assert [route.path for route in ROUTES if not route.asks_key] == ["/health", "/", "/api/hello"]


@pytest.mark.parametrize(
    "path", ["/v1/responses/..", "/v1/responses/a b", "/v1/models/a/b/c", "/v1/models/.a"]
)
def test_names_that_lead_elsewhere_are_closed_on_the_proxy(path):
    assert TABLE.template(path)
    assert OPEN_ROUTES.template(path) is None
