"""JSON that the real model has to write: valid over 262,144 tokens, and in the form that it would choose."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.real.replies import CHAT, GREEDY, post, text_of
from tests.serving import Server

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

RECORDS = [{"name": "Ada", "born": 1815}, {"name": "Grace", "born": 1906}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
    },
    "required": ["name", "born"],
    "additionalProperties": False,
}
AS_PERSON = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
AS_JSON = {"type": "json_object"}


def ask(server: Server, indent: int | None, length: int, **fields: Any) -> Any:
    """Ask with records as text. The model writes some like them."""
    records = "\n\n".join(json.dumps(record, indent=indent) for record in RECORDS)
    body = {**GREEDY, "max_tokens": length, "messages": [{"role": "user", "content": records}]}
    return post(server.port, CHAT, body | fields)


@pytest.mark.parametrize("indent", [None, 4], ids=["in a line", "indented"])
def test_a_schema_holds(indent: int | None, server: Server):
    reply = ask(server, indent, 40, response_format=AS_PERSON)
    assert reply["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(text_of(reply)), PERSON)


def test_json_is_indented_with_blanks_where_the_model_would_do_so(server: Server):
    begins = json.dumps(RECORDS[0], indent=4).partition(",")[0]
    assert text_of(ask(server, 4, 12)).startswith(begins)
    assert text_of(ask(server, 4, 12, response_format=AS_JSON)).startswith(begins)
