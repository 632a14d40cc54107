"""Every token of a reply is reported once, whatever became of its text."""

from typing import Any

import pytest

from tests.http.conftest import Hearing
from tests.http.forms import FORMS, THINKING, answers, reasoning_texts
from tests.http.reading import REPORT, Heard

pytestmark = pytest.mark.sample(5)

CASES = [
    *((name, script) for name in THINKING for script in ("reasoned", "reasoned_call")),
    *((name, script) for name in FORMS for script in ("call", "prose")),
    *((name, script) for name in ("glm", "mistral") for script in ("unknown", "malformed", "pair")),
]


def streamed(heard: Heard, member: str) -> list[list[Any]]:
    """Return the reports of the chunks with something to say, chunk by chunk."""
    parts = [choice[member] for choice in heard.choices if member in choice]
    return [part["content"] if member == "logprobs" else part for part in parts]


def joined(lists: list[list[Any]]) -> list[Any]:
    return [item for items in lists for item in items]


@pytest.mark.parametrize(("name", "script"), CASES)
@pytest.mark.sample(32)
def test_token_ids_and_log_probabilities_cover_the_reply_once(name, script, hearing: Hearing):
    heard = hearing(name, script, **REPORT)
    (choice,) = heard.body["choices"]
    assert joined(streamed(heard, "token_ids")) == choice["token_ids"]
    assert len(choice["token_ids"]) == heard.usage["completion_tokens"]
    reported = [entry["bytes"] for entry in heard.logprobs]
    assert [entry["bytes"] for entry in joined(streamed(heard, "logprobs"))] == reported
    text = {**reasoning_texts(FORMS[name]), **answers(FORMS[name])}[script]
    assert b"".join(map(bytes, reported)).decode() == text.removesuffix(FORMS[name].end)
    assert len(reported) == len(choice["token_ids"]) - 1, "the token that ends the reply has no text"


@pytest.mark.parametrize(("name", "script"), [("hermes", "reasoned_call"), ("glm", "reasoned_call")])
def test_what_was_asked_for_beside_the_text_changes_no_text(name, script, hearing: Hearing):
    assert hearing(name, script, **REPORT).reply == hearing(name, script).reply


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ending", [{"max_tokens": 5}, {"stop": ["see"]}], ids=str)
@pytest.mark.sample(16)
def test_replies_that_are_cut_off_report_every_token_too(name, ending, hearing: Hearing):
    heard = hearing(name, "prose", **REPORT, **ending)
    (choice,) = heard.body["choices"]
    assert joined(streamed(heard, "token_ids")) == choice["token_ids"]
    assert len(choice["token_ids"]) == heard.usage["completion_tokens"]
    assert (
        choice["token_ids"]
        == hearing(name, "prose", **REPORT).body["choices"][0]["token_ids"][: len(choice["token_ids"])]
    )


@pytest.mark.thorough
def test_the_scripts_break_characters_over_tokens(hearing: Hearing):
    """So the tests of this folder see what becomes of broken ones."""
    for name, script in CASES[: 2 * len(THINKING)]:
        pieces = [bytes(entry["bytes"]) for entry in hearing(name, script, **REPORT).logprobs]
        assert any("\ufffd" in piece.decode(errors="replace") for piece in pieces)
