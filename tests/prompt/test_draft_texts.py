"""Results of tools are encoded again as a reply would repeat them."""

from __future__ import annotations

import pytest

from start_llm.core.chat import Message
from start_llm.prompt.draft_texts import DraftTexts, without_marks

CODE = "import os\n\ndef main():\n    return os.getcwd()\n"


class Words:
    """A tokenizer whose tokens are characters."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_continuation(self, text: str) -> list[int]:
        self.encoded += 1
        return [ord(letter) for letter in text]


def numbered(form: str) -> str:
    return "\n".join(form.format(number) + line for number, line in enumerate(CODE.split("\n"), 98))


@pytest.mark.parametrize("form", ["{:6}→", "{:6}\t", "{}: ", "{}:", "{:5} | ", "{}|"])
def test_line_numbers_are_left_out(form: str):
    assert without_marks(numbered(form)) == CODE


def test_the_marks_of_a_diff_are_left_out():
    patch = "diff --git a/x b/x\n@@ -1,2 +1,3 @@ def main():\n import os\n-old\n+new\n"
    assert without_marks(patch) == "diff --git a/x b/x\n@@ -1,2 +1,3 @@ def main():\nimport os\nold\nnew\n"


def test_the_indentation_of_a_block_stays():
    listing = "   7→    if x:\n   8→        y()\n   9→    z()\n"
    assert without_marks(listing) == "    if x:\n        y()\n    z()\n"


@pytest.mark.parametrize(
    "text",
    ["", CODE, "1: one\n7: seven\n3: three\n", "2024: 7\n", "- a\n- list\n+ of\n", "10:30 lunch\n" * 9],
)
def test_other_texts_stay_out(text: str):
    assert without_marks(text) is None


def test_results_of_tools_alone_are_encoded_and_each_only_once():
    words = Words()
    texts = DraftTexts(words)  # pyright: ignore[reportArgumentType] - it encodes, and nothing else
    listing = numbered("{:6}→")
    messages = [
        Message(role="user", content=listing),
        Message(role="tool", content=listing),
        Message(role="tool", content=CODE),
        Message(role="tool", content=listing),
    ]
    for _ in range(3):
        drafts = texts.of(messages)
        assert ["".join(map(chr, draft)) for draft in drafts] == [CODE, CODE]
    assert words.encoded == 1


def test_half_characters_are_no_trouble():
    listing = "1: \ud800\n2: b\n3: c\n"
    (draft,) = DraftTexts(Words()).of([Message(role="tool", content=listing)])  # pyright: ignore[reportArgumentType]
    assert list(draft) == [ord(letter) for letter in "\ud800\nb\nc\n"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("start_llm.prompt.draft_texts._MOST_TOKENS", 100)
    words = Words()
    texts = DraftTexts(words)  # pyright: ignore[reportArgumentType]
    for turn in range(20):
        texts.of([Message(role="tool", content=numbered(f"{{}}: {turn} "))])
    texts.of([Message(role="tool", content=numbered("{}: 0 "))])
    assert words.encoded == 21


def test_numbers_that_python_refuses_to_read_are_no_line_numbers():
    """A tool that prints a number of more than 4,300 digits must not end the request."""
    assert without_marks(f"{'7' * 5000}: big\n" * 4) is None
