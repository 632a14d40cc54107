"""A conversation's words are never read in another one: prompts as the engine was given them."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.foreign.forms import FORMS, READ, Call, Form, Request
from tests.foreign.forms import Message as AnyMessage
from tests.http.test_conversations import REPLY_TOKENS, Message, Talk, talking, text_of, user
from tests.sdk.endpoints import DIRECT, KEY, MODEL, PROXIED, Endpoint, Endpoints
from tests.serving import AS_JSON, serving
from tests.templates.traits import trait_folder
from tests.transcripts.world import CARRIER

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

REST = "Be brief and say what you see. " * 8


@dataclass
class Through(Talk):
    """A client that speaks so, at one of the endpoints. What is asked is written as for chats."""

    form: Form = FORMS["chat"]
    endpoint: Endpoint | None = None

    def ask(self, messages: Sequence[Message], **named: str) -> Any:
        assert self.endpoint
        self.endpoint.lead()
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
        asked = urllib.request.Request(self.endpoint.url + self.form.path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    def reply_to(self, messages: Sequence[Message], **named: str) -> tuple[Message, int]:
        answer = self.ask(messages, **named)
        return {"role": "assistant", "content": self.form.reply(answer).text}, self.form.computed(answer)


def _as_any_protocol(message: Message) -> AnyMessage:
    calls = tuple(Call(call["id"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return AnyMessage(message["role"], message["content"] or "", calls, message.get("tool_call_id", ""))


type Anew = Callable[[], AbstractContextManager[Talk]]
"""The same client at a server that has never heard anything."""


@pytest.fixture(scope="module", params=[DIRECT, PROXIED])
def port(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module", params=FORMS)
def anew(request: pytest.FixtureRequest, port: int, tiny_model: TinyModel, endpoints: Endpoints) -> Anew:
    @contextmanager
    def talking_through() -> Generator[Talk]:
        with serving(tiny_model("qwen3", hidden=128, layers=2), thinking=False) as server:
            yield Through(server, form=FORMS[request.param], endpoint=endpoints.of(server, port))

    return talking_through


@pytest.fixture(scope="module")
def talk(anew: Anew) -> Iterator[Talk]:
    with anew() as chat:
        yield chat


def asked(first: str) -> list[Message]:
    return [{"role": "system", "content": f"{first}\n{REST}"}, user("Where is it?")]


LINES = {
    "date": ("Current date: 2026-11-21. Customer: {}, IBAN {}1", "Ann Smith", "Bob Jones"),
    "date after words": ("Today's date: {} Nov 21 2026", "Ann's", "Bob's"),
    "zone": ("Time zone: {}'s own", "Ann", "Bob"),
    "clock": ("Current time is 10:00 at {}'s", "Ann", "Bob"),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.sample(8)
def test_what_stands_beside_a_date_is_content(talk: Talk, line: str):
    form, ann, bob = LINES[line]
    reply, _ = talk.reply_to(asked(form.format(ann, ann)))
    talk.ask([*asked(form.format(bob, bob)), reply, user("And now?")])
    read = text_of(talk, talk.prompts[-1])
    assert ann not in read
    assert form.format(bob, bob) in read


@pytest.mark.thorough
def test_what_stands_beside_run_statistics_is_content(talk: Talk):
    def stats(token: str) -> list[Message]:
        return [*asked("Go on.")[:1], user(f"Done.\nStats: runtime 12s host=a token={token}\nGo on.")]

    reply, _ = talk.reply_to(stats("secret"))
    talk.ask([*stats("mine"), reply, user("And now?")])
    read = text_of(talk, talk.prompts[-1])
    assert "token=mine" in read
    assert "secret" not in read


@pytest.mark.sample(4)
def test_an_id_in_what_a_user_wrote_about_is_content(talk: Talk):
    def question(name: str) -> Message:
        return user(f'What is wrong here?\n```json\n{{\n  "message_id": "{name}",\n  "a": 1\n}}\n```\n')

    system = asked("Look closely.")[0]
    reply, _ = talk.reply_to([system, question("wrong-1")])
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("names", NAMES)
def test_what_tells_of_one_project_is_not_read_in_another(talk: Talk, block: str, names: str):
    first, second = NAMES[names]
    words = f"{block}, {names}."
    reply, _ = talk.reply_to(about(block, "alpha-secret", words), **first)
    for asked in ([], [reply, user("Go on.")]):  # a common reply, which it was given elsewhere
        talk.ask([*about(block, "beta-own", words), *asked], **second)
        read = text_of(talk, talk.prompts[-1])
        assert "alpha" not in read
        assert "[Now: " not in read
        assert "[Changed in " not in read
        assert "beta-own" in read


LONG = "session of a user whose client writes everything that it knows into its id, " * 3
ALIKE = {
    "equal at the beginning": (f"{LONG}: a", f"{LONG}: b"),
    **{word: (word, word) for word in ("default", "undefined", "0", "null", "None", "main")},
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("ids", ALIKE)
def test_an_id_that_is_no_name_of_one_conversation_proves_nothing(talk: Talk, ids: str):
    """The second conversation begins with history, so it has never asked what the first one asked."""
    first, second = ALIKE[ids]
    words = f"Ids: {ids}."
    reply, _ = talk.reply_to(about("git status", "alpha-secret", words), session_id=first)
    talk.ask([*about("git status", "beta-own", words), reply, user("Go on.")], session_id=second)
    read = text_of(talk, talk.prompts[-1])
    assert "alpha" not in read
    assert "beta-own" in read


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_a_name_that_two_projects_have_proves_nothing(talk: Talk):
    named, words = {"session_id": "of-both"}, "Both of them."
    reply, _ = talk.reply_to(about("git status", "alpha-secret", words), **named)
    talk.reply_to(about("git status", "beta-own", words), **named)
    talk.reply_to([*about("git status", "alpha-secret", words), reply, user("Go on.")], **named)
    talk.ask([*about("git status", "gamma-new", words), reply, user("Go on.")], **named)
    read = text_of(talk, talk.prompts[-1])
    assert "alpha" not in read
    assert "beta" not in read


@pytest.mark.sample(4)
def test_what_changes_in_one_project_is_noted_after_what_was_read_before(talk: Talk):
    named, words = {"session_id": "mine"}, "One project."
    reply, before = talk.reply_to(about("git status", "alpha", words), **named)
    _, computed = talk.reply_to([*about("git status", "omega", words), reply, user("Go on.")], **named)
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
@pytest.mark.sample(8)
def test_white_space_of_a_result_is_what_the_tool_wrote(
    talk: Talk, anew: Anew, space: str, named: dict[str, Any]
):
    first, second = SPACES[space]
    talk.ask(with_result(first), **named)
    talk.ask(with_result(second), **named)
    with anew() as fresh:
        fresh.ask(with_result(second))
        assert text_of(talk, talk.prompts[-1]) == text_of(fresh, fresh.prompts[-1])


@pytest.mark.sample(4)
def test_an_edited_question_is_read_with_its_indentation(talk: Talk):
    system = asked("Indented.")[0]
    reply, _ = talk.reply_to([system, user("  if x:\n    y")], session_id="edits")
    talk.ask([system, user("    if x:\n    y"), reply, user("And now?")], session_id="edits")
    assert "    if x:\n    y" in text_of(talk, talk.prompts[-1])


@pytest.mark.sample(4)
def test_white_space_at_the_end_of_a_question_is_another_conversations(talk: Talk):
    system = asked("At the end.")[0]
    reply, _ = talk.reply_to([system, user("Where? \n\n ")])
    talk.ask([system, user("Where?"), reply, user("And now?")])
    assert "Where? \n" not in text_of(talk, talk.prompts[-1])


# ------------------------------------------------------------------------------------------- notes and clocks


@pytest.mark.sample(4)
def test_the_second_of_another_clock_is_noted(talk: Talk):
    def timed(second: int) -> list[Message]:
        clock = f"Current date: 2026-11-21 10:00:{second:02}"
        return [{"role": "system", "content": f"{clock}\nSeconds.\n{REST}"}, user("Which second?")]

    talk.ask(timed(5), session_id="fifth second")
    talk.ask(timed(50), session_id="last seconds")
    read = text_of(talk, talk.prompts[-1])
    assert "10:00:05" not in read or "[Now: Current date: 2026-11-21 10:00:50]" in read


@pytest.mark.sample(4)
def test_own_metadata_whose_lines_are_exchanged_is_noted(talk: Talk):
    def mail(first: str, second: str, words: str) -> Message:
        block = '{} (untrusted metadata):\n```json\n{{\n"name": "{}"\n}}\n```\n'
        return user(block.format("Conversation info", first) + block.format("Sender", second) + words)

    system = asked("Exchanged.")[0]
    reply, _ = talk.reply_to([system, mail("ann", "bob", "Who?")], session_id="exchanged")
    talk.ask([system, mail("bob", "ann", "Who?"), reply, user("And now?")], session_id="exchanged")
    read = text_of(talk, talk.prompts[-1])
    last = read[read.rindex("Conversation info") :]
    assert last.index("bob") < last.index("ann")


@pytest.mark.sample(5)
def test_notes_of_others_do_not_pile_up(talk: Talk):
    def dated(day: int) -> list[Message]:
        return [{"role": "system", "content": f"Today's date: 2026-11-{day}\n{REST}"}, user("Which day?")]

    for day in range(11, 16):
        talk.ask(dated(day))
    _, computed = talk.reply_to(dated(16))
    read = text_of(talk, talk.prompts[-1])
    assert read.count("[Now: ") == 1
    assert [day for day in range(11, 17) if f"2026-11-{day}" in read] == [11, 16]
    assert computed < talk.length(REST)


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_clocks_that_have_moved_are_read_where_they_stand(talk: Talk):
    first = "Current date: 2026-11-21\nTime zone: UTC\n"
    second = "Time zone: UTC\nCurrent date: 2026-11-21\n"
    talk.ask([{"role": "system", "content": first + REST}, user("When?")], session_id="moves")
    talk.ask([{"role": "system", "content": second + REST}, user("When?")], session_id="moves")
    assert second in text_of(talk, talk.prompts[-1])


# ------------------------------------------------------------------------------- reasoning, and who is deeper

ONE = {**READ, "properties": {"path": {"enum": ["a"]}}}
CALL = {
    "tools": [{"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": ONE}}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
THINKS = {"enable_thinking": True, "thinking_budget": 12, "max_tokens": 200, **CALL}
"""Any reasoning, and the same call: a template shows reasoning as long as nothing new is asked."""


@pytest.fixture(scope="module")
def thinker(tiny_model: TinyModel) -> Iterator[Talk]:
    with talking(tiny_model("qwen3", hidden=128, layers=2)) as chat:
        yield chat


def with_call(talk: Talk, messages: Sequence[Message], **more: Any) -> tuple[Message, str]:
    """The reply as a client keeps it that leaves reasoning out, and its reasoning."""
    message = talk.ask(messages, **THINKS, **more)["choices"][0]["message"]
    kept = {name: message.get(name) for name in ("role", "content", "tool_calls")}
    return kept, message["reasoning_content"].strip()


def done(reply: Message, **changes: str) -> list[Message]:
    """The reply and the result of its call."""
    (call,) = reply["tool_calls"]
    call = {**call, **changes}
    return [{**reply, "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "x"}]


def arguments_of(reply: Message) -> Any:
    return json.loads(reply["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.sample(6)
def test_reasoning_is_read_in_its_own_conversation_alone(thinker: Talk, names: str):
    first, second = NAMES[names]
    words = f"Reasoning of {names}."
    alpha, beta = (about("git status", secret, words) for secret in ("alpha-secret", "beta-own"))
    (reply_a, reasoning_a), (reply_b, reasoning_b) = (
        with_call(thinker, alpha, **first), with_call(thinker, beta, **second)
    )  # fmt: skip
    assert reasoning_a != reasoning_b
    assert arguments_of(reply_a) == arguments_of(reply_b)
    reads: list[str] = []
    for asked in (
        [*alpha, *done(reply_a)],
        [*beta, *done(reply_b)],
        [*beta, *done(reply_b, id="c1")],
        [*about("git status", "gamma-new", words), *done(reply_b, id="c1")],
    ):
        thinker.ask(asked, **THINKS, **second if asked[0] != alpha[0] else first)
        reads.append(text_of(thinker, thinker.prompts[-1]))
    held = [(reasoning_a in read, reasoning_b in read, "alpha" in read) for read in reads]
    assert held[:2] == [(True, False, True), (False, True, False)]
    assert held[2:] == [(False, held[2][1], False), (False, held[3][1], False)]
    assert not (held[3][1] and "session_id" not in second), "an own value that changed, without a proof"


@pytest.fixture(scope="module", params=["note", "exact"])
def thinkers(request: pytest.FixtureRequest, folder: Path) -> Iterator[Talk]:
    with talking(folder, drift=request.param) as chat:
        yield chat


@pytest.mark.thorough
@pytest.mark.parametrize("names", ["no names", "one bucket", "one name"])
def test_reasoning_behind_a_carrier_is_read_in_its_own_conversation_alone(thinkers: Talk, names: str):
    """Both chats ask the same and get the same call. What they received beside it is not sent again."""
    named = {"session_id": "of both"} if names == "one name" else NAMES[names][0]
    chat = [{"role": "system", "content": f"Carriers, {names}.\n{REST}"}, user("hello")]
    (reply_a, reasoning_a), (reply_b, reasoning_b) = (
        with_call(thinkers, [*chat, user(CARRIER.format(secret))], **named)
        for secret in ("alpha " * 40, "Of beta, 17 more. " * 30)
    )
    assert reasoning_a != reasoning_b
    assert arguments_of(reply_a) == arguments_of(reply_b)
    reads: list[str] = []
    for reply, changed in ((reply_a, {}), (reply_b, {}), (reply_a, {"id": "c1"}), (reply_b, {"id": "c1"})):
        thinkers.ask([*chat, *done(reply, **changed)], **THINKS, **named)
        reads.append(text_of(thinkers, thinkers.prompts[-1]))
    held = [(reasoning_a in read, reasoning_b in read) for read in reads]
    assert held == [(True, False), (False, True), (False, False), (False, False)]


def test_a_conversation_that_is_ahead_is_not_gone_on_from(thinker: Talk):
    """Two with the same words and replies, one of which has asked its next question."""
    say_ok = {"type": "json_schema", "json_schema": {"name": "ok", "schema": {"enum": ["all is well"]}}}
    more: dict[str, Any] = {"enable_thinking": False, "response_format": say_ok}

    def talk_of(name: str, day: int) -> list[Message]:
        system = {"role": "system", "content": f"Current date: 2026-11-{day}\nAhead.\n{REST}"}
        return [system, user(INFO.format(f"{name}-1"))]

    for name, day in (("ann", 11), ("bob", 12)):
        reply, _ = thinker.reply_to(talk_of(name, day), session_id=name, **more)
        assert reply["content"].strip() == '"all is well"'
    asked = {name: [*talk_of(name, day), reply, user("And now?")] for name, day in (("ann", 21), ("bob", 22))}
    days = {"ann": {"11", "21"}, "bob": {"12", "22"}}
    for name, other in (("ann", "bob"), ("bob", "ann")):
        thinker.ask(asked[name], session_id=name, **more)
        read = text_of(thinker, thinker.prompts[-1])
        assert f"{name}-1" in read
        assert f"{other}-1" not in read
        dates = re.findall(r"\[Now: Current date: 2026-11-(\d\d)\]", read)
        assert set(dates) <= days[name]
        assert dates[-1] == max(days[name])


# ------------------------------------------------------------------------------------------------ what proves


def responding(talk: Talk, secret: str, items: Sequence[Message], **more: Any) -> Any:
    first, asked = about("git status", secret, "A greedy conversation without a name.")
    items = items if "previous_response_id" in more else [asked, *items]
    body = {"instructions": first["content"], "input": items, "max_output_tokens": REPLY_TOKENS, **more}
    return talk.server.post("/v1/responses", {"temperature": 0, **body})


def items_as_they_came(response: Any) -> dict[str, Any]:
    return {"items": [*response["output"], user("Go on.")]}


def only_text(response: Any) -> dict[str, Any]:
    (item,) = response["output"]
    text = item["content"][0]["text"]
    return {"items": [{"role": "assistant", "content": text}, user("Go on.")]}


def after_it(response: Any) -> dict[str, Any]:
    return {"items": [user("Go on.")], "previous_response_id": response["id"]}


@pytest.mark.parametrize(
    ("goes_on", "is_proof"), [(items_as_they_came, True), (after_it, True), (only_text, False)]
)
def test_who_shows_a_name_that_this_server_made_goes_on(
    thinker: Talk, goes_on: Callable[[Any], dict[str, Any]], is_proof: bool
):
    name = goes_on.__name__
    response = responding(thinker, f"alpha-{name}", [], enable_thinking=False)
    responding(thinker, f"omega-{name}", **goes_on(response), enable_thinking=False)
    read = text_of(thinker, thinker.prompts[-1])
    assert f"omega-{name}" in read
    assert (f"alpha-{name}" in read) == is_proof


@pytest.mark.thorough
@pytest.mark.parametrize("edited", [True, False])
@pytest.mark.parametrize("as_summary", [True, False], ids=["summary", "content"])
def test_reasoning_that_a_client_edits_beside_its_seal_is_read_as_edited(
    thinker: Talk, edited: bool, as_summary: bool
):
    words = "What clients edit."
    function = {"type": "function", "name": "read", "parameters": ONE}
    more: dict[str, Any] = {
        "tools": [function],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "thinking_budget": 12,
        "max_output_tokens": 200,
        "enable_thinking": True,
        **({"reasoning": {"summary": "auto"}} if as_summary else {}),
    }
    asked = (responding(thinker, words, [], temperature=1, seed=seed, **more) for seed in range(20))
    items = next(response["output"] for response in asked if response["output"][0]["type"] == "reasoning")
    thought, *_, call = items
    (part,) = thought["summary"] if as_summary else thought["content"]
    was = part["text"].strip()
    assert was
    if edited:
        part["text"] = "my own words"
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
    responding(thinker, words, [*items, result], **more)
    read = text_of(thinker, thinker.prompts[-1])
    assert ("my own words" in read, was in read) == (edited, not edited)


def messaging(talk: Talk, secret: str, messages: Sequence[Message]) -> Any:
    first, asked = about("git status", secret, "Greedy reasoning.")
    body = {
        "system": first["content"],
        "messages": [asked, *messages],
        "max_tokens": 200,
        "tools": [{"name": "read", "input_schema": ONE}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "thinking_budget": 12,
    }
    return talk.server.post("/v1/messages", {"temperature": 0, **body})


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("is_proof", [True, False])
def test_who_shows_a_signature_of_this_server_goes_on(thinker: Talk, is_proof: bool):
    """The client makes up an id for the call, and leaves the signed reasoning out where it proves nothing."""
    blocks = messaging(thinker, f"alpha-{is_proof}", [])["content"]
    assert [block["type"] for block in blocks] == ["thinking", "tool_use"]
    blocks[-1]["id"] = "c1"
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
    reply = {"role": "assistant", "content": blocks if is_proof else blocks[-1:]}
    messaging(thinker, f"omega-{is_proof}", [reply, {"role": "user", "content": [result]}])
    read = text_of(thinker, thinker.prompts[-1])
    assert f"omega-{is_proof}" in read
    assert (f"alpha-{is_proof}" in read) == is_proof


# ---------------------------------------------------------------------------------------------------- exactly


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("qwen3", hidden=128, layers=2)


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[Talk]:
    with talking(folder, drift="exact") as chat:
        yield chat


INFO = 'Conversation info (untrusted metadata):\n```json\n{{\n  "message_id": "{}"\n}}\n```\nWhere is it?'


@pytest.mark.sample(4)
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
    reply, _ = exact.reply_to([system, user(first)], **named)
    exact.ask([system, user(second), reply, user("And now?")], **named)
    read = text_of(exact, exact.prompts[-1])
    with talking(folder, drift="exact") as fresh:
        fresh.ask([system, user(second), reply, user("And now?")])
        assert read == text_of(fresh, fresh.prompts[-1])


# --------------------------------------------------------------------------------------- options of templates

WRITES_THOUGHTS = "Write your thoughts"


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    with talking(trait_folder("option_without_tools", tmp_path_factory.mktemp("options"))) as chat:
        yield chat


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.sample(3)
def test_an_option_that_acts_without_tools_alone_acts_on_the_second_question_too(
    granite: Talk, form: str, first: bool
):
    """The same question with the option on and off: each is read as its own request says."""
    place = {"chat": "messages", "messages": "messages", "responses": "input"}[form]
    limit = "max_output_tokens" if form == "responses" else "max_tokens"
    for is_on in (first, not first):
        body = {
            place: [user(f"Do you think? {form} {first}")],
            limit: 4,
            "temperature": 0,
            "enable_thinking": is_on,
        }
        granite.server.post(FORMS[form].path, body)
        assert (WRITES_THOUGHTS in text_of(granite, granite.prompts[-1])) == is_on
