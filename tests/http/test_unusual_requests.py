"""Requests that protocols allow and some templates refuse are answered, by every family."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.http.conftest import FamilyServer
from tests.http.forms import FORMS
from tests.http.reading import QUESTION, content_of, post
from tests.http.scripts import asking, write_model
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(3)

QUOTE = "It writes </think>, <channel|>, <|channel|>analysis<|message|> and <|channel|>final<|message|>."
BARE_TOOLS = [
    {"type": "function", "function": {"name": "alone"}},
    {"type": "function", "function": {"name": "described", "description": "To describe."}},
    {"type": "function", "function": {"name": "shaped", "parameters": {"type": "object"}}},
]
REQUESTS: Mapping[str, dict[str, Any]] = {
    "tools without a description or parameters": {"messages": QUESTION, "tools": BARE_TOOLS},
    "an empty answer": {"messages": [*QUESTION, {"role": "assistant", "content": ""}, *QUESTION]},
    "an answer that quotes marks": {
        "messages": [*QUESTION, {"role": "assistant", "content": QUOTE}, *QUESTION]
    },
}
STRICT = ("strict_channels", "refuses_empty_replies")


@pytest.fixture(scope="module", params=STRICT)
def strict(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = write_model(
        tmp_path_factory.mktemp(request.param), request.param, scripts={"answer": "<|message|>It is deep."}
    )
    with serving(folder) as server:
        yield server


@pytest.mark.sample(12)
@pytest.mark.parametrize("request_of", REQUESTS)
@pytest.mark.parametrize("name", FORMS)
def test_every_family_answers(name, request_of, family: FamilyServer):
    asked = {**REQUESTS[request_of], "enable_thinking": False, "max_tokens": 40, **asking("answer")}
    assert content_of(post(family(name), asked).json).finish in ("stop", "length")


@pytest.mark.sample(6)
@pytest.mark.parametrize("request_of", REQUESTS)
def test_the_strictest_templates_answer(request_of, strict: Server):
    asked = {**REQUESTS[request_of], "max_tokens": 40, **asking("answer")}
    assert content_of(post(strict, asked).json).finish in ("stop", "length")
