"""A reminder is a wrapper: what changes in it under a heading that is known is noted, all else is content."""

from __future__ import annotations

import pytest

from tests.prompt.fakes import call, reply, result, system, user
from tests.transcripts.notes import known
from tests.transcripts.test_drift import BOUND, NAMED, UNPROVEN, Named, omitted
from tests.transcripts.test_laws import ANSWER
from tests.transcripts.world import INSTRUCTIONS, INSTRUCTIONS_FORM, REMINDER, Server, day, words

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

ASKED = "v91x " + "Look at every file and say what is in it. " * 20
OTHER = "<system-reminder>\n# userEmail\n{}\n</system-reminder>\n\n"
RECORDED = """<system-reminder>
As you answer the user's questions, you can use the following context:
# claudeMd
Codebase and user instructions are shown below.

Contents of /project/CLAUDE.md (project instructions, checked into the codebase):

# Tests
Use tabs.
# currentDate
Today's date is 2026-11-21.

      IMPORTANT: this context may or may not be relevant to your tasks.
</system-reminder>

Say one."""
"""As recorded with 2.1.197, less the long sentences."""


class Reminded(Named):
    """A talk whose first question begins with a reminder."""

    def __init__(
        self, trait: str, reminder: str, server: Server | None = None, *, name: str | None = "mine"
    ) -> None:
        super().__init__(trait, server, name=name)
        self.remind(reminder)

    def remind(self, reminder: str) -> None:
        self.messages = (self.messages[0], user(reminder + ASKED), *self.messages[2:])


def reminder(rule: str, date: str = "d1x") -> str:
    return REMINDER.format(INSTRUCTIONS.format(rule) if rule else "", day(date))


def test_what_claude_code_reminds_of_is_found():
    ((instructions, date),) = omitted(user(RECORDED))
    assert (date.note_text, date.kind, date.is_clock) == ("Today's date is 2026-11-21.", "live", True)
    assert (instructions.kind, instructions.is_clock) == ("block", False)
    assert instructions.note_text.startswith("# claudeMd\nCodebase")
    assert instructions.note_text.endswith("\n# Tests\nUse tabs.")


@pytest.mark.parametrize(
    "text",
    [
        RECORDED.replace("system-reminder", "reminder"),
        RECORDED.replace("# claudeMd", "# userEmail").replace("# currentDate", "# lastDate"),
        RECORDED.replace("# claudeMd", "## claudeMd").replace("# currentDate", "The # currentDate"),
        "# claudeMd\nUse tabs.\n# currentDate\nToday's date is 2026-11-21.\n" + OTHER.format("ann"),
    ],
    ids=["another wrapper", "unknown headings", "no headings", "outside"],
)
def test_all_else_is_content(text):
    assert omitted(user(text)) == [()]


def test_a_reminder_counts_in_the_first_question_alone():
    rest = (system(RECORDED), user("Go."), user(RECORDED), reply(RECORDED, call("c1", path="x")))
    assert set(omitted(*rest, result(RECORDED, "c1"))) == {()}


@pytest.mark.parametrize("trait", BOUND)
def test_what_a_reminder_says_anew_is_noted(trait):
    talk = Reminded(trait, reminder("r1x"))
    computed = talk.ask(ANSWER) + talk.written
    talk.remind(reminder("r2x", "d2x"))
    read = talk.ask(ANSWER)
    assert read.startswith(computed)
    assert f"[Now: Today's date is {day('d2x')}.]" in read[len(computed) :]
    assert known(read, "project instructions", INSTRUCTIONS_FORM) == "# claudeMd\nFollow these.\n\nr2x"


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(4)
def test_instructions_that_come_and_go_are_noted(trait):
    talk = Reminded(trait, reminder("r1x"))
    talk.ask(ANSWER)
    for rule in ("", "r1x", "r2x"):
        talk.remind(reminder(rule))
        instructions = known(talk.ask(ANSWER), "project instructions", INSTRUCTIONS_FORM)
        assert instructions == (INSTRUCTIONS.format(rule).strip() if rule else None)


@pytest.mark.sample(4)
@pytest.mark.parametrize("trait", BOUND)
def test_another_reminder_that_changes_is_read_anew(trait):
    talk = Reminded(trait, OTHER.format("r1x"))
    talk.ask(ANSWER)
    talk.remind(OTHER.format("r2x"))
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


@pytest.mark.sample(4)
@pytest.mark.parametrize("trait", BOUND)
def test_without_a_proof_a_new_date_is_noted_and_other_instructions_are_read_anew(trait):
    talk = Reminded(trait, reminder("r1x"), name=None)
    computed = talk.ask(ANSWER) + talk.written
    talk.remind(reminder("r1x", "d2x"))
    assert talk.ask(ANSWER).startswith(computed)
    talk.remind(reminder("r2x", "d2x"))
    fresh = talk.server.fresh(talk.request())
    assert talk.ask(ANSWER) == fresh


@pytest.mark.sample(4)
@pytest.mark.parametrize("names", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("trait", BOUND)
def test_nobody_reads_the_instructions_of_another_project(trait, names):
    """Two with the same words, and the same replies to them."""
    first = Reminded(trait, reminder("r1x"), name=names[0])
    second = Reminded(trait, reminder("r2x"), first.server, name=names[1])
    for _ in range(3):
        assert set(words(first.ask(ANSWER), "r")) == {"r1x"}
        assert set(words(second.ask(ANSWER), "r")) == {"r2x"}


@pytest.mark.parametrize("names", UNPROVEN.values(), ids=UNPROVEN)
@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(4)
def test_instructions_that_change_where_two_projects_got_the_same_reply_are_read_afresh(trait, names):
    """Nobody can tell whose the reply is."""
    first = Reminded(trait, reminder("r1x"), name=names[0])
    second = Reminded(trait, reminder("r2x"), first.server, name=names[1])
    first.ask(ANSWER)
    second.ask(ANSWER)
    second.remind(reminder("r3x"))
    assert set(words(second.ask(ANSWER), "r")) == {"r3x"}


@pytest.mark.parametrize("trait", BOUND)
@pytest.mark.sample(4)
def test_instructions_that_change_go_on_from_those_of_their_own_project(trait):
    first = Reminded(trait, reminder("r1x"), name="one")
    second = Reminded(trait, reminder("r2x"), first.server, name="two")
    first.ask(ANSWER)
    second.ask(ANSWER)
    second.remind(reminder("r3x"))
    assert set(words(second.ask(ANSWER), "r")) == {"r2x", "r3x"}
