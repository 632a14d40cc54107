"""What one conversation says is never read in another one: prompts as the engine was given them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import TinyModel
from tests.http.test_conversations import Message, Talk, talking, text_of, user

REST = "Be brief and say what you see. " * 8


@pytest.fixture(scope="module")
def talk(tiny_model: TinyModel) -> Iterator[Talk]:
    with talking(tiny_model("qwen3", hidden=128, layers=2)) as one:
        yield one


def asked(first: str) -> list[Message]:
    return [{"role": "system", "content": f"{first}\n{REST}"}, user("Where is it?")]


LINES = {
    "date": ("Current date: 2026-11-21. Customer: {}, IBAN {}1", "Ann Smith", "Bob Jones"),
    "date behind words": ("Today's date: {} Nov 21 2026", "Ann's", "Bob's"),
    "zone": ("Time zone: {}'s own", "Ann", "Bob"),
    "clock": ("Current time is 10:00 at {}'s", "Ann", "Bob"),
}


@pytest.mark.parametrize("line", LINES)
def test_what_stands_beside_a_date_is_content(talk: Talk, line: str):
    form, ann, bob = LINES[line]
    reply, _ = talk.said(asked(form.format(ann, ann)))
    talk.ask([*asked(form.format(bob, bob)), reply, user("And now?")])
    read = text_of(talk, talk.prompts[-1])
    assert ann not in read
    assert form.format(bob, bob) in read


def test_what_stands_beside_run_statistics_is_content(talk: Talk):
    def stats(token: str) -> list[Message]:
        return [*asked("Go on.")[:1], user(f"Done.\nStats: runtime 12s host=a token={token}\nGo on.")]

    reply, _ = talk.said(stats("secret"))
    talk.ask([*stats("mine"), reply, user("And now?")])
    read = text_of(talk, talk.prompts[-1])
    assert "token=mine" in read
    assert "secret" not in read


def test_an_id_in_what_a_user_wrote_about_is_content(talk: Talk):
    def question(name: str) -> Message:
        return user(f'What is wrong here?\n```json\n{{\n  "message_id": "{name}",\n  "a": 1\n}}\n```\n')

    system = asked("Look closely.")[0]
    reply, _ = talk.said([system, question("wrong-1")])
    talk.ask([system, question("right-2"), reply, user("And now?")])
    read = text_of(talk, talk.prompts[-1])
    assert "right-2" in read
    assert "wrong-1" not in read
