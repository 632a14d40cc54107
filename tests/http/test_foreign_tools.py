"""Tools and items that a vendor defines: those that the client runs are offered, and nothing is lost."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from tests.grammar import messages, responses
from tests.http.forms import FORMS
from tests.http.reading import QUESTION
from tests.server.client import ask
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
Random = Callable[[str], Server]
BY_CHANCE = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 600, "enable_thinking": False}
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


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_a_tool_that_the_client_runs_is_called_by_its_name_and_its_result_goes_on(name, babbling: Random):
    server = babbling(name)
    assert counted(server, tools=[BASH]) > counted(server)
    choice = {"type": "tool", "name": "bash", "disable_parallel_tool_use": True}
    question = {"messages": QUESTION, "tools": [BASH], **BY_CHANCE, "seed": 3, "tool_choice": choice}
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
