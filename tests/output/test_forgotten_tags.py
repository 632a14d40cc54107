"""A call without some of its tags is the call that the model meant, or its words: never another."""

import json
from dataclasses import dataclass

import pytest

from start_llm.core.events import CallEnded, Finished, Text, Usage
from start_llm.formats.registry import NOTATIONS
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from tests.output.corpus.case import TOOLS, Call, Case, Outcome, outcome_of, split
from tests.output.corpus.writers import WRITERS

TAGGED = sorted(name for name, writer in WRITERS.items() if writer.streams)
WRITE = Call("write", {"path": "/a.txt", "text": "one\ntwo\n"})
READ = Call("read", {"path": "b", "limit": 2})


@dataclass(frozen=True)
class Written:
    """A call of `write` in one notation, in parts.

    Attributes:
        key: the tag of the second argument, with the text before it.
        value_end: the end tag of the first value.
        end: the text after the last value.
    """

    name: str
    text: str
    key: str
    value_end: str
    end: str

    def case(self, text: str, *, complete: bool = True) -> Case:
        return Case(name="forgotten", text=text, family=WRITERS[self.name].family, complete=complete)


def written(name: str) -> Written:
    notation = NOTATIONS[name].text
    assert notation is not None
    text = WRITERS[name].write([WRITE])
    first = text.index("/a.txt") + len("/a.txt")
    key = text[first : text.index("one\ntwo\n")]
    last = text[text.index("one\ntwo\n") + len("one\ntwo\n") :]
    arguments = notation.arguments
    value_end = arguments.value_end if isinstance(arguments, TaggedArguments) else "]<]minimax[>[</path>"
    return Written(name, text, key, value_end, last)


def parsed(case: Case) -> Outcome:
    whole = split(case, [case.text])
    assert split(case, case.text) == whole
    return outcome_of(whole)


def calls(outcome: Outcome) -> list[Call]:
    assert outcome.open_call is None
    return [Call(name, json.loads(arguments)) for name, arguments in outcome.closed_calls]


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_without_its_end_ends_before_the_next_argument(name):
    parts = written(name)
    case = parts.case(parts.text.replace(parts.value_end, "", 1))
    outcome = parsed(case)
    assert calls(outcome) == [WRITE]
    assert outcome.content == ""


@pytest.mark.parametrize("name", TAGGED)
def test_such_a_value_on_lines_of_windows_ends_before_the_end_of_its_line(name):
    parts = written(name)
    case = parts.case(parts.text.replace(parts.value_end, "", 1).replace("\n", "\r\n"))
    (call,) = calls(parsed(case))
    assert call.arguments == {"path": "/a.txt", "text": "one\r\ntwo\r\n"}


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize("again", ["/b.txt", "/a.txt"])
def test_of_an_argument_that_is_given_again_later_the_first_value_counts(name, again):
    text, mark = WRITERS[name].write([WRITE]), "again"
    doubled = WRITERS[name].write([Call("write", {**WRITE.arguments, mark: again})]).replace(mark, "path")
    for case in (Case(name="again", text=doubled, family=WRITERS[name].family), written(name).case(text)):
        whole = split(case, [case.text])
        assert split(case, case.text) == whole
        ((_, arguments),) = outcome_of(whole).closed_calls
        assert json.loads(arguments, object_pairs_hook=list) == [*WRITE.arguments.items()]


@pytest.mark.parametrize("name", TAGGED)
def test_the_last_value_without_its_end_ends_before_the_end_of_the_call(name):
    parts = written(name)
    last = parts.value_end.replace("path", "text")
    start, _, end = parts.text.rpartition(last)
    outcome = parsed(parts.case(start + "\n" * (not start.endswith("\n")) + end))
    assert [made_call.arguments["text"].rstrip("\n") for made_call in calls(outcome)] == ["one\ntwo"]
    assert outcome.content == ""


@pytest.mark.parametrize("name", TAGGED)
def test_a_reply_that_its_model_ended_in_a_value_is_a_whole_call(name):
    parts = written(name)
    outcome = parsed(parts.case(parts.text[: parts.text.index("two") + 3]))
    assert calls(outcome) == [Call("write", {"path": "/a.txt", "text": "one\ntwo"})]


@pytest.mark.parametrize("name", TAGGED)
def test_the_limit_leaves_such_a_call_open(name):
    parts = written(name)
    case = parts.case(parts.text[: parts.text.index("two") + 3], complete=False)
    outcome = outcome_of(split(case, [case.text]))
    assert outcome.open_call == ("write", '{"path": "/a.txt", "text": "one\\ntwo')


@pytest.mark.parametrize("name", [name for name in TAGGED if name != "minicpm"])
def test_a_call_without_any_end_ends_before_another_call(name):
    parts = written(name)
    cut = parts.text[: parts.text.index("two") + 3]
    another = WRITERS[name].write([READ])
    outcome = parsed(parts.case(f"{cut}\n{another}"))
    assert calls(outcome) == [Call("write", {"path": "/a.txt", "text": "one\ntwo"}), READ]
    assert outcome.content == ""


@pytest.mark.parametrize("name", TAGGED)
def test_a_call_without_the_end_of_its_last_value_ends_before_another_call(name):
    parts = written(name)
    last = parts.value_end.replace("path", "text")
    start, _, end = parts.text.rpartition(last)
    another = WRITERS[name].write([READ])
    outcome = parsed(parts.case(start + "\n" * (not start.endswith("\n")) + f"{end}\n{another}"))
    write, read = calls(outcome)
    assert write.arguments["text"].rstrip("\n") == "one\ntwo"
    assert read == READ
    assert outcome.content == ""


@pytest.mark.parametrize("name", [name for name in TAGGED if name not in ("kimi_k3", "minimax_m3", "step3")])
def test_tags_that_a_text_quotes_in_a_line_are_text(name):
    parts = written(name)
    quoted = parts.key.strip("\n").removeprefix(parts.value_end).strip("\n")
    call = Call("write", {"text": f"a {quoted} b", "path": "c"})
    assert calls(parsed(parts.case(WRITERS[name].write([call])))) == [call]


@pytest.mark.parametrize("name", [name for name in TAGGED if name != "minimax_m3"])
def test_a_call_that_a_text_quotes_is_text(name):
    quoted = WRITERS[name].write([Call("list")])
    call = Call("write", {"path": "c", "text": f"Like this:\n{quoted}\nor not"})
    case = Case(name="quoted", text=WRITERS[name].write([call]), family=WRITERS[name].family)
    assert calls(parsed(case)) == [call]


@pytest.mark.parametrize("name", TAGGED)
def test_all_arguments_under_one_name_are_the_arguments(name):
    if name == "minimax_m3":
        return  # its values of undeclared names are elements
    text = WRITERS[name].write([Call("write", {"arguments": {"path": "a", "text": "b"}})])
    outcome = parsed(Case(name="all", text=text, family=WRITERS[name].family))
    assert calls(outcome) == [Call("write", {"path": "a", "text": "b"})]


@pytest.mark.parametrize("name", TAGGED)
def test_reasoning_that_ends_in_a_value_is_no_call(name):
    parts = written(name)
    half = parts.text[: parts.text.index("two") + 3]
    outcome = parsed(parts.case(f"<think>I could {half}"))
    assert calls(outcome) == []
    assert outcome.reasoning == f"I could {half}"


HALF = Call("typed", {"tags": '["MARK"]'})
RECORDED = {
    "whole": ("qwen_xml", written("qwen_xml").text, True),
    "half": ("qwen_xml", written("qwen_xml").text.replace("</parameter>", "", 1), False),
    "an argument twice": ("qwen_xml", written("qwen_xml").text.replace("=text>", "=path>"), False),
    **{
        f"{kind}, {name}": (name, WRITERS[name].write([HALF]).replace("MARK", escapes), kind == "a character")
        for kind, escapes in {"half a character": r"\ud83d", "a character": r"\ud83d\ude00"}.items()
        for name in ("qwen_xml", "hermes", "harmony")
    },
}


@pytest.mark.parametrize("name", RECORDED)
def test_the_tokens_of_a_call_that_was_repaired_are_not_recorded(name):
    writer, text, is_recorded = RECORDED[name]
    family = WRITERS[writer].family
    splitter = make_splitter(family, TOOLS, reasoning_is_open=False, thinking=True)
    stream = OutputStream(splitter)
    assert any(isinstance(event, CallEnded) for event in stream.feed(Text(text, (1,))))
    stream.close(Finished("stop", Usage(1, 0, 1)))
    assert splitter.was_repaired is not is_recorded
    assert family.channels or stream.is_whole is is_recorded


@pytest.mark.parametrize("name", [name for name in TAGGED if name != "minimax_m3"])
def test_the_tag_of_an_argument_is_no_part_of_its_value_if_it_comes_twice(name):
    text = WRITERS[name].write([READ])
    tag = text[text.rindex("<", 0, text.index("path")) : text.index("b", text.index("path") + 4)]
    doubled = text.replace(tag, tag + tag)
    case = Case(name="twice", text=doubled, family=WRITERS[name].family)
    whole = split(case, [doubled])
    assert split(case, doubled) == whole
    assert [json.loads(given) for _, given in outcome_of(whole).closed_calls] == [READ.arguments]


def test_behind_a_wrapper_that_ended_a_call_may_lack_its_tag():
    good = WRITERS["minicpm"].write([WRITE, READ])
    case = Case(name="wrapped", text=good.replace("</function>", "", 1), family=WRITERS["minicpm"].family)
    whole = split(case, [case.text])
    assert split(case, case.text) == whole
    assert [json.loads(given) for _, given in outcome_of(whole).closed_calls] == [
        WRITE.arguments,
        READ.arguments,
    ]
