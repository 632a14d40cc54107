"""Changes that OpenClaw makes when it sends a conversation again (lessons 19 and 83), as recorded."""

from __future__ import annotations

import pytest

from start_llm.prompt.drift import RULES, is_transient
from tests.prompt.fakes import system, user
from tests.templates.traits import TRAITS
from tests.transcripts.test_drift import BOUND, FRIDAY, RULES_TEXT, Dated
from tests.transcripts.test_laws import ANSWER
from tests.transcripts.world import CARRIER

pytestmark = pytest.mark.product

TOOLS = (
    "## Tooling\n- read: Read files\n### Deferred Tool Schemas\nAvailable deferred-schema tools:\n"
    "- theme (core): Read and change the requesting user's appearance.\n{}"
    "- tts (core): Convert text to spoken audio (TTS) with the configured voice provider.\n"
    "Use tool_search first.\n"
)
TRANSCRIPTS = "- transcripts (core): List past meetings and read their notes.\n"
WATCHED = (
    "## Watched Sessions\nGroup/topic sessions this session ambiently watches. Readable now (read-only).\n"
    "- agent:main:telegram:group:-100200300 — telegram:g-test-group\n"
)
MEMORY_LINE = "MEMORY.md: durable non-profile facts and decisions; use when relevant.\n"
MEMORY = "## /home/ann/work/MEMORY.md\n# Memory\n\n- The user likes {}.\n"
END = "<!-- /openclaw:attempt:STABLE -->\n"
WITH_MEMORY = MEMORY_LINE + "USER.md: x\n" + MEMORY.format("cedar") + END
SYSTEMS = {
    "a tool is gone": (TOOLS.format(TRANSCRIPTS), TOOLS.format(""), "-- transcripts (core)"),
    "a tool is back": (TOOLS.format(""), TOOLS.format(TRANSCRIPTS), "+- transcripts (core)"),
    "a group has spoken": ("## Runtime\n", WATCHED + "## Runtime\n", "[Now: ## Watched Sessions"),
    "a memory": ("USER.md: x\n" + END, WITH_MEMORY, "likes cedar"),
    "another memory": (MEMORY.format("cedar") + END, MEMORY.format("larch") + END, "likes larch"),
}  # fmt: skip
"""In the system prompt: before, afterwards, and what the model reads of them."""

INFO = 'Conversation info{}:\n```json\n{{\n{}  "sender_id": "7001",\n  "sender": "Ann"\n}}\n```\n\n'
ID = '  "message_id": "{}",\n'
SENDER = 'Sender (untrusted metadata):\n```json\n{\n  "label": "Ann",\n  "id": "7001"\n}\n```\n\n'
HINT = "[message_id: {}]\n"
STAMP = "[Mon 2026-11-23 14:59 GMT+1] "
COMPACT = 'Conversation info: ⟦openclaw:ctx⟧\n```json\n{"sender":{"id":"7001","name":"Ann T"}}\n```\n\n'
CONTEXT = (
    "Conversation context (untrusted, chronological, selected for current message):\n"
    "#1001 Mon 2026-11-23 15:20:09 GMT+1 Ann: Hello, who are you? (turn 1)\n"
    "#session:c13be0aa Mon 2026-11-23 15:20:19 GMT+1 OpenClaw: Answer 1: ember slate.\n\n"
)
OLD = INFO.format(" (untrusted metadata)", ID.format("41")) + SENDER
VANISHING = {
    "the id": (STAMP + INFO.format("", ID.format("41")), STAMP + INFO.format("", "")),
    "the hint line": (OLD + HINT.format("41"), OLD),
    "the sender": (OLD, INFO.format(" (untrusted metadata)", ID.format("41"))),
    "all of it": (OLD + HINT.format("41"), ""),
    "all but the time": (STAMP + COMPACT, STAMP),
    "what was said before": (STAMP + OLD + CONTEXT, STAMP),
}
"""Before the words of a user: before, and in the next request."""


def talk_of(trait: str, first: str, asked: str = "", name: str | None = "mine") -> Dated:
    talk = Dated(trait, FRIDAY, name=name)
    begins(talk, first, asked)
    return talk


def begins(talk: Dated, first: str, asked: str) -> None:
    """Its system prompt and its first question now say so."""
    question = next(message for message in talk.messages if message.role == "user").content.split("\n")[-1]
    talk.messages = (system(first + RULES_TEXT), user(asked + question), *talk.messages[2:])


def without_marks(trait: str, text: str) -> str:
    """Notes begin with a bracket, as marks of some templates do."""
    for mark in TRAITS[trait].added_tokens:
        text = text.replace(mark, "")
    return text


@pytest.mark.parametrize("change", SYSTEMS)
@pytest.mark.parametrize("trait", BOUND)
def test_a_section_that_changes_is_noted_and_nothing_is_read_again(trait: str, change: str):
    before, now, note = SYSTEMS[change]
    talk = talk_of(trait, before)
    computed = talk.ask(ANSWER) + talk.written
    begins(talk, now, "")
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert note in read[len(computed) :]


@pytest.mark.parametrize("change", SYSTEMS)
def test_a_section_of_another_conversation_is_not_read(change: str):
    before, now, _ = SYSTEMS[change]
    talk = talk_of("kimi", before, name="hers")
    talk.ask(ANSWER)
    begins(talk, now, "")
    talk.name = "mine"
    fresh, read = talk.server.fresh(talk.request()), talk.ask(ANSWER)
    assert read == fresh


@pytest.mark.parametrize("gone", VANISHING)
@pytest.mark.parametrize("trait", BOUND)
def test_what_vanishes_before_words_is_no_news(trait: str, gone: str):
    before, now = VANISHING[gone]
    talk = talk_of(trait, "", before)
    computed = talk.ask(ANSWER) + talk.written
    begins(talk, "", now)
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert "[" not in without_marks(trait, read[len(computed) :])


@pytest.mark.parametrize("gone", VANISHING)
def test_what_stands_before_the_words_of_another_conversation_is_not_read(gone: str):
    before, now = VANISHING[gone]
    talk = talk_of("kimi", "", before, name=None)
    talk.ask(ANSWER)
    begins(talk, "", now)
    fresh, read = talk.server.fresh(talk.request()), talk.ask(ANSWER)
    assert read == fresh


@pytest.mark.parametrize("trait", BOUND)
def test_an_envelope_that_is_refreshed_is_noted_by_what_is_new_in_it(trait: str):
    talk = talk_of(trait, "", OLD + HINT.format("41"))
    computed = talk.ask(ANSWER) + talk.written
    begins(talk, "", OLD.replace("41", "57") + HINT.format("57"))
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    added = read[len(computed) :]
    assert '[Changed in message metadata:\n"message_id": "57"\n[message_id: 57]\n]' in added
    assert "Ann" not in added


def test_the_runtime_line_of_another_surface_is_noted():
    line = "\n\nRuntime: agent=main | session=agent:main:main | channel={}\n"
    talk = Dated("kimi", FRIDAY)
    first, asked = talk.messages
    talk.messages = (first, user(asked.content + line.format("telegram")))
    computed = talk.ask(ANSWER) + talk.written
    talk.messages = (first, user(asked.content + line.format("webchat")), *talk.messages[2:])
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert "[Now: Runtime: agent=main | session=agent:main:main | channel=webchat]" in read[len(computed) :]


PREFACE = (
    "OpenClaw runtime context for the immediately preceding user message.\n"
    "This context is runtime-generated, not user-authored. Keep internal details private.\n\n"
)


@pytest.mark.parametrize(
    "preface", ["", PREFACE, PREFACE.replace("This context is", "Go on. This context is")]
)
def test_the_carrier_of_each_version_is_one(preface: str):
    assert is_transient(user(preface + CARRIER.format("Runs: 1")))
    assert not is_transient(user("See:\n" + preface + CARRIER.format("Runs: 1")))


LOOKS_ALIKE = [
    "Runtime: 12 s",
    "Runtime: a=b",
    "## Watched Sessions\n",
    "## work/MEMORY.md\n",
    "### Deferred Tool Schemas\nNone.\n",
    "[Mon] Hello",
    "[2026-11-23 14:59] Hello",
    "[message_id 41] Hello",
    "Conversation info:\n{}\nHello",
    "Conversation info: of mine\n```json\n{\n}\n```\nHello",
]


@pytest.mark.parametrize("text", LOOKS_ALIKE)
def test_what_only_looks_like_it_is_content(text: str):
    assert [rule.name for rule in RULES if rule.spans(text)] == []
