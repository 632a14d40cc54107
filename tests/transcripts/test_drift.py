"""What says how things are now changes under a conversation: it is not read again, and the model is told."""

from __future__ import annotations

from datetime import timedelta

import pytest

from start_llm.core.canonical import LiveField, LiveValue
from start_llm.core.chat import Message
from start_llm.prompt.canonical import live_values
from start_llm.transcripts.drift import Change, changes, note, pays, values_of
from tests.prompt.fakes import NOON, call, reply, result, system, user
from tests.templates.traits import TRAITS
from tests.transcripts.notes import known
from tests.transcripts.test_laws import ANSWER, Talk
from tests.transcripts.world import BLOCK, BLOCK_FORM, CARRIER, DATE, MOVING, Server, day, words

FRIDAY, SATURDAY = DATE.format(day("d1x")), DATE.format(day("d2x"))
RULES_TEXT = "v90x " + "Be brief and say what you see. " * 20
WORDS = "plain"
"""Its questions end with no token, so that nothing can stand behind their texts."""
BOUND = [trait for trait in TRAITS if trait not in (MOVING, WORDS)]
GIT = """gitStatus: This is the git status at the start of the conversation.

Current branch: {0}

Status:
 M {0}.py

Recent commits:
0000000 {0}

"""

GIT_FORM = r"gitStatus: [^\n]*\n(?:(?!Recent commits:)[^\n]*\n)*Recent commits:\n[0-9a-f]{7} \w*"


class Dated(Talk):
    """A talk whose first message says how things are."""

    def __init__(self, trait: str, now: str, server: Server | None = None) -> None:
        super().__init__(trait, server=server)
        self.say(now)

    def say(self, now: str) -> None:
        self.messages = (system(now + RULES_TEXT), *self.messages[1:])


# ------------------------------------------------------------------------------------------------ live lines


@pytest.mark.parametrize("trait", BOUND)
def test_a_new_date_is_told_and_nothing_is_read_again(trait):
    talk = Dated(trait, FRIDAY)
    first = talk.ask(ANSWER)
    computed = first + talk.written
    talk.say(SATURDAY)
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert words(read, "d") == ["d1x", "d2x"]
    assert read.count(f"[Now: Today's date: {day('d2x')}]") == 1


@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_was_told_is_not_told_again(trait):
    talk = Dated(trait, FRIDAY)
    talk.ask(ANSWER)
    talk.say(SATURDAY)
    talk.ask(ANSWER)
    assert words(talk.ask(ANSWER), "d") == ["d1x", "d2x"]


@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_comes_back_is_told_once_more(trait):
    talk = Dated(trait, FRIDAY)
    for now in (FRIDAY, SATURDAY, FRIDAY):
        talk.say(now)
        read = talk.ask(ANSWER)
    assert words(read, "d") == ["d1x", "d2x", "d1x"]


@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_is_gone_is_told_to_hold_no_longer(trait):
    talk = Dated(trait, FRIDAY)
    talk.ask(ANSWER)
    talk.say("")
    read = talk.ask(ANSWER)
    assert "[No longer: today's date]" in read[read.index(day("d1x")) :]


@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_was_not_there_is_told(trait):
    talk = Dated(trait, "")
    talk.ask(ANSWER)
    talk.say(FRIDAY)
    assert words(talk.ask(ANSWER), "d") == ["d1x"]


@pytest.mark.parametrize("trait", BOUND)
def test_a_retry_with_another_clock_goes_on_behind_the_question(trait):
    """Nothing was answered yet: the note stands behind the text of the same question."""
    talk = Dated(trait, FRIDAY)
    request = talk.request()
    talk.ask(ANSWER)
    talk.messages = request.messages
    talk.say(SATURDAY)
    read = talk.ask(ANSWER)
    assert words(read, "vd")[:3] == ["d1x", "v90x", "v91x"]
    assert read.index(f"[Now: Today's date: {day('d2x')}]") > read.index("v91x")


@pytest.mark.parametrize("trait", BOUND)
def test_a_note_stands_behind_the_result_and_in_front_of_a_carrier(trait):
    talk = Dated(trait, FRIDAY)
    talk.ask(ANSWER)
    if trait != "dates":
        talk.messages = (
            *talk.messages[:-1],
            user("v5x"),
            reply("", call("c1", path="v6x")),
            result("v7x", "c1"),
        )
    else:
        talk.messages = (*talk.messages[:-1], user("v7x"))
    talk.say(SATURDAY)
    talk.messages = (*talk.messages, user(CARRIER.format("c9x")))
    read = talk.ask(ANSWER)
    assert read.index("v7x") < read.index(day("d2x")) < read.index("c9x")


def test_where_no_note_can_stand_everything_is_as_it_would_be_afresh():
    talk = Dated(WORDS, FRIDAY)
    talk.ask(ANSWER)
    talk.say(SATURDAY)
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


def test_seconds_are_no_news():
    def said(clock: str) -> LiveValue:
        ((value,),) = live_values([system(f"Current time is {clock}\nBe brief.")])
        return value

    assert said("10:00:31") == said("10:00:59") != said("10:01:00")


def test_seconds_in_a_block_stay_as_they_are():
    """Its lines are named as they stand in the prompt."""
    ((value,),) = live_values([system("You help.\n" + GIT.format("at 10:00:31"))])
    assert "0000000 at 10:00:31" in value.text


FORMS = {
    "opencode": ("today's date", "Today's date: Sat Nov 21 2026", "<env>\n  {}\n</env>"),
    "pi": ("current date", "Current date: 2026-11-21", "{}"),
    "openclaw": ("current date", "Current date: 2026-11-21", "## Temporal Context\n{}\nAsk the tool."),
    "zone": ("time zone", "Time zone: Europe/Vienna", "## Temporal Context\n{}\nAsk the tool."),
    "clock": ("current time", "Current time is 10:00 in Europe/Vienna.", "{}\nAnd so on."),
    "git": ("git status", GIT.format("main").strip(), "{}"),
    "inbound": ("inbound context", BLOCK.format("a").strip(), "{}\n# Project Context"),
    "heading": ("inbound context", f"## Group Chat Context\n{BLOCK.format('a')}".strip(), "{}\nNo more."),
}


@pytest.mark.parametrize("client", FORMS)
def test_what_clients_say_of_now_is_found(client):
    name, told, around = FORMS[client]
    ((found,),) = live_values([system("You help.\n" + around.format(told))])
    assert (found.field.name, found.text) == (name, told)


def test_statistics_of_a_run_are_found_in_a_question():
    ((found,),) = live_values([user("Done.\nStats: runtime 12s • tokens 3k")])
    assert (found.field.name, found.text) == ("run statistics", "Stats: runtime 12s")


@pytest.mark.parametrize(
    "message",
    [
        result("Today's date: never\nStats: runtime 1s", "c1"),
        reply("Current time is 10:00"),
        user("Today's date: never"),
        user("Time zone: UTC\nGo."),
        system("It said: Today's date: never"),
        user("<system-reminder>\n# somebody's heading\nToday's date: never\n</system-reminder>"),
        system("Current date: 2026-11-21"),
    ],
    ids=["a result", "a reply", "a question", "a zone", "in a sentence", "a reminder", "all of a message"],
)
def test_the_same_words_elsewhere_are_content(message: Message):
    assert live_values([message]) == [()]


# ------------------------------------------------------------------------------------- blocks of one project


BLOCKS = [pytest.param(BLOCK, id="inbound"), pytest.param(GIT, id="git")]


def block(name: str) -> str:
    return BLOCK.format(name)


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize("form", BLOCKS)
def test_a_block_that_changes_within_its_chat_is_told(trait, form):
    talk = Dated(trait, form.format("k1x"))
    talk.ask(ANSWER)
    talk.say(form.format("k2x"))
    read = talk.ask(ANSWER)
    assert "k1x" in words(read, "k")
    assert words(read, "k")[-1] == "k2x"
    assert read.index("[Changed in ") < read.rindex("k2x")


SEQUENCES = {
    "there and back": ["k1x", "k2x", "k1x"],
    "gone and back": ["k1x", None, "k1x"],
    "gone and another": ["k1x", None, "k2x", "k1x"],
    "once more": ["k1x", "k2x", "k2x", "k3x"],
    "late": [None, "k1x", "k2x"],
}


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize("form", [pytest.param(0, id="inbound"), pytest.param(1, id="git")])
@pytest.mark.parametrize("names", SEQUENCES.values(), ids=SEQUENCES)
def test_whoever_reads_the_prompt_in_order_knows_the_block(trait, form, names):
    text, name = ((BLOCK, "inbound context"), (GIT, "git status"))[form]
    talk = Dated(trait, "")
    for told in names:
        now = text.format(told) if told else ""
        talk.say(now)
        read = talk.ask(ANSWER)
        assert known(read, name, (BLOCK_FORM, GIT_FORM)[form]) == (now.strip() or None)
    assert talk.server.transcripts.metrics.bound >= len(names) - 1


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize("form", BLOCKS)
def test_nobody_reads_the_block_of_another_chat(trait, form):
    """Two with the same words, and the same replies to them."""
    first = Dated(trait, form.format("k1x"))
    second = Dated(trait, form.format("k2x"), first.server)
    for _ in range(3):
        assert set(words(first.ask(ANSWER), "k")) == {"k1x"}
        assert set(words(second.ask(ANSWER), "k")) == {"k2x"}


@pytest.mark.parametrize("trait", BOUND)
def test_a_block_that_changes_where_two_chats_got_the_same_reply_is_read_afresh(trait):
    """Nobody can tell whose the reply is."""
    first = Dated(trait, block("k1x"))
    second = Dated(trait, block("k2x"), first.server)
    first.ask(ANSWER)
    second.ask(ANSWER)
    second.say(block("k3x"))
    assert set(words(second.ask(ANSWER), "k")) == {"k3x"}


@pytest.mark.parametrize("trait", BOUND)
def test_a_note_of_another_chat_is_read_by_nobody_else(trait):
    """Both began alike, then one of them changed; their words and the replies to them are the same."""
    first = Dated(trait, block("k1x"))
    second = Dated(trait, block("k1x"), first.server)
    first.ask(ANSWER)
    second.ask(ANSWER)
    first.say(block("k2x"))
    for _ in range(2):
        assert words(first.ask(ANSWER), "k")[-1] == "k2x"
        assert set(words(second.ask(ANSWER), "k")) == {"k1x"}
    second.say(block("k3x"))
    assert "k2x" not in words(second.ask(ANSWER), "k")


@pytest.mark.parametrize("trait", BOUND)
def test_nobody_reads_the_task_notification_of_another(trait):
    """Two with the same words: their tasks end at one moment, and both get the same replies to that."""
    first = Dated(trait, FRIDAY)
    second = Dated(trait, FRIDAY, first.server)
    for talk, task in ((first, "k1x"), (second, "k2x")):
        talk.ask(ANSWER)
        told = f"<task-notification>\n<task-id>{task}</task-id>\n<status>done</status>\n</task-notification>"
        talk.messages = (*talk.messages[:-1], user(told))
    for _ in range(3):
        assert words(first.ask(ANSWER), "k") == ["k1x"]
        assert words(second.ask(ANSWER), "k") == ["k2x"]


@pytest.mark.parametrize("trait", BOUND)
def test_a_block_that_changes_before_anything_was_answered_is_content(trait):
    talk = Dated(trait, block("k1x"))
    request = talk.request()
    talk.ask(ANSWER)
    talk.messages = request.messages
    talk.say(block("k2x"))
    assert set(words(talk.ask(ANSWER), "k")) == {"k2x"}


# ---------------------------------------------------------------------------------- what the template writes


def test_a_date_that_the_template_writes_is_told_at_midnight():
    talk = Dated("dates", "")
    with talk.server.at(NOON):
        first = talk.ask(ANSWER) + talk.written
    with talk.server.at(NOON + timedelta(days=1)):
        read = talk.ask(ANSWER)
    assert read.startswith(first)
    assert "21 Nov 2026" in first
    assert "[Now: the date: 22 Nov 2026]" in read[len(first) :]


# ---------------------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize("trait", BOUND)
def test_with_the_policy_exact_whatever_changed_is_read_anew(trait):
    server = Server(trait, "template", "exact")
    talk = Dated(trait, FRIDAY, server)
    talk.ask(ANSWER)
    talk.say(SATURDAY)
    fresh = server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


# ---------------------------------------------------------------------------------------------------- limits


def test_notes_that_cost_more_than_they_save_are_not_written():
    talk = Dated("kimi", FRIDAY)
    talk.ask(ANSWER)
    talk.say(BLOCK.format("k2x " + "and so on " * 400))
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh
    assert talk.server.transcripts.metrics.refused == {"costly": 1}


def test_a_path_with_too_many_notes_is_left():
    talk, told = Dated("kimi", FRIDAY), list[int]()
    for number in range(60):
        talk.say(DATE.format(day(f"d{number}x")))
        told.append(len(words(talk.ask(ANSWER), "d")))
    assert max(told) > 8
    assert 1 in told[1:]
    assert talk.server.transcripts.metrics.refused["costly"] >= 1


@pytest.mark.parametrize(
    ("tokens", "before", "saved", "prompt", "expected"),
    [
        (20, 0, 1000, 1100, True),
        (20, 0, 20, 1100, False),
        (256, 0, 1000, 1100, True),
        (257, 0, 1000, 1100, False),
        (900, 0, 10_000, 30_000, True),
        (1001, 0, 10_000, 30_000, False),
        (20, 236, 1500, 2000, True),
        (20, 237, 1500, 2000, False),
        (20, 1980, 19_000, 20_000, True),
        (20, 1981, 19_000, 20_000, False),
    ],
)
def test_what_a_note_may_cost(tokens, before, saved, prompt, expected):
    assert pays(tokens, before=before, saved=saved, prompt=prompt) is expected


def test_what_was_told_last_counts():
    field = LiveField("clock", 0, is_block=False)
    ten, eleven = LiveValue(field, "10:00"), LiveValue(field, "11:00")
    told = [((field, "10:00"),), ((field, "11:00"),)]
    assert changes(told, [(eleven,), ()]) == []
    assert changes(told, [(ten,), ()]) == [Change(field, ten, "11:00")]
    assert changes(told, [(), ()]) == [Change(field, None, "11:00")]
    assert changes([*told, ((field, None),)], [(), ()]) == []
    assert changes([*told, ((field, None),)], [(ten,), ()]) == [Change(field, ten)]
    assert changes((), [(ten,)]) == [Change(field, ten)]
    assert values_of([(ten,), ()]) == (((field, "10:00"),), ())


def test_a_note_has_one_form():
    field = LiveField("clock", 0, is_block=False)
    told = [Change(field, LiveValue(field, "10:00")), Change(field, None)]
    assert note(told) == "\n\n[Now: 10:00]\n[No longer: clock]"
