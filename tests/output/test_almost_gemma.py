"""Gemma's notation with a forgotten quote or brace: the call that was meant, or its words."""

import json

import pytest

from start_llm.formats.reading.schema import Tools
from start_llm.output.splitter import make_splitter
from tests.output.corpus.case import Case, Outcome, outcome_of, split, tool
from tests.output.corpus.writers import WRITERS

TEXT = {"type": "string"}
TOOLS = Tools(
    [
        tool("grep", dict.fromkeys(("include", "path", "pattern"), TEXT)),
        tool("bash", {"command": TEXT, "folder": TEXT}),
        tool("write", {"content": TEXT, "mode": TEXT}),
        tool("flow", {"nodes": {"type": "object"}, "count": {"type": "integer"}, "free": {}}),
    ]
)
FORMS = {
    "gemma4": ("<|tool_call>", '<|"|>', "<tool_call|>"),
    "function_gemma": ("<start_function_call>", "<escape>", "<end_function_call>"),
}
MENDED = {
    "single quotes among others": ("grep{include:Q*.pyQ,pattern:'abc',path:QaQ}",
                                   {"include": "*.py", "pattern": "abc", "path": "a"}),
    "single quotes around an apostrophe": ("grep{pattern:'it's',path:QaQ}", {"pattern": "it's", "path": "a"}),
    "a quote behind single quotes": (r"grep{path:QaQ,pattern:':\s*\w+'Q}",
                                     {"path": "a", "pattern": r":\s*\w+"}),
    "no quote behind the last text": ("bash{folder:QaQ,command:Qls}", {"folder": "a", "command": "ls"}),
    "a quote behind the brace": ("bash{command:Qls}Q", {"command": "ls"}),
    "a brace of the last text": ("bash{command:Qecho ${x}}", {"command": "echo ${x}"}),
    "no brace behind a text with a brace": ("bash{command:Qecho ${x}Q", {"command": "echo ${x}"}),
    "a quote and a brace too few": ("bash{command:Qgrep '{a,b}'", {"command": "grep '{a,b}'"}),
    "no brace behind a text": ("write{content:QhelloQ", {"content": "hello"}),
    "no brace behind an object": ("flow{nodes:{a:1}", {"nodes": {"a": 1}}),
    "no brace behind a number": ("flow{count:1", {"count": 1}),
    "a text without quotes": ("write{content:\n\n# A `guide`: {x}, so",
                              {"content": "\n\n# A `guide`: {x}, so"}),
    "a path without quotes": ("write{content:/a/b}", {"content": "/a/b"}),
    "a text without quotes before another": ("write{content:see: it,mode:QfastQ}",
                                             {"content": "see: it", "mode": "fast"}),
    "names with spaces": ("flow{nodes:{Basic Chain:{main:[{node:QA BQ}]}, C D:{main:[]}}}",
                          {"nodes": {"Basic Chain": {"main": [{"node": "A B"}]}, "C D": {"main": []}}}),
    "names in JSON's quotes": ('flow{nodes:{"a b":1}}', {"nodes": {"a b": 1}}),
}  # fmt: skip
UNCLEAR = {
    "no quote behind a text in the middle": "bash{folder:Qa,command:QlsQ}",
    "a single quote without its other": "grep{pattern:'abc}",
    "a brace that may be of the text": "bash{command:Qecho ${x}",
    "nothing but a brace": "write{content:Q}",
    "an argument that may be of the text": "write{content:/a, mode: fast}",
    "a value of any type without quotes": "flow{free:/a/b}",
    "quotes in quotes": 'bash{command:"ls "x" "}',
    "something behind the brace": "bash{command:Qls}Q and so on",
}


def parsed(name: str, text: str, *, complete: bool = True) -> Outcome:
    case = Case(name="gemma", text=text, family=WRITERS[name].family, tools=TOOLS, complete=complete)
    whole = split(case, [text])
    assert split(case, text) == whole
    return outcome_of(whole)


def of(name: str, inner: str, *, end: bool = True) -> str:
    opener, quote, mark = FORMS[name]
    return f"{opener}call:{inner.replace('Q', quote)}{mark if end else ''}"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", MENDED)
@pytest.mark.parametrize("end", [True, False])
def test_a_call_with_one_reading_is_mended(name, case, end):
    inner, arguments = MENDED[case]
    outcome = parsed(name, of(name, inner, end=end))
    assert [(tool_, json.loads(given)) for tool_, given in outcome.closed_calls] == [
        (inner.partition("{")[0], arguments)
    ]
    assert outcome.content == ""


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", UNCLEAR)
@pytest.mark.parametrize("end", [True, False])
def test_a_call_with_several_readings_is_text(name, case, end):
    text = of(name, UNCLEAR[case], end=end)
    outcome = parsed(name, text)
    assert not outcome.calls
    assert outcome.content == text


@pytest.mark.parametrize("name", FORMS)
def test_the_call_behind_a_mended_one_is_made(name):
    text = of(name, "bash{command:Qls}") + "\n" + of(name, "write{content:QaQ,mode:QbQ}") + "\nDone."
    outcome = parsed(name, text)
    assert [json.loads(given) for _, given in outcome.closed_calls] == [
        {"command": "ls"},
        {"content": "a", "mode": "b"},
    ]
    assert outcome.content == "Done."


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("quote", ["`{}` and so on.", "```\n{}\n```\n", '"{}" is it'])
@pytest.mark.parametrize(
    "case", ["a text without quotes", "no quote behind the last text", "no brace behind a text"]
)
def test_what_prose_quotes_is_not_mended(name, quote, case):
    for end in (True, False):
        text = "It is " + quote.format(of(name, MENDED[case][0], end=end))
        outcome = parsed(name, text)
        assert not outcome.calls
        assert outcome.content == text


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("case", [case for case in MENDED if not case.startswith("names ")])
def test_a_call_that_the_limit_cut_is_not_mended(name, case):
    assert not parsed(name, of(name, MENDED[case][0], end=False), complete=False).ended


def test_the_tokens_of_a_mended_call_are_not_recorded():
    splitter = make_splitter(WRITERS["gemma4"].family, TOOLS, reasoning_is_open=False, thinking=True)
    splitter.feed(of("gemma4", "bash{command:Qls}"))
    splitter.close(complete=True)
    assert splitter.was_repaired
