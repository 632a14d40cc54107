"""Whether a recorded text says what a fresh one says."""

import pytest

from start_llm.transcripts.safety import says_the_same


@pytest.mark.parametrize(
    ("recorded", "fresh", "same"),
    [
        ("How deep?", "How deep?", True),
        ("<think>It is nine.</think> Nine metres", "Nine metres", True),
        ("Nine\n\n metres ", "Nine metres", True),
        ("", "", True),
        ("anything", "", True),
        ("Nine metres", "Nine long metres", False),
        ("metres nine", "nine metres", False),
        ("nine", "nine nine", False),
        ("Nine", "nine", False),
        ("größe 日本", "größe 日本", True),
    ],
)
def test_every_word_of_the_fresh_text_is_there_in_its_order(recorded, fresh, same):
    assert says_the_same(recorded, fresh) is same
