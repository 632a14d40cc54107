"""The harness of the tests with real clients, tried without them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clients import relay
from tests.clients.model import (
    ANSWER,
    CALLS,
    COMMAND,
    ERRANDS,
    QUESTION,
    REQUESTS,
    SUMMARY,
    write_agents_model,
)
from tests.clients.pictures import (
    LOOK,
    OPENERS,
    PICTURE,
    SEEN,
    Opener,
    Witness,
    places,
    png,
    write_seeing_model,
)
from tests.clients.table import AGENTS, Place
from tests.clients.talk import _run, efficiency
from tests.http.forms import tool
from tests.http.reading import post
from tests.images.files import data_url
from tests.serving import Server, serving

PATH = {"PATH": "/usr/bin:/bin"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_agents_model(tmp_path_factory.mktemp("agents"))) as running:
        yield running


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.sample(16)
def test_a_question_is_a_call_and_a_result_an_answer(server: Server, name: str, thinking: bool):
    types = {key: "array" if isinstance(value, list) else "string" for key, value in CALLS[name][1].items()}
    tools = [tool("other"), tool(name, **types)]
    messages = [{"role": "user", "content": f"{QUESTION} (1)"}]
    for _ in range(2):
        asked = {"messages": messages, "tools": tools, "enable_thinking": thinking}
        reply = post(server, asked).json["choices"][0]["message"]
        (call,) = reply["tool_calls"]
        assert call["function"]["name"] == name
        arguments = json.loads(call["function"]["arguments"])
        assert COMMAND in arguments.values() or [COMMAND] in arguments.values()
        messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": "It says this."}]
        aside = {"role": "user", "content": "Nobody asked for this."}
        reply = post(server, {**asked, "messages": [*messages, aside]}).json["choices"][0]["message"]
        assert reply["content"] == ANSWER
        messages += [reply, {"role": "user", "content": f"{QUESTION} (2)"}]


def test_who_has_no_tool_gets_an_answer(server: Server):
    asked = {"messages": [{"role": "user", "content": QUESTION}]}
    assert post(server, asked).json["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.sample(6)
@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("words", REQUESTS)
def test_who_asks_for_a_summary_gets_one(server: Server, words: str, role: str):
    tools = [tool("bash", command="string")]
    messages = [{"role": "user", "content": QUESTION}, {"role": role, "content": f"{words} of this."}]
    reply = post(server, {"messages": messages, "tools": tools}).json["choices"][0]["message"]
    assert reply["content"] == f"<summary>\n{SUMMARY}\n</summary>"
    messages += [reply, {"role": "user", "content": QUESTION}]
    reply = post(server, {"messages": messages, "tools": tools}).json["choices"][0]["message"]
    assert ("tool_calls" in reply) == (role == "user"), "what a system text asks for holds"


@pytest.mark.sample(4)
@pytest.mark.parametrize("question", ERRANDS)
def test_an_errand_is_its_calls(server: Server, question: str):
    calls = ERRANDS[question]
    tools = [
        tool(name, **{key: _TYPES[type(value)] for key, value in given.items()}) for name, given in calls
    ]
    asked = {"messages": [{"role": "user", "content": f"{question} (1)"}], "tools": tools[:1]}
    tool_calls = post(server, asked).json["choices"][0]["message"]["tool_calls"]
    functions = [call["function"] for call in tool_calls]
    assert [(function["name"], json.loads(function["arguments"])) for function in functions] == [*calls]


_TYPES: Mapping[type, str] = {str: "string", int: "integer", bool: "boolean"}


def test_tokens_that_were_computed_before_are_no_gain():
    first = {"computed_tokens": 90, "lost_tokens": 0, "completion_tokens": 10}
    second = {"computed_tokens": 40, "lost_tokens": 14, "completion_tokens": 5}
    assert efficiency([first], None, has_asides=False) == 1
    assert efficiency([second], first, has_asides=False) == 1 - 14 / 40
    assert efficiency([second], first, has_asides=True) == 1 - 4 / 40
    assert efficiency([first, second], None, has_asides=True) == 1 - 4 / 130
    assert efficiency([], first, has_asides=False) == 0


@pytest.mark.thorough
@pytest.mark.skipif(not relay.can_be_alone(PATH), reason="no network namespaces for us here")
def test_a_client_reaches_one_port_and_its_other_tries_are_counted(tmp_path: Path):
    (tmp_path / "word").write_text("reached")
    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Quiet(*args, directory=tmp_path))
    threading.Thread(target=site.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{site.server_port}/word"
    reach = f"import urllib.request; print(urllib.request.urlopen({url!r}).read())"
    leave = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 9))"
    try:
        status, printed, tries = _run([sys.executable, "-c", reach], PATH, tmp_path, site.server_port)
        assert (status, printed.strip(), tries) == (0, "b'reached'", 0)
        status, printed, tries = _run([sys.executable, "-c", leave], PATH, tmp_path, site.server_port)
        assert (status, "unreachable" in printed, tries) == (1, True, 1)
    finally:
        site.shutdown()
        site.server_close()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name there)
        pass


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_learns_of_nothing_but_its_own_place(name: str, tmp_path: Path):
    place = Place(home=tmp_path / "home", work=tmp_path / "work", url="http://127.0.0.1:1")
    agent = AGENTS[name]
    texts = [*agent.files(place).values(), *agent.environment(place).values()]
    assert any(place.url in text for text in texts)
    urls = [word for text in texts for word in text.replace('"', " ").split() if "://" in word]
    assert [url for url in urls if not url.startswith(place.url)] == []
    assert "hello" in agent.first(place, "hello")
    assert "hello" in agent.later(place, "hello")


# -------------------------------------------------------------------------------------------------- pictures


@pytest.fixture(scope="module")
def witness() -> Witness:
    return Witness()


@pytest.fixture(scope="module")
def seeing(witness: Witness, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_seeing_model(tmp_path_factory.mktemp("seeing")), witness.app) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.parametrize("opener", OPENERS)
def test_a_picture_is_opened_and_described(seeing: Server, witness: Witness, opener: Opener):
    file = png(OPENERS.index(opener))
    tools = [tool("other"), tool(opener.tool, **{opener.argument: "string"})]
    messages: list[Any] = [{"role": "user", "content": f"{LOOK} (1)"}]
    reply = post(seeing, {"messages": messages, "tools": tools}).json["choices"][0]["message"]
    (call,) = reply["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        opener.tool,
        {opener.argument: PICTURE},
    )
    image = {"type": "image_url", "image_url": {"url": data_url(file)}}
    messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": [image]}]
    witness.new_prompts()
    for aside in ([], [{"role": "user", "content": "Nobody asked for this."}]):
        asked = {"messages": [*messages, *aside], "tools": tools}
        assert post(seeing, asked).json["choices"][0]["message"]["content"] == SEEN
    for prompt in witness.new_prompts():
        (shown,) = prompt.images
        assert (shown.image.data, shown.size) == (file, (320, 200))
        assert shown.tokens == witness.names_of(file) != witness.names_of(png(99))


def test_where_images_stand_is_read_from_a_prompt():
    image = "<|vision_start|>[image]<|vision_end|>"
    prompt = (
        f"<|im_start|>system\nA {image}<|im_end|>\n<|im_start|>user\n{image} and {image}<|im_end|>\n"
        f"<|im_start|>user\n<tool_response>\nno\n</tool_response>\n<tool_response>\n{image}\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert places({"prompt": prompt, "images": 4}) == ["system", "user", "user", "tool"]
