"""Values about the present change under a conversation: nothing is read again, but the changes are."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from start_llm.core.canonical import CanonicalMessage, Field, OmittedText
from start_llm.core.chat import ChatRequest, Message
from start_llm.prompt.canonical_form import canonical
from start_llm.transcripts.drift_notes import Change, changes, is_worth_telling, note
from start_llm.transcripts.recorded_details import MessageDetails, NotedValue
from tests.prompt.fakes import NOON, call, reply, result, system, user
from tests.templates.traits import TRAITS
from tests.transcripts.notes import known
from tests.transcripts.test_laws import ANSWER, Talk
from tests.transcripts.world import (
    BLOCK,
    BLOCK_FORM,
    CARRIER,
    DATE,
    MOVING,
    OWN,
    Server,
    Shape,
    day,
    form_of,
    words,
)

pytestmark = [pytest.mark.product, pytest.mark.sample(3)]

FRIDAY, SATURDAY = DATE.format(day("d1x")), DATE.format(day("d2x"))
RULES_TEXT = "v90x " + "Be brief and say what you see. " * 20
DETAILS = "And look at every file there is. " * 10
"""It costs more to read them once more than to read a note about a change."""
WORDS = "plain"
"""Its questions end with no token, so that nothing can stand after their texts."""
BOUND = [trait for trait in TRAITS if trait not in (MOVING, WORDS)]
CALLING = Shape(reasoning=False, text=False, calls=1)
CALLERS = [trait for trait in BOUND if form_of(trait, CALLING, on=True)]
NAMED = {"by none": (None, None), "each by its own": ("one", "two"), "all by one": ("same", "same")}
"""How clients name two conversations."""
UNPROVEN = {how: names for how, names in NAMED.items() if how != "each by its own"}
"""So that nobody can tell whose a reply is that both were given."""
GIT = """gitStatus: This is the git status at the start of the conversation.

Current branch: {0}

Status:
 M {0}.py

Recent commits:
0000000 {0}

"""

GIT_FORM = r"gitStatus: [^\n]*\n(?:(?!Recent commits:)[^\n]*\n)*Recent commits:\n[0-9a-f]{7} \w*"


class Named(Talk):
    """A talk that its client gives a name, which proves that it is one; None: it gives it none."""

    def __init__(self, trait: str, server: Server | None = None, *, name: str | None = "mine") -> None:
        super().__init__(trait, server=server)
        self.name = name

    def request(self, *, on: bool = True) -> ChatRequest:
        return replace(super().request(on=on), conversation_id=self.name)

    def ask_in_detail(self, shape: Shape = ANSWER) -> str:
        """The next question is long."""
        read = self.ask(shape)
        *before, asked = self.messages
        self.messages = (*before, replace(asked, content=f"{asked.content} {DETAILS}"))
        return read


class Dated(Named):
    """A talk whose first message says how things are."""

    def __init__(
        self, trait: str, now: str, server: Server | None = None, *, name: str | None = "mine"
    ) -> None:
        super().__init__(trait, server, name=name)
        self.say(now)

    def say(self, now: str) -> None:
        self.messages = (system(now + RULES_TEXT), *self.messages[1:])


def omitted(*messages: Message) -> list[tuple[OmittedText, ...]]:
    """Of each message, but for white space."""
    by_message = [message.omitted for message in canonical(messages)]
    return [tuple(text for text in some if text.kind != "space") for some in by_message]


# ------------------------------------------------------------------------------------------------ live lines


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", [None, "mine"])
@pytest.mark.parametrize("trait", BOUND)
def test_a_new_date_is_noted_and_nothing_is_read_again(trait, name):
    """Whosever the tokens are: nothing but a clock is in them that the client did not say."""
    talk = Dated(trait, FRIDAY, name=name)
    first = talk.ask(ANSWER)
    computed = first + talk.written
    talk.say(SATURDAY)
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert words(read, "d") == ["d1x", "d2x"]
    assert read.count(f"[Now: Today's date: {day('d2x')}]") == 1


@pytest.mark.sample(12)
@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_was_noted_is_not_noted_again(trait):
    talk = Dated(trait, FRIDAY)
    talk.ask(ANSWER)
    talk.say(SATURDAY)
    talk.ask(ANSWER)
    assert words(talk.ask(ANSWER), "d") == ["d1x", "d2x"]


@pytest.mark.sample(12)
@pytest.mark.parametrize("trait", BOUND)
def test_a_date_that_comes_back_is_noted_once_more(trait):
    talk = Dated(trait, FRIDAY)
    for now in (FRIDAY, SATURDAY, FRIDAY):
        talk.say(now)
        read = talk.ask_in_detail()
    assert words(read, "d") == ["d1x", "d2x", "d1x"]


def test_a_date_that_comes_back_after_less_than_a_note_is_not_noted():
    """The few words since then are read once more, after the date as it was."""
    talk = Dated("kimi", FRIDAY)
    for now in (FRIDAY, SATURDAY, FRIDAY):
        talk.say(now)
        read = talk.ask(ANSWER)
    assert words(read, "d") == ["d1x"]


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_a_date_that_is_gone_is_noted_to_hold_no_longer(trait):
    talk = Dated(trait, FRIDAY)
    talk.ask(ANSWER)
    talk.say("")
    read = talk.ask(ANSWER)
    assert "[No longer: today's date]" in read[read.index(day("d1x")) :]


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_a_date_that_was_not_there_is_noted(trait):
    talk = Dated(trait, "")
    talk.ask(ANSWER)
    talk.say(FRIDAY)
    assert words(talk.ask(ANSWER), "d") == ["d1x"]


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_a_retry_with_another_clock_goes_on_after_the_question(trait):
    """Nothing was answered yet: the note stands after the text of the same question."""
    talk = Dated(trait, FRIDAY)
    request = talk.request()
    talk.ask(ANSWER)
    talk.messages = request.messages
    talk.say(SATURDAY)
    read = talk.ask(ANSWER)
    assert words(read, "vd")[:3] == ["d1x", "v90x", "v91x"]
    assert read.index(f"[Now: Today's date: {day('d2x')}]") > read.index("v91x")


@pytest.mark.parametrize("trait", BOUND)
def test_a_note_stands_after_the_result_and_before_a_carrier(trait):
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


def test_seconds_are_no_news_of_ones_own_clock():
    """Where nothing proves whose the tokens are, another second is another value, and written as a whole."""

    def noted(clock: str, proven: int) -> str:
        before, now = (
            canonical([system(f"Current time is {item}\nBe brief."), user("Go on.")])
            for item in ("10:00:31", clock)
        )
        return note(changes([MessageDetails(item.omitted) for item in before], now, proven=proven)).strip()

    of_nobody, own = -1, 1
    assert noted("10:00:31", of_nobody) == noted("10:00:59", own) == ""
    assert noted("10:00:59", of_nobody) == "[Now: Current time is 10:00:59]"
    assert noted("10:01:00", own) == "[Now: Current time is 10:01:00]"


LINES = ("the first of its lines, which is long", "second", "third")
FIRST, SECOND, THIRD = LINES


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (LINES, ""),
        ((FIRST, THIRD), ""),
        ((*LINES, "new"), "[Changed in info:\nnew\n]"),
        ((SECOND, FIRST, THIRD), f"[Now: {SECOND}\n{FIRST}\n{THIRD}]"),
        ((SECOND, FIRST, "new"), f"[Now: {SECOND}\n{FIRST}\nnew]"),
        ((*LINES, THIRD), f"[Now: {FIRST}\n{SECOND}\n{THIRD}\n{THIRD}]"),
    ],
)
def test_exchanged_lines_of_own_metadata_are_noted_as_a_whole(now, expected):
    def message(*lines: str) -> CanonicalMessage:
        text = "\n".join(lines)
        return CanonicalMessage(b"", (OmittedText("info", "own", 0, text, text),))

    before = MessageDetails(message(*LINES).omitted)
    assert note(changes([before], [message(*now)])).strip() == expected


def test_seconds_in_a_block_stay_as_they_are():
    """Its lines are named as they stand in the prompt."""
    ((omission,),) = omitted(system("You help.\n" + GIT.format("at 10:00:31") + "Be brief."))
    assert "0000000 at 10:00:31" in omission.note_text


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
    name, text, around = FORMS[client]
    ((omission,),) = omitted(system("You help.\n" + around.format(text)))
    assert (omission.name, omission.note_text) == (name, text)
    assert omission.is_clock == (omission.kind == "live")


def test_statistics_of_a_run_are_found_in_a_question():
    ((omission,),) = omitted(user("Done.\nStats: runtime 12s • tokens 3k"))
    assert (omission.name, omission.note_text) == ("run statistics", "Stats: runtime 12s")
    assert not omission.is_clock


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
    assert omitted(message) == [()]


# ------------------------------------------------------------------------------------- blocks of one project


BLOCKS = [pytest.param(BLOCK, id="inbound"), pytest.param(GIT, id="git")]


def block(name: str) -> str:
    return BLOCK.format(name)


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize("form", BLOCKS)
def test_a_block_that_changes_within_its_chat_is_noted(trait, form):
    talk = Dated(trait, form.format("k1x"))
    talk.ask(ANSWER)
    talk.say(form.format("k2x"))
    read = talk.ask(ANSWER)
    assert "k1x" in words(read, "k")
    assert words(read, "k")[-1] == "k2x"
    assert read.index("[Changed in ") < read.rindex("k2x")


def git(name: str | None) -> str:
    """The empty line after it stays when it goes."""
    return GIT.format(name) if name else "\n"


def inbound(name: str | None) -> str:
    return block(name) if name else ""


SEQUENCES = {
    "there and back": ["k1x", "k2x", "k1x"],
    "gone and back": ["k1x", None, "k1x"],
    "gone and another": ["k1x", None, "k2x", "k1x"],
    "once more": ["k1x", "k2x", "k2x", "k3x"],
    "late": [None, "k1x", "k2x"],
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize(
    ("name", "form", "text"),
    [("inbound context", BLOCK_FORM, inbound), ("git status", GIT_FORM, git)],
    ids=["inbound", "git"],
)
@pytest.mark.parametrize("names", SEQUENCES.values(), ids=SEQUENCES)
def test_whoever_reads_the_prompt_in_order_knows_the_block(trait, name, form, text, names):
    talk = Dated(trait, "")
    for value in names:
        talk.say(text(value))
        read = talk.ask(ANSWER)
        assert known(read, name, form) == (text(value).strip() or None)
    assert talk.server.transcripts.metrics.bound >= len(names) - 1


@pytest.mark.parametrize("trait", BOUND)
def test_a_block_at_the_end_may_go_with_the_empty_line_before_it(trait):
    talk = Dated(trait, "")
    first, *rest = talk.messages
    talk.messages = (system(f"{first.content.strip()}\n\n{GIT.format('k1x')}"), *rest)
    computed = talk.ask(ANSWER) + talk.written
    talk.messages = (system(first.content.strip()), *talk.messages[1:])
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert "[No longer: git status]" in read


@pytest.mark.parametrize("names", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.parametrize("form", BLOCKS)
@pytest.mark.sample(6)
def test_nobody_reads_the_block_of_another_chat(trait, form, names):
    """Two with the same words, and the same replies to them."""
    first = Dated(trait, form.format("k1x"), name=names[0])
    second = Dated(trait, form.format("k2x"), first.server, name=names[1])
    for _ in range(3):
        assert set(words(first.ask(ANSWER), "k")) == {"k1x"}
        assert set(words(second.ask(ANSWER), "k")) == {"k2x"}


@pytest.mark.parametrize("names", UNPROVEN.values(), ids=UNPROVEN)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(3)
def test_a_block_that_changes_where_two_chats_got_the_same_reply_is_read_afresh(trait, names):
    """Nobody can tell whose the reply is."""
    first = Dated(trait, block("k1x"), name=names[0])
    second = Dated(trait, block("k2x"), first.server, name=names[1])
    first.ask(ANSWER)
    second.ask(ANSWER)
    second.say(block("k3x"))
    assert set(words(second.ask(ANSWER), "k")) == {"k3x"}


@pytest.mark.parametrize("trait", BOUND)
def test_a_block_that_changes_goes_on_from_that_of_its_own_chat_whoever_got_the_same_reply(trait):
    first = Dated(trait, block("k1x"), name="one")
    second = Dated(trait, block("k2x"), first.server, name="two")
    first.ask(ANSWER)
    second.ask(ANSWER)
    second.say(block("k3x"))
    read = second.ask(ANSWER)
    assert set(words(read, "k")) == {"k2x", "k3x"}
    assert known(read, "inbound context", BLOCK_FORM) == block("k3x").strip()


@pytest.mark.parametrize("names", [(None, None), ("one", "two"), ("one", None), (None, "two")])
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_a_note_of_another_chat_is_read_by_nobody_else(trait, names):
    """Both began alike, then one of them changed; their words and the replies to them are the same."""
    first = Dated(trait, block("k1x"), name=names[0])
    second = Dated(trait, block("k1x"), first.server, name=names[1])
    first.ask(ANSWER)
    second.ask(ANSWER)
    first.say(block("k2x"))
    for _ in range(2):
        assert words(first.ask(ANSWER), "k")[-1] == "k2x"
        assert set(words(second.ask(ANSWER), "k")) == {"k1x"}
    second.say(block("k3x"))
    assert "k2x" not in words(second.ask(ANSWER), "k")


@pytest.mark.parametrize("names", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(6)
def test_nobody_reads_the_task_notification_of_another(trait, names):
    """Two with the same words: their tasks end at one moment, and both get the same replies to that."""
    first = Dated(trait, FRIDAY, name=names[0])
    second = Dated(trait, FRIDAY, first.server, name=names[1])
    for talk, task in ((first, "k1x"), (second, "k2x")):
        talk.ask(ANSWER)
        text = f"<task-notification>\n<task-id>{task}</task-id>\n<status>done</status>\n</task-notification>"
        talk.messages = (*talk.messages[:-1], user(text))
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


# ----------------------------------------------------------------------------------------- what is no proof


NOW = {
    "a date that is gone": (FRIDAY, ""),
    "a date that is new": ("", FRIDAY),
    "another block": (block("k1x"), block("k2x")),
    "a date and another block": (FRIDAY + block("k1x"), SATURDAY + block("k2x")),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize(("before", "now"), NOW.values(), ids=NOW)
@pytest.mark.parametrize("trait", BOUND)
def test_without_a_proof_what_is_more_than_another_clock_is_read_anew(trait, before, now):
    talk = Dated(trait, before, name=None)
    talk.ask(ANSWER)
    talk.say(now)
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


@pytest.mark.parametrize("trait", BOUND)
def test_without_a_proof_the_note_of_another_clock_is_read_by_nobody(trait):
    """It would have to be taken back: whoever says Friday again goes on from what said so first."""
    talk = Dated(trait, FRIDAY, name=None)
    for now, dates in ((FRIDAY, ["d1x"]), (SATURDAY, ["d1x", "d2x"]), (FRIDAY, ["d1x"])):
        talk.say(now)
        assert words(talk.ask(ANSWER), "d") == dates


@pytest.mark.parametrize("trait", CALLERS)
def test_who_sends_the_id_of_our_call_back_shows_that_it_is_the_same_conversation(trait):
    talk = Dated(trait, block("k1x"), name=None)
    computed = talk.ask(CALLING) + talk.written
    talk.say(block("k2x"))
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert words(read, "k")[-1] == "k2x"


@pytest.mark.parametrize("trait", CALLERS)
def test_who_has_another_id_for_our_call_does_not(trait):
    talk = Dated(trait, block("k1x"), name=None)
    talk.ask(CALLING)
    *before, calling, output = talk.messages
    (made,) = calling.tool_calls
    talk.messages = (
        *before,
        replace(calling, tool_calls=(replace(made, id="call1"),)),
        replace(output, tool_call_id="call1"),
    )
    talk.say(block("k2x"))
    assert set(words(talk.ask(ANSWER), "k")) == {"k2x"}


@pytest.mark.sample(6)
@pytest.mark.parametrize("trait", BOUND)
def test_lines_that_have_changed_places_are_read_anew_whosever_they_are(trait):
    """No note tells where something stands."""
    talk = Dated(trait, FRIDAY + block("k1x"))
    talk.ask(ANSWER)
    talk.say(block("k1x") + FRIDAY)
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


@pytest.mark.sample(6)
@pytest.mark.parametrize("names", [("mine", "mine"), ("mine", "other"), (None, None)])
@pytest.mark.parametrize("end", ["", "\n\n"])
@pytest.mark.parametrize("trait", BOUND)
def test_white_space_at_the_end_of_a_question_may_change_within_its_conversation(trait, end, names):
    talk = Dated(trait, FRIDAY, name=names[0])
    first, asked = talk.messages
    talk.messages = (first, user(asked.content + "\n"))
    computed = talk.ask(ANSWER) + talk.written
    talk.messages = (first, user(asked.content + end), *talk.messages[2:])
    talk.name = names[1]
    fresh, read = talk.server.fresh(talk.request()), talk.ask(ANSWER)
    assert read.startswith(computed) if names == ("mine", "mine") else read == fresh


@pytest.mark.parametrize("name", ["mine", None])
@pytest.mark.parametrize("trait", BOUND)
def test_another_message_id_may_be_noted_within_its_conversation(trait, name):
    talk = Dated(trait, FRIDAY, name=name)
    first, asked = talk.messages
    talk.messages = (first, user(OWN.format("m1x") + asked.content))
    talk.ask(ANSWER)
    talk.messages = (first, user(OWN.format("m2x") + asked.content), *talk.messages[2:])
    ids = words(talk.ask(ANSWER), "m")
    assert ids == (["m1x", "m2x"] if name else ["m2x"])


# ---------------------------------------------------------------------------------- what the template writes


def test_a_date_that_the_template_writes_is_noted_at_midnight():
    talk = Dated("dates", "")
    with talk.server.at(NOON):
        first = talk.ask(ANSWER) + talk.written
    with talk.server.at(NOON + timedelta(days=1)):
        read = talk.ask(ANSWER)
    assert read.startswith(first)
    assert "21 Nov 2026" in first
    assert "[Now: the date: 22 Nov 2026]" in read[len(first) :]


# ---------------------------------------------------------------------------------------------------- policy


@pytest.mark.sample(18)
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


@pytest.mark.thorough
def test_a_path_that_has_too_many_notes_is_left_for_an_earlier_message_of_it():
    talk, counts = Dated("kimi", FRIDAY), list[int]()
    for number in range(60):
        talk.say(DATE.format(day(f"d{number}x")))
        counts.append(len(words(talk.ask(ANSWER), "d")))
    assert 8 < max(counts) == counts[-1] < 16
    assert talk.server.transcripts.metrics.bound == 59


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
    assert is_worth_telling(tokens, before=before, saved=saved, prompt=prompt) is expected


CLOCK, OWN_LINE = Field("clock", 0, "live"), Field("id", 0, "own")


def saying(*values: tuple[Field, str]) -> CanonicalMessage:
    return CanonicalMessage(
        b"",
        tuple(OmittedText(value_field.name, value_field.kind, 0, text, text) for value_field, text in values),
    )


def reading(*values: tuple[Field, str], noted: tuple[NotedValue, ...] = ()) -> MessageDetails:
    return MessageDetails(saying(*values).omitted, noted=noted)


def test_what_was_stated_last_counts():
    ten, eleven, nothing = saying((CLOCK, "10:00")), saying((CLOCK, "11:00")), saying()
    read = [reading((CLOCK, "10:00")), reading(noted=((CLOCK, "11:00"),))]
    gone = [*read, reading(noted=((CLOCK, None),))]
    assert changes(read, [eleven, nothing]) == []
    assert changes(read, [ten, nothing]) == [Change(CLOCK, "10:00", "11:00")]
    assert changes(read, [nothing, nothing]) == [Change(CLOCK, None, "11:00")]
    assert changes(gone, [nothing, nothing]) == []
    assert changes(gone, [ten, nothing]) == [Change(CLOCK, "10:00")]
    assert changes((), [ten]) == [Change(CLOCK, "10:00")]


def test_lines_of_a_message_itself_that_are_gone_are_no_news():
    read = [reading((OWN_LINE, "a\nb"))]
    assert changes(read, [saying((OWN_LINE, "a"))]) == []
    assert changes(read, [saying()]) == []
    assert changes(read, [saying((OWN_LINE, "a\nc"))]) == [Change(OWN_LINE, "a\nc", "a\nb")]


def test_white_space_is_no_news():
    space = OmittedText("white space", "space", 0, "\n")
    assert changes([MessageDetails((space,))], [CanonicalMessage(b"")]) == []
    assert changes([MessageDetails(())], [CanonicalMessage(b"", (space,))]) == []


def test_a_note_has_one_form():
    assert note([Change(CLOCK, "10:00"), Change(CLOCK, None)]) == "\n\n[Now: 10:00]\n[No longer: clock]"
