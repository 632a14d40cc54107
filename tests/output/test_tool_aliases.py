"""A tool whose name a notation cannot write has another name for the model, and its own for the client."""

from itertools import permutations
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, Message, OutputConstraint, TextGrammar, ToolCall
from start_llm.core.events import CallArguments, CallStarted
from start_llm.core.family import Family
from start_llm.formats.registry import MODEL_FORMATS, family_by_name
from start_llm.output.tool_aliases import AliasChooser, ToolAliases
from tests.output.corpus.case import Call, Case, Tools, outcome_of, split, tool
from tests.output.corpus.writers import WRITERS, Writer

ODD = [
    "mcp:files/read", "github/search", "memory:read_graph", "x:1", "a b", "f@1", "a{b", "a<b>", "a,b", "[a]",
    'a"b', "functions.x:2", "a\nb", "<|im_end|>", "文件/读", "!!", "a'b", "</tool_call>",
]  # fmt: skip
PLAIN = ["read", "mcp__files__read", "a.b", "a-b", "0abc", "é", "Read_File-2.0"]
FAMILIES = [model.family for model in MODEL_FORMATS]


def aliases_of(family: Family, *names: str) -> ToolAliases:
    return AliasChooser(family, "").choose(names)


def names_of(tools: Any) -> list[str]:
    return [definition["function"]["name"] for definition in tools]


def first_writer(family: Family) -> Writer:
    return WRITERS["harmony" if family.channels else family.formats[0]]


@pytest.mark.sample(9)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_tool_is_called_by_a_name_that_the_model_can_write(family: Family):
    aliases = aliases_of(family, *ODD, *PLAIN)
    names = [aliases.by_name.get(name, name) for name in (*ODD, *PLAIN)]
    assert len({*names}) == len(names)
    offered = Tools([tool(name, {"path": {"type": "string"}}) for name in names])
    for name in names:
        text = first_writer(family).write([Call(name, {"path": "p"})])
        case = Case(name="odd", text=text, family=family, tools=offered, thinking=False)
        assert outcome_of(split(case, [text])).closed_calls == [(name, '{"path": "p"}')]
        assert split(case, text) == split(case, [text])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_that_every_notation_can_write_stay(family: Family):
    assert aliases_of(family, *PLAIN) == ToolAliases()


def test_a_name_stays_where_the_notation_can_write_it():
    assert aliases_of(family_by_name("qwen3"), "mcp:files/read").by_name == {}
    assert aliases_of(family_by_name("gemma4"), "mcp:files/read").by_name == {
        "mcp:files/read": "mcp__files__read"
    }


def test_two_tools_with_one_alias_are_kept_apart_in_any_order():
    names = ["mcp:files/read", "mcp/files:read", "mcp__files__read", "a:b"]
    (aliases, *others) = [aliases_of(family_by_name("gemma4"), *order) for order in permutations(names)]
    assert all(other == aliases for other in others)
    assert set(aliases.by_name) == {"mcp:files/read", "mcp/files:read", "a:b"}
    assert aliases.by_name["a:b"] == "a__b"
    assert len({*aliases.by_name.values(), "mcp__files__read"}) == 4


def test_a_request_has_the_alias_wherever_a_tool_is_named():
    odd, aliases = "a:b", aliases_of(family_by_name("gemma4"), "a:b", "plain")
    call = ToolCall("1", odd, {"path": odd})
    request = ChatRequest(
        messages=(
            Message(role="user", content=odd, name=odd),
            Message(role="assistant", tool_calls=(call, ToolCall("2", "plain", {}))),
            Message(role="tool", content=odd, tool_call_id="1", name=odd, tool_references=(odd,)),
        ),
        tools=(tool(odd), tool("plain")),
        late_tools=(tool(odd),),
        grammars=(TextGrammar(tool=odd, syntax="regex", definition="a", field="tools"),),
        form=OutputConstraint(calls="must", tools=frozenset({odd})),
    )
    renamed = aliases.in_prompt(request)
    user, assistant, result = renamed.messages
    assert user == request.messages[0]
    assert [(tool_call.name, tool_call.arguments) for tool_call in assistant.tool_calls] == [
        ("a__b", {"path": odd}),
        ("plain", {}),
    ]
    assert (result.name, result.tool_references, result.content) == ("a__b", ("a__b",), odd)
    assert names_of(renamed.tools) == ["a__b", "plain"]
    assert names_of(renamed.late_tools) == ["a__b"]
    assert (renamed.grammars[0].tool, renamed.form.tools) == ("a__b", frozenset({"a__b"}))
    assert ToolAliases().in_prompt(request) is request


def test_the_model_reads_the_clients_name_in_the_description_of_a_tool_with_another():
    aliases = aliases_of(family_by_name("gemma4"), "a:b", "plain")
    described: Any = {"type": "function", "function": {"name": "a:b", "description": "Adds."}}
    messages = (Message(role="system", content="Use a:b first."), Message(role="user", content="Go."))
    request = ChatRequest(messages=messages, tools=(described, tool("plain")), late_tools=(tool("a:b"),))
    renamed = aliases.in_prompt(request)
    functions: Any = [renamed_tool["function"] for renamed_tool in (*renamed.tools, *renamed.late_tools)]
    about, plain, late = functions
    assert about == {"name": "a__b", "description": "Adds. (Called a:b by the client.)"}
    assert plain == tool("plain")["function"]
    assert late["description"] == "(Called a:b by the client.)"
    assert renamed.messages == messages, "the client's texts are its own"


def test_the_client_gets_its_own_name_back():
    aliases = aliases_of(family_by_name("gemma4"), "a:b")
    assert aliases.for_client(CallStarted(0, "a__b")) == CallStarted(0, "a:b")
    for event in (CallStarted(0, "other"), CallArguments(0, "a__b")):
        assert aliases.for_client(event) is event
