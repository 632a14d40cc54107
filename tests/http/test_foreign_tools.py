"""Tools and items that a vendor defines: those that the client runs are offered, and nothing is lost."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.grammar import messages, responses
from tests.http.forms import FORMS
from tests.http.reading import QUESTION, hear, post
from tests.http.scripts import asking, write_model
from tests.server.client import CHAT, ask
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
Random = Callable[[str], Server]
BY_CHANCE = {
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "max_tokens": 600,
    "enable_thinking": False,
}
BASH = {"type": "bash_20250124", "name": "bash"}


@pytest.fixture(scope="module")
def babbling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Random]:
    """`babbling("glm")` is a model of that form with random weights."""
    with ExitStack() as servers:

        @cache
        def serve(name: str) -> Server:
            folder = trait_folder(FORMS[name].trait, tmp_path_factory.mktemp(name))
            return servers.enter_context(serving(folder))

        yield serve


def both_ways(server: Server, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The reply as a whole, and put together from its stream."""
    whole = ask(server.port, "POST", path, body)
    streamed = ask(server.port, "POST", path, {**body, "stream": True})
    assert (whole.status, streamed.status) == (200, 200), whole.body
    reader = messages if path == MESSAGES else responses
    return [whole.json, reader.put_together(list(reader.named_events(streamed.body)))]


def counted(server: Server, **fields: Any) -> int:
    return ask(server.port, "POST", COUNT, {"messages": QUESTION, **fields}).json["input_tokens"]


# ---------------------------------------------------------------------------------- Anthropic's client tools


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_tool_that_the_client_runs_is_called_by_its_name_and_its_result_goes_on(name, babbling: Random):
    server = babbling(name)
    assert counted(server, tools=[BASH]) > counted(server)
    choice = {"type": "tool", "name": "bash", "disable_parallel_tool_use": True}
    question = {"messages": QUESTION, "tools": [BASH], **BY_CHANCE, "seed": 4, "tool_choice": choice}
    for reply in both_ways(server, MESSAGES, question):
        (call,) = reply["content"]
        assert (call["type"], call["name"], reply["stop_reason"]) == ("tool_use", "bash", "tool_use")
        assert isinstance(call["input"]["command"], str)
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "two files"}
        turns = [
            *QUESTION,
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
        after = ask(
            server.port, "POST", MESSAGES, {"messages": turns, "tools": [BASH], **BY_CHANCE, "max_tokens": 1}
        )
        usage = after.json["usage"]
        before = reply["usage"]
        computed = before["input_tokens"] + before["cache_read_input_tokens"] + before["output_tokens"]
        assert usage["cache_read_input_tokens"] >= computed - 2


# ----------------------------------------------------------------------------------------------- custom tools

PATCH_GRAMMAR = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: delete_hunk | update_hunk
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change
filename: /([a-c"]{1,3})/
change: change_context change_line{1,2}
change_context: ("@@" | "@@ " /(.{1,4})/) LF
change_line: ("+" | "-" | " ") /(.{0,4})/ LF -> line
%import common.LF
"""
PATCH_TEXT = re.compile(
    r"""\*\*\*\ Begin\ Patch\n
    (\*\*\*\ Delete\ File:\ [a-c"]{1,3}\n
    |\*\*\*\ Update\ File:\ [a-c"]{1,3}\n@@(\ .{1,4})?\n([-+\ ].{0,4}\n){1,2})+
    \*\*\*\ End\ Patch\n?""",
    re.VERBOSE,
)
NESTED = 'start: "(" start ")" | /[a-c]{1,3}/'
LARK = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
APPLY_PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": LARK}
TIME = {
    "type": "custom",
    "custom": {
        "name": "at",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"^\d\d:\d\d [\"/\n]$"}},
    },
}
DEMANDED = {"tool_choice": {"type": "custom", "name": "apply_patch"}, "parallel_tool_calls": False}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FORMS)
def test_a_demanded_custom_call_follows_its_grammar_and_its_echo_is_bound(name, babbling: Random):
    server = babbling(name)
    question = {"input": "Delete it.", "tools": [APPLY_PATCH], **BY_CHANCE, **DEMANDED}
    for reply in both_ways(server, RESPONSES, {**question, "seed": 4}):
        assert reply["status"] == "completed"
        (call,) = reply["output"]
        assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
        assert PATCH_TEXT.fullmatch(call["input"]), call["input"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
        turns = [{"role": "user", "content": "Delete it."}, call, result]
        body = {"input": turns, "tools": [APPLY_PATCH], **BY_CHANCE, "max_tokens": 1}
        after, before = ask(server.port, "POST", RESPONSES, body).json["usage"], reply["usage"]
        cached = after["input_tokens_details"]["cached_tokens"]
        assert cached >= before["input_tokens"] + before["output_tokens"] - 2


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("name", ["hermes", "glm"])
def test_a_grammar_whose_rules_refer_to_themselves_is_followed_too(name, babbling: Random):
    form = {"type": "grammar", "syntax": "lark", "definition": NESTED}
    tool = {"type": "custom", "name": "apply_patch", "format": form}
    question = {"input": "Nest.", "tools": [tool], **BY_CHANCE, **DEMANDED, "seed": 1}
    for reply in both_ways(babbling(name), RESPONSES, question):
        (call,) = reply["output"]
        inner = call["input"].strip("()")
        depth = (len(call["input"]) - len(inner)) // 2
        assert call["input"] == "(" * depth + inner + ")" * depth
        assert re.fullmatch("[a-c]{1,3}", inner)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["hermes", "glm", "harmony"])
def test_a_chat_has_custom_calls_too(name, babbling: Random):
    server = babbling(name)
    choice = {"type": "custom", "custom": {"name": "at"}}
    question = {"tools": [TIME], **BY_CHANCE, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5}
    heard = hear(server, **question)
    assert heard.reply.finish == "tool_calls"
    (call,) = heard.body["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "at")
    assert re.fullmatch(r'\d\d:\d\d ["/\n]', call["custom"]["input"])
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Late."},
    ]
    after = post(server, {"messages": turns, "tools": [TIME], **BY_CHANCE, "max_tokens": 1}).json["usage"]
    made = heard.usage["prompt_tokens"] + heard.usage["completion_tokens"]
    assert after["prompt_tokens_details"]["cached_tokens"] >= made - 2


def test_a_custom_tool_that_may_be_called_is_offered_with_its_grammar(babbling: Random):
    def counted_items(**fields: Any) -> int:
        body = {"input": "hi", **fields}
        return ask(babbling("hermes").port, "POST", f"{RESPONSES}/input_tokens", body).json["input_tokens"]

    without = {key: value for key, value in APPLY_PATCH.items() if key != "format"}
    assert counted_items() < counted_items(tools=[without]) < counted_items(tools=[APPLY_PATCH])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_grammar_that_does_not_compile_is_refused_by_its_tool_and_in_words(
    choice, stream, babbling: Random
):
    server = babbling("hermes")
    broken = {"syntax": "lark", "definition": "start: nowhere"}
    tool = {**APPLY_PATCH, "format": {"type": "grammar", **broken}}
    nested = {"type": "custom", "custom": {"name": "at", "format": {"type": "grammar", "grammar": broken}}}
    for path, body, name in (
        (RESPONSES, {"input": "?", "tools": [tool]}, "apply_patch"),
        (CHAT, {"messages": QUESTION, "tools": [nested]}, "at"),
    ):
        refused = ask(server.port, "POST", path, {**body, "tool_choice": choice, "stream": stream})
        assert refused.status == 400
        error = refused.json["error"]
        assert name in error["message"] and 'unknown name: "nowhere"' in error["message"]
        assert error["param"].endswith("definition")


# ---------------------------------------------------------------------------------- OpenAI's client tools

CALLS = {
    "shell": {"commands": ["ls -l", "pwd"]},
    "local_shell": {"command": ["ls", "-l"], "working_directory": "/a"},
    "apply_patch": {"type": "update_file", "path": "a.txt", "diff": "@@\n-a\n+b\n"},
}
OUTPUTS: dict[str, Any] = {
    "shell": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    "local_shell": "a",
    "apply_patch": "Done.",
}


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`asking("shell")` makes it call that tool."""
    scripts = {
        name: f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in CALLS.items()
    }
    folder = write_model(tmp_path_factory.mktemp("calling"), FORMS["hermes"].trait, scripts=scripts)
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize(
    ("tool", "member", "more"),
    [
        ("shell", "action", {}),
        ("local_shell", "action", {"type": "exec", "env": {}}),
        ("apply_patch", "operation", {}),
    ],
)
def test_a_tool_of_openais_that_the_client_runs_is_called_in_its_item_and_goes_round(
    tool, member, more, calling: Server
):
    offered = {"tools": [{"type": tool}], "enable_thinking": False}
    for reply in both_ways(calling, RESPONSES, {"input": "Look.", **offered, **asking(tool)}):
        (call,) = reply["output"]
        assert (call["type"], reply["status"]) == (f"{tool}_call", "completed")
        assert call[member] == {**CALLS[tool], **more}
        result = {"type": f"{tool}_call_output", "call_id": call["call_id"], "output": OUTPUTS[tool]}
        turns = [{"role": "user", "content": "Look."}, call, result]
        body = {"input": turns, **offered, **asking(tool), "max_output_tokens": 1}
        after, before = ask(calling.port, "POST", RESPONSES, body).json["usage"], reply["usage"]
        cached = after["input_tokens_details"]["cached_tokens"]
        assert cached >= before["input_tokens"] + before["output_tokens"] - 3


def test_what_a_vendor_ran_is_in_the_prompt(babbling: Random):
    server = babbling("hermes")
    call = {"type": "mcp_call", "server_label": "sea", "name": "f", "arguments": "{}", "output": "deep " * 50}
    items = [{"role": "user", "content": "Look."}, call, {"role": "user", "content": "And?"}]

    def counted_items(items: list[Any]) -> int:
        reply = ask(server.port, "POST", f"{RESPONSES}/input_tokens", {"input": items})
        return reply.json["input_tokens"]

    assert counted_items(items) > counted_items([items[0], items[2]]) + 50
    used = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "deep " * 50}}
    turns = [*QUESTION, {"role": "assistant", "content": [used]}, {"role": "user", "content": "And?"}]
    assert ask(server.port, "POST", COUNT, {"messages": turns}).json["input_tokens"] > counted(server) + 50


# ------------------------------------------------------------------------------ tools that a vendor would run

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
FETCH = {"type": "web_fetch_20250910", "name": "web_fetch"}
AS_SEARCHER = {"system": "You are an assistant for performing a web search tool use", **BY_CHANCE}


@pytest.mark.parametrize("choice", [{"type": "tool", "name": "web_search"}, {"type": "any"}], ids=str)
def test_a_search_that_is_demanded_is_answered_as_unavailable_and_not_by_the_model(choice, babbling: Random):
    server = babbling("hermes")
    question = {"messages": QUESTION, "tools": [SEARCH], "tool_choice": choice, **AS_SEARCHER}
    for reply in both_ways(server, MESSAGES, question):
        used, result, text = reply["content"]
        assert (used["type"], used["name"]) == ("server_tool_use", "web_search")
        assert used["input"] == {"query": QUESTION[0]["content"]}
        assert result["tool_use_id"] == used["id"]
        assert result["content"] == {"type": "web_search_tool_result_error", "error_code": "unavailable"}
        assert "web_search is not available" in text["text"]
        assert (reply["stop_reason"], reply["usage"]["output_tokens"]) == ("end_turn", 0)
        turns = [*QUESTION, {"role": "assistant", "content": reply["content"]}, *QUESTION]
        again = {"messages": turns, "tools": [BASH], **BY_CHANCE, "max_tokens": 1}
        assert ask(server.port, "POST", MESSAGES, again).status == 200


def test_another_tool_that_is_demanded_is_answered_in_words_alone(babbling: Random):
    choice = {"type": "tool", "name": "web_fetch"}
    question = {"messages": QUESTION, "tools": [BASH, FETCH], "tool_choice": choice, **BY_CHANCE}
    for reply in both_ways(babbling("hermes"), MESSAGES, question):
        (text,) = reply["content"]
        assert "web_fetch is not available" in text["text"]


def test_a_request_without_other_tools_tells_the_model_that_they_are_not_there(babbling: Random):
    server = babbling("hermes")
    plain = counted(server, system="Be brief.")
    assert counted(server, system="Be brief.", tools=[SEARCH]) > plain
    assert counted(server, tools=[SEARCH]) > counted(server)
    assert counted(server, tools=[SEARCH, BASH]) == counted(server, tools=[BASH])


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_tool_of_openais_that_is_demanded_is_answered_in_words(path, babbling: Random):
    server, search = babbling("hermes"), {"type": "web_search_preview"}
    asked: dict[str, Any] = {"messages": QUESTION} if path == CHAT else {"input": "Who won?"}
    question = {**asked, "tools": [search], "tool_choice": search}
    whole = ask(server.port, "POST", path, question)
    streamed = ask(server.port, "POST", path, {**question, "stream": True})
    assert (whole.status, streamed.status) == (200, 200), whole.body
    for reply in (whole.body, streamed.body):
        assert b"web_search_preview is not available here: it runs on OpenAI's servers" in reply
    tokens = "completion_tokens" if path == CHAT else "output_tokens"
    assert whole.json["usage"][tokens] == 0
