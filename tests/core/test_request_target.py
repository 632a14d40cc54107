"""Targets of requests in every form, and paths that begin with /v1 twice."""

import pytest

from start_llm.access.request_target import hint_about, origin_form, with_one_version


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/v1/models?limit=1", ("/v1/models?limit=1", None)),
        ("http://localhost:8080/v1/models?limit=1", ("/v1/models?limit=1", "localhost:8080")),
        ("HTTPS://[::1]:4000/", ("/", "[::1]:4000")),
        ("http://localhost", ("/", "localhost")),
        ("http://localhost?a=http://b/c", ("/?a=http://b/c", "localhost")),
        ("/x?to=http://localhost/y", ("/x?to=http://localhost/y", None)),
        ("http:///v1", ("/v1", "")),
        ("*", ("*", None)),
    ],
)
def test_a_target_is_its_path_and_perhaps_a_host(target: str, expected: tuple[str, str | None]):
    assert origin_form(target) == expected


def test_a_version_that_is_there_twice_is_one_and_gets_a_hint():
    assert with_one_version("/v1/v1/v1/messages") == "/v1/messages"
    assert "leave /v1 out" in hint_about("/v1/v1/messages")
    for path in ("/v1/messages", "/v1", "/messages"):
        assert (with_one_version(path), hint_about(path)) == (path, "")


def test_compaction_gets_a_hint_for_codex():
    for path in ("/v1/responses/compact", "/responses/compact"):
        assert "model_providers.ID.name" in hint_about(path)
    assert hint_about("/v1/responses/compacted") == ""
