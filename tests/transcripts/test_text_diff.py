"""A block that changed is described line by line, and whoever reads that knows what it is now."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import Field
from start_llm.transcripts.drift_notes import Change, changed_lines
from tests.slices import examples
from tests.transcripts.notes import changed


def change(before: str | None, now: str) -> str:
    return Change(Field("git status", 0, "block"), now, before).line


LONG = "Status:\n" + "\n".join(f" M file{number}.py" for number in range(9))


def test_a_note_for_a_block_tells_the_lines_that_changed():
    now = LONG.replace(" M file3.py", " M other.py").replace("file5.py", "file5.py\n?? new.py")
    note = "[Changed in git status:\n- M file3.py\n+ M other.py\n  M file5.py\n+?? new.py\n]"
    assert change(LONG, now) == note


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, LONG),
        ("Status:\n(clean)", "Status:\n M a.py"),
        (LONG, "\n".join(reversed(LONG.split("\n")))),
        (f"{{\n{LONG}\n}}\n{{\n{LONG}\n}}", f"{{\n{LONG}\n}}\n{{\n1\n{LONG}\n}}"),
        (LONG, "New\n" + LONG),
        (LONG, LONG + "\n M more.py" * 500),
    ],
    ids=["never stated", "short", "all in another order", "no telling where", "in front", "too long"],
)
def test_a_block_is_noted_as_a_whole_where_its_lines_would_not_be_shorter_or_not_clear(before, now):
    assert change(before, now) == f"[Now: {now}]"


def test_a_line_of_a_live_value_is_noted_as_it_is():
    clock = Field("clock", 0, "live")
    assert Change(clock, LONG + "\nx", LONG).line == f"[Now: {LONG}\nx]"


LINES = st.lists(st.sampled_from(["", "a", "b", "c", " a", "-b", "+c", "]", "d\x0be", "longer than that"]))


@pytest.mark.thorough
@examples(500, few=100)
@given(blocks=st.lists(LINES.map(lambda lines: "\n".join(["Now", *lines])), min_size=2, max_size=6))
def test_whoever_reads_the_notes_in_order_knows_the_block(blocks: list[str]) -> None:
    read = blocks[0]
    for before, now in pairwise(blocks):
        lines = changed_lines(before, now)
        if lines:
            assert changed(read, lines.split("\n")) == now
        read = now
