"""What one conversation says is never read in another one: prompts as the engine was given them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.foreign.forms import FORMS, Call, Form, Request
from tests.foreign.forms import Message as AnyMessage
from tests.http.test_conversations import REPLY_TOKENS, Message, Talk, talking, text_of, user
from tests.sdk.doors import DIRECT, KEY, MODEL, PROXIED, Door, Doors
from tests.serving import AS_JSON, serving

REST = "Be brief and say what you see. " * 8


@dataclass
class Through(Talk):
    """A client that speaks so, at one of the doors. What is asked is written as for chats."""

    form: Form = FORMS["chat"]
    door: Door | None = None

    def ask(self, messages: Sequence[Message], **named: str) -> Any:
        assert self.door
        self.door.lead()
        first, *others = messages
        request = Request(
            system=first["content"],
            messages=[*map(_as_any_protocol, others)],
            length=REPLY_TOKENS,
            temperature=0,
            calls=False,
            named=named,
        )
        body = {"model": MODEL, **self.form.body(request)}
        headers = {**AS_JSON, "Authorization": f"Bearer {KEY}"}
        asked = urllib.request.Request(self.door.url + self.form.path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def said(self, messages: Sequence[Message], **named: str) -> tuple[Message, int]:
        answer = self.ask(messages, **named)
        return {"role": "assistant", "content": self.form.reply(answer).text}, self.form.computed(answer)


def _as_any_protocol(message: Message) -> AnyMessage:
    calls = tuple(Call(one["id"], one["function"]["arguments"]) for one in message.get("tool_calls", ()))
    return AnyMessage(message["role"], message["content"] or "", calls, message.get("tool_call_id", ""))


type Anew = Callable[[], AbstractContextManager[Talk]]
"""The same client at a server that has never heard anything."""


@pytest.fixture(scope="module", params=[DIRECT, PROXIED])
def port(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=FORMS)
def anew(request: pytest.FixtureRequest, port: int, tiny_model: TinyModel, doors: Doors) -> Anew:
    @contextmanager
    def talking_through() -> Generator[Talk]:
        with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as server:
            yield Through(server, form=FORMS[request.param], door=doors.of(server, port))

    return talking_through


@pytest.fixture(scope="module")
def talk(anew: Anew) -> Iterator[Talk]:
    with anew() as one:
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


# ------------------------------------------------------------------------------------ of one project or chat

BLOCKS = {
    "git status": ("system", "gitStatus: {}\n\nRecent commits:\n1a2b3c {}\n\n"),
    "inbound context": (
        "system",
        '## Inbound Context (trusted metadata)\nOf {}.\n```json\n{{"a": "{}"}}\n```\n',
    ),
    "instructions": (
        "user",
        (
            "<system-reminder>\nUse this.\n# claudeMd\nThe key of {} is {}.\n\n"
            "      IMPORTANT: this context may or may not be relevant.\n</system-reminder>\n\n"
        ),
    ),
}
NAMES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "two names": ({"session_id": "a"}, {"session_id": "b"}),
    "no names": ({}, {}),
    "one has a name": ({"session_id": "c"}, {}),
    "one bucket": ({"prompt_cache_key": "app"}, {"prompt_cache_key": "app"}),
}


def about(block: str, secret: str, words: str) -> list[Message]:
    role, form = BLOCKS[block]
    text = form.format(secret, secret)
    system = {"role": "system", "content": (text if role == "system" else "") + f"{words}\n{REST}"}
    return [system, user((text if role == "user" else "") + "hello")]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("names", NAMES)
def test_what_tells_of_one_project_is_not_read_in_another(talk: Talk, block: str, names: str):
    first, second = NAMES[names]
    words = f"{block}, {names}."
    reply, _ = talk.said(about(block, "alpha-secret", words), **first)
    for asked in ([], [reply, user("Go on.")]):  # a common reply, which it was given elsewhere
        talk.ask([*about(block, "beta-own", words), *asked], **second)
        read = text_of(talk, talk.prompts[-1])
        assert "alpha" not in read
        assert "[Now: " not in read
        assert "[Changed in " not in read
        assert "beta-own" in read


def test_a_name_that_two_projects_have_proves_nothing(talk: Talk):
    named, words = {"session_id": "default"}, "Both of them."
    reply, _ = talk.said(about("git status", "alpha-secret", words), **named)
    talk.said(about("git status", "beta-own", words), **named)
    talk.said([*about("git status", "alpha-secret", words), reply, user("Go on.")], **named)
    talk.ask([*about("git status", "gamma-new", words), reply, user("Go on.")], **named)
    read = text_of(talk, talk.prompts[-1])
    assert "alpha" not in read
    assert "beta" not in read


def test_what_changes_in_one_project_is_told_behind_what_was_read_before(talk: Talk):
    named, words = {"session_id": "mine"}, "One project."
    reply, before = talk.said(about("git status", "alpha", words), **named)
    _, computed = talk.said([*about("git status", "omega", words), reply, user("Go on.")], **named)
    read = text_of(talk, talk.prompts[-1])
    assert read.index("alpha") < read.index("[Now: gitStatus: omega")
    assert computed < before / 2


# ----------------------------------------------------------------------------------------------- white space


def with_result(text: str) -> list[Message]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    asked = [{"role": "system", "content": f"Files.\n{REST}"}, user("Read it.")]
    return [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": text},
    ]


SPACES = {
    "indentation": ("    return x", "        return x"),
    "trailing lines": ("return x\n\n\n", "return x"),
    "no-break space": ("return x\u00a0", "return x "),
    "line separator": ("return x\u2028", "return x\n"),
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("named", [{}, {"session_id": "files"}], ids=["no name", "one name"])
def test_white_space_of_a_result_is_what_the_tool_wrote(
    talk: Talk, anew: Anew, space: str, named: dict[str, Any]
):
    first, second = SPACES[space]
    talk.ask(with_result(first), **named)
    talk.ask(with_result(second), **named)
    with anew() as fresh:
        fresh.ask(with_result(second))
        assert text_of(talk, talk.prompts[-1]) == text_of(fresh, fresh.prompts[-1])


def test_an_edited_question_is_read_with_its_indentation(talk: Talk):
    system = asked("Indented.")[0]
    reply, _ = talk.said([system, user("  if x:\n    y")], session_id="edits")
    talk.ask([system, user("    if x:\n    y"), reply, user("And now?")], session_id="edits")
    assert "    if x:\n    y" in text_of(talk, talk.prompts[-1])


def test_white_space_at_the_end_of_a_question_is_another_conversations(talk: Talk):
    system = asked("At the end.")[0]
    reply, _ = talk.said([system, user("Where? \n\n ")])
    talk.ask([system, user("Where?"), reply, user("And now?")])
    assert "Where? \n" not in text_of(talk, talk.prompts[-1])


# ------------------------------------------------------------------------------------------- notes and clocks


def test_notes_of_others_do_not_pile_up(talk: Talk):
    def dated(day: int) -> list[Message]:
        return [{"role": "system", "content": f"Today's date: 2026-11-{day}\n{REST}"}, user("Which day?")]

    for day in range(11, 16):
        talk.ask(dated(day))
    _, computed = talk.said(dated(16))
    read = text_of(talk, talk.prompts[-1])
    assert read.count("[Now: ") == 1
    assert [day for day in range(11, 17) if f"2026-11-{day}" in read] == [11, 16]
    assert computed < talk.length(REST)


def test_clocks_that_have_moved_are_read_where_they_stand(talk: Talk):
    first = "Current date: 2026-11-21\nTime zone: UTC\n"
    second = "Time zone: UTC\nCurrent date: 2026-11-21\n"
    talk.ask([{"role": "system", "content": first + REST}, user("When?")], session_id="moves")
    talk.ask([{"role": "system", "content": second + REST}, user("When?")], session_id="moves")
    assert second in text_of(talk, talk.prompts[-1])


# ---------------------------------------------------------------------------------------------------- exactly


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Talk]:
    with talking(folder, drift="exact") as one:
        yield one


INFO = 'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\nWhere is it?'


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INFO.format("one-1"), INFO.format("two-2")),
        ("Where? \n ", "Where?"),
        ("Current time is 10:00\nSo?", "So?"),
    ],
    ids=["own line", "white space", "clock"],
)
def test_where_nothing_may_differ_nothing_that_differs_is_read(
    exact: Talk, folder: Path, first: str, second: str
):
    named, system = {"session_id": "exact"}, asked("Exactly.")[0]
    reply, _ = exact.said([system, user(first)], **named)
    exact.ask([system, user(second), reply, user("And now?")], **named)
    read = text_of(exact, exact.prompts[-1])
    with talking(folder, drift="exact") as fresh:
        fresh.ask([system, user(second), reply, user("And now?")])
        assert read == text_of(fresh, fresh.prompts[-1])
