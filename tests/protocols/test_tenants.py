"""The tenant of a request."""

import pytest

from start_llm.core.tenants import TENANT_HEADER, WARM_UP_HEADER, tenant_of_key
from start_llm.protocols.tenants import Tenants

PROXY = "the proxy's key"
TENANTS = Tenants(PROXY)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_key_is_a_tenant():
    ann, bob = (TENANTS.of(bearer(name)) for name in ("ann", "bob"))
    assert ann != bob != b""
    assert ann == TENANTS.of(bearer("ann"))


def test_a_key_is_the_same_in_either_header():
    assert TENANTS.of({"x-api-key": "ann"}) == TENANTS.of(bearer("ann"))


@pytest.mark.parametrize("headers", [{}, bearer(""), {"x-api-key": ""}])
def test_all_who_send_no_key_are_one(headers):
    assert TENANTS.of(headers) == b""


def test_a_tenant_does_not_tell_its_key():
    assert b"ann" not in TENANTS.of(bearer("ann"))


def test_the_proxy_is_believed_whose_request_it_passes_on():
    ann = TENANTS.of(bearer("ann"))
    passed_on = bearer(PROXY) | {TENANT_HEADER: tenant_of_key("ann")}
    assert TENANTS.of(passed_on) == ann
    assert TENANTS.of(bearer(PROXY)) == b""


@pytest.mark.parametrize("tenants", [TENANTS, Tenants()])
def test_nobody_else_is(tenants):
    bob = bearer("bob")
    assert tenants.of(bob | {TENANT_HEADER: tenant_of_key("ann")}) == tenants.of(bob)
    assert tenants.of({TENANT_HEADER: tenant_of_key("ann")}) == b""


def test_where_tenants_are_not_kept_apart_all_are_one():
    assert Tenants(PROXY, apart=False).of(bearer("ann")) == b""


def test_a_warm_up_is_told_by_the_proxys_key_alone():
    assert TENANTS.is_warm_up({WARM_UP_HEADER: PROXY})
    assert not TENANTS.is_warm_up({WARM_UP_HEADER: "guess"})
    assert not TENANTS.is_warm_up(bearer(PROXY))
    assert not Tenants().is_warm_up({WARM_UP_HEADER: ""})
