"""A call of a tool under another name: the tool that is meant, or a call that the client refuses itself."""

import json

import pytest

from start_llm.core.events import Finished, Text, Usage
from start_llm.formats.reading.schema import Tools
from start_llm.output.calls import QuoteWatch
from start_llm.output.splitter import make_splitter
from start_llm.output.stream import OutputStream
from tests.output.corpus.case import TOOLS, Case, Outcome, outcome_of, split, tool
from tests.output.corpus.writers import WRITERS

MARKED = sorted(name for name, writer in WRITERS.items() if not writer.starts_reply)


def parsed(case: Case) -> Outcome:
    whole = split(case, [case.text])
    assert split(case, case.text) == whole
    return outcome_of(whole)


@pytest.mark.parametrize("name", sorted(WRITERS))
@pytest.mark.parametrize("written", ["Read", "READ", "functions.read", "tools.read", "Functions.Read"])
def test_one_tool_of_that_name_in_other_letters_or_behind_a_prefix_is_meant(name, written):
    case = Case(name="other", text=WRITERS[name].call(written, path="a"), family=WRITERS[name].family)
    outcome = parsed(case)
    assert [(tool_, json.loads(arguments)) for tool_, arguments in outcome.closed_calls] == [
        ("read", {"path": "a"})
    ]
    assert outcome.content == ""


@pytest.mark.parametrize("offered", ["files__read", "files.read", "memory/read", "memory:read", "a__b__read"])
def test_a_tool_without_its_namespace_is_meant_if_no_other_has_the_name(offered):
    assert Tools([tool(offered)]).meant("read") == offered
    assert Tools([tool(offered)]).meant("functions.READ") == offered
    assert Tools([tool(offered), tool("read")]).meant("read") == "read"
    assert Tools([tool(offered), tool("more__read")]).meant("read") is None
    assert Tools([tool(offered)]).meant("files") is None


def test_of_several_tools_that_are_alike_none_is_meant():
    tools = Tools([tool("Read"), tool("read")])
    assert tools.meant("READ") is None
    assert tools.meant("read") == "read"
    assert tools.taking_any.meant("READ") == "READ"


def test_where_some_tools_may_not_be_called_no_other_name_is_one():
    assert Tools([tool("read")], are_all=False).taking_any.meant("remove") is None


def test_without_tools_no_name_is_one():
    assert Tools([]).taking_any.meant("read") is None


@pytest.mark.parametrize("name", [name for name in MARKED if name != "harmony"])
@pytest.mark.parametrize("quote", ["`{}`", '"{}"', "```\n{}\n```", "```xml\n{}\n```\nso"])
def test_a_quoted_call_of_no_tool_is_text(name, quote):
    text = "So: " + quote.format(WRITERS[name].call("remove", path="a"))
    outcome = parsed(Case(name="quoted", text=text, family=WRITERS[name].family))
    assert not outcome.calls
    assert outcome.content == text


@pytest.mark.parametrize("name", [name for name in MARKED if name != "harmony"])
def test_behind_a_fence_a_call_of_no_tool_is_one_again(name):
    text = f"```\nx\n``` and `y`:\n{WRITERS[name].call('remove', path='a')}"
    outcome = parsed(Case(name="behind", text=text, family=WRITERS[name].family))
    assert [tool_ for tool_, _ in outcome.closed_calls] == ["remove"]


@pytest.mark.parametrize("name", [name for name in MARKED if name != "harmony"])
def test_in_the_notation_of_another_model_only_offered_tools_are_called(name):
    family = WRITERS["kimi" if name != "kimi" else "glm"].family
    text = WRITERS[name].call("remove", path="a")
    assert not parsed(Case(name="other model", text=text, family=family)).calls


@pytest.mark.parametrize(
    ("pieces", "is_inside"),
    [
        (["a"], False),
        (["`a"], True),
        (["`a`"], True),
        (["`a` b"], False),
        (["`a\n"], False),
        (["``", "`\n"], True),
        (["```\na `b\n```\n"], False),
        (["`", "``\na"], True),
        (['say "'], True),
    ],
)
def test_quotation_is_followed_however_the_text_is_cut(pieces, is_inside):
    for cut in (pieces, list("".join(pieces))):
        watch = QuoteWatch()
        for piece in cut:
            watch.note(piece)
        assert watch.is_inside is is_inside


def test_the_tokens_of_a_call_under_another_name_are_not_recorded():
    splitter = make_splitter(WRITERS["hermes"].family, TOOLS, reasoning_is_open=False, thinking=True)
    stream = OutputStream(splitter)
    stream.feed(Text(WRITERS["hermes"].call("Read", path="a"), (1,)))
    stream.close(Finished("stop", Usage(1, 0, 1)))
    assert not stream.is_whole
