"""The tenant of a request."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping

import pytest

from start_llm.access.backend_secret import (
    CLIENT_HEADER,
    ID_HEADER,
    READINESS_HEADER,
    SIGNATURE_HEADER,
    BackendSecret,
    Caller,
)
from start_llm.access.request_tenant import Tenants
from start_llm.access.tenants import TENANT_HEADER, tenant_of_key

SECRET = BackendSecret("what both know")
TENANTS = Tenants(SECRET)
ANN = Caller(tenant_of_key("ann"), "pi")
PLACE = ("POST", "/v1/messages")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def passed_on(caller: Caller = ANN, secret: BackendSecret = SECRET) -> dict[str, str]:
    return bearer(SECRET.api_key) | secret.signed(caller, *PLACE)


def tenant(headers: Mapping[str, str], tenants: Tenants = TENANTS) -> bytes:
    return tenants.of(headers, *PLACE)


def test_every_key_is_a_tenant():
    ann, bob = (tenant(bearer(name)) for name in ("ann", "bob"))
    assert ann != bob != b""
    assert ann == tenant(bearer("ann"))


def test_a_key_is_the_same_in_every_header():
    assert tenant({"x-api-key": "ann"}) == tenant(bearer("ann")) == tenant({"authorization": "ann"})


@pytest.mark.parametrize("headers", [{}, bearer(""), {"x-api-key": ""}])
def test_all_who_send_no_key_are_one(headers: dict[str, str]):
    assert tenant(headers) == b""


def test_a_tenant_does_not_tell_its_key():
    assert b"ann" not in tenant(bearer("ann"))


def test_a_key_may_be_any_bytes():
    assert tenant(bearer("\xe9\udc80")) == tenant_of_key("\xe9\udc80").encode()


def test_the_proxy_is_believed_who_asks_it():
    assert TENANTS.caller(passed_on(), *PLACE) == ANN
    assert tenant(passed_on()) == tenant(bearer("ann"))
    assert TENANTS.caller(passed_on(Caller("", "")), *PLACE) == Caller("", "")


def test_it_is_believed_again_as_litellm_retries():
    headers = passed_on()
    assert tenant(headers) == tenant(headers) == tenant(bearer("ann"))


def test_a_query_behind_the_path_does_not_matter():
    assert TENANTS.caller(passed_on(), "POST", f"{PLACE[1]}?beta=true") == ANN


@pytest.mark.parametrize(
    "changed",
    [
        {TENANT_HEADER: tenant_of_key("bob")},
        {CLIENT_HEADER: "codex"},
        {ID_HEADER: "x"},
        {SIGNATURE_HEADER: ""},
        {SIGNATURE_HEADER: "0" * 64},
        {SIGNATURE_HEADER: "\xe9\udc80"},
    ],
    ids=str,
)
def test_what_was_changed_on_the_way_is_not_believed(changed: dict[str, str]):
    own = Caller(tenant_of_key(SECRET.api_key), "")
    assert TENANTS.caller(passed_on() | changed, *PLACE) == own


@pytest.mark.parametrize("place", [("GET", PLACE[1]), ("POST", "/v1/responses"), ("POST", f"{PLACE[1]}/")])
def test_a_signature_is_for_one_request(place: tuple[str, str]):
    assert TENANTS.caller(passed_on(), *place).tenant == tenant_of_key(SECRET.api_key)


def test_parts_cannot_be_moved_into_each_other():
    signature, other = (
        SECRET._signature(caller, *PLACE, "1") for caller in (Caller("ab", "c"), Caller("a", "bc"))
    )
    assert signature != other


def test_without_a_signature_the_proxy_is_a_tenant_of_its_own():
    named = bearer(SECRET.api_key) | {TENANT_HEADER: ANN.tenant, CLIENT_HEADER: ANN.program}
    assert tenant(named) == tenant_of_key(SECRET.api_key).encode()


def test_another_secret_signs_nothing():
    assert tenant(passed_on(secret=BackendSecret("another"))) == tenant_of_key(SECRET.api_key).encode()
    assert BackendSecret.random().text != BackendSecret.random().text


def test_the_key_that_litellm_knows_signs_nothing():
    payload = json.dumps(["1", ANN.tenant, ANN.program, *PLACE, "id"]).encode()
    forged = passed_on() | {ID_HEADER: "id"}
    for key in (SECRET.api_key, SECRET.readiness):
        forged[SIGNATURE_HEADER] = hmac.new(key.encode(), payload, "sha256").hexdigest()
        assert tenant(forged) == tenant_of_key(SECRET.api_key).encode()


@pytest.mark.parametrize("tenants", [TENANTS, Tenants()])
def test_nobody_else_is_believed(tenants: Tenants):
    bob = bearer("bob")
    assert tenant(passed_on() | bob, tenants) == tenant(bob, tenants)
    assert tenant(SECRET.signed(ANN, *PLACE), tenants) == b""
    assert tenants.caller({"user-agent": "curl/8", CLIENT_HEADER: "pi"}, *PLACE).program == "curl"


def test_where_tenants_are_not_kept_apart_all_are_one():
    together = Tenants(SECRET, apart=False)
    assert tenant(bearer("ann"), together) == tenant(passed_on(), together) == b""
    assert together.caller(passed_on(), *PLACE) == ANN


def test_a_readiness_check_is_known_by_a_word_of_its_own():
    assert TENANTS.is_readiness_check({READINESS_HEADER: SECRET.readiness})
    assert not TENANTS.is_readiness_check({READINESS_HEADER: SECRET.api_key})
    assert not TENANTS.is_readiness_check(bearer(SECRET.api_key))
    assert not Tenants().is_readiness_check({READINESS_HEADER: ""})
