"""Thoughts between marks, and answers that talk about marks."""

from dataclasses import replace

from start_llm.core.family import Family, ThoughtMarks
from tests.output.corpus.case import TAGS, Call, Case
from tests.output.corpus.common import READ
from tests.output.corpus.writers import WRITERS

_QWEN = WRITERS["qwen_xml"].family
_ORPHAN = replace(_QWEN, orphan_close=True)
_GEMMA = Family(
    name="gemma4",
    thought=ThoughtMarks("<|channel>thought", "<channel|>", cut="\n<channel|>"),
    formats=("gemma4",),
)
_MISTRAL = Family(name="mistral", thought=ThoughtMarks("[THINK]", "[/THINK]", cut="[/THINK]"))
_NONE = Family(name="none")
_CALL = WRITERS["qwen_xml"].write([READ])


def _case(name, text, reasoning="", content="", calls: tuple[Call, ...] = (), family=_QWEN, **more) -> Case:
    return Case(
        name=name, text=text, reasoning=reasoning, content=content, calls=calls, family=family, **more
    )


CASES = (
    _case("a thought and an answer", "<think>\nHm.\n\nWell.\n</think>\n\nDone.\n", "Hm.\n\nWell.", "Done.\n"),
    _case("white space in front of a thought", " \n<think>Hm.</think>Done.", "Hm.", "Done."),
    _case("an empty thought", "<think>\n\n</think>\n\nDone.", "", "Done."),
    _case("a thought alone", "<think>\nHm.\n</think>\n", "Hm."),
    _case("spaces that belong to a thought", "<think>  Hm.  </think>  Done.", "  Hm.  ", "  Done."),
    _case(
        "a thought that the prompt opened", "\n\nHm.\n</think>\n\nDone.", "Hm.", "Done.", thought_is_open=True
    ),
    _case("a thought that is closed at once", "</think>Done.", "", "Done.", thought_is_open=True),
    _case("a thought that never ends", "<think>Hm.\n\n", "Hm.\n\n"),
    _case("half a mark at the end of a thought", "<think>Hm.\n</thi", "Hm.\n</thi"),
    _case("half a mark inside a thought", "<think>a </thin </think >b</think>c", "a </thin </think >b", "c"),
    _case("the opening mark inside a thought", "<think>a <think> b</think>c", "a <think> b", "c"),
    _case("half an opening mark", "<thin", "", "<thin"),
    _case("an opening mark that is none", "  <thinking>a", "", "  <thinking>a"),
    _case(
        "marks in an answer", "<think>a</think>Use <think> and </think>.", "a", "Use <think> and </think>."
    ),
    _case(
        "marks in an answer without a thought", "Use <think> and </think>.", "", "Use <think> and </think>."
    ),
    _case("a closing mark that nothing opened", "a</think>b", "", "a</think>b"),
    _case("no text", ""),
    _case("nothing but white space", " \n ", "", " \n "),
    _case("a thought although none was asked for", "<think>a</think>b", "a", "b", thinking=False),
    _case("Gemma's marks", "<|channel>thought\nHm.\n<channel|>Done.", "Hm.", "Done.", family=_GEMMA),
    _case("Gemma's marks around nothing", "<|channel>thought\n<channel|>Done.", "", "Done.", family=_GEMMA),
    _case("Mistral's marks", "[THINK]Hm.[/THINK]Done.", "Hm.", "Done.", family=_MISTRAL),
    _case("a model without thoughts", "<think>a</think>b", "", "<think>a</think>b", family=_NONE),
    _case("an orphaned close", "Hm.\n</think>\n\nDone.", "Hm.", "Done.", family=_ORPHAN),
    _case("an orphaned close and a call", f"Hm.\n</think>\n{_CALL}", "Hm.", "", (READ,), family=_ORPHAN),
    _case("an open although orphans may be", "<think>Hm.</think>Done.", "Hm.", "Done.", family=_ORPHAN),
    _case("no close at all", "Done.\n", "Done.\n", "Done.\n", family=_ORPHAN),
    _case(
        "no close and a call", f"I look.\n{_CALL}", f"I look.\n{_CALL}", "I look.", (READ,), family=_ORPHAN
    ),
    _case("no close and a cut", "Done.", "Done.", family=_ORPHAN, complete=False),
    _case(
        "no close where none was asked for", "a</think>b", "", "a</think>b", family=_ORPHAN, thinking=False
    ),
    _case("an open thought of an orphan", "Hm.", "Hm.", "", family=_ORPHAN, thought_is_open=True),
    _case("a real open that is cut", "<think>Hm.", "Hm.", "", family=_ORPHAN, complete=False),
    _case("a real open that never ends", "<think>Hm.", "Hm.", "", family=_ORPHAN),
    _case(
        "Hermes in an open thought",
        "<think><tool_call>",
        "<tool_call>",
        "",
        family=replace(_QWEN, thought=TAGS),
    ),
)
