"""Anthropic's messages say what a chat says; what Claude Code sends back is bound at its replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.grammar.messages import named_events, put_together, without_ids
from tests.http.conftest import FamilyServer, Hearing
from tests.http.forms import ANSWER, FORMS, PATH, PROSE, REASONING, THINKING, TOOLS, answers, reasoning_texts
from tests.http.reading import QUESTION, Called, ReplyContent
from tests.http.scripts import asking, write_model
from tests.server.breakable import BreakableServer, breakable
from tests.server.client import Client, CutOff, Reply, ask, engine_is_free, message, wait_until
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(5)

PATH_OF_MESSAGES = "/v1/messages?beta=true"
SCRIPTS = [
    (name, script) for name, form in FORMS.items() for script in {**reasoning_texts(form), **answers(form)}
]
FINISH = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
CLOSERS = 32
"""Tokens that a template writes after a reply, around what is new and before a reply, at most."""

GEMMA_RESULT = "<tool_response|>"

type Json = dict[str, Any]


def in_anthropics_form(tool: Json) -> Json:
    function = tool["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


ANTHROPIC_TOOLS = [in_anthropics_form(tool) for tool in TOOLS]


def post(server: Server | BreakableServer, body: Json, headers: dict[str, str] | None = None) -> Reply:
    return ask(
        server.port, "POST", PATH_OF_MESSAGES, {"model": "claude-x", "max_tokens": 900, **body}, headers
    )


def answered(server: Server, body: Json, headers: dict[str, str] | None = None) -> Json:
    reply = post(server, body, headers)
    assert reply.status == 200, reply.body
    return reply.json


def streamed(server: Server, body: Json) -> Json:
    reply = post(server, {**body, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return put_together(named_events(reply.body))


def content_of(message: Json) -> ReplyContent:
    blocks = message["content"]
    calls = (block for block in blocks if block["type"] == "tool_use")
    return ReplyContent(
        content="".join(block["text"] for block in blocks if block["type"] == "text"),
        reasoning="".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        calls=tuple(Called(call["name"], json.dumps(call["input"])) for call in calls),
        finish=FINISH[message["stop_reason"]],
    )


def with_plain_arguments(reply: ReplyContent) -> ReplyContent:
    calls = (Called(call.name, json.dumps(json.loads(call.arguments))) for call in reply.calls)
    return ReplyContent(
        content=reply.content, reasoning=reply.reasoning, calls=tuple(calls), finish=reply.finish
    )


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "script"), SCRIPTS)
@pytest.mark.product
def test_a_message_says_what_a_chat_completion_says(
    name: str, script: str, family: FamilyServer, hearing: Hearing
):
    thinking = {"type": "enabled" if script in reasoning_texts(FORMS[name]) else "disabled"}
    body = {"messages": QUESTION, "tools": ANTHROPIC_TOOLS, "thinking": thinking, **asking(script)}
    whole, stream = answered(family(name), body), streamed(family(name), body)
    assert without_cached(without_ids(stream)) == without_cached(without_ids(whole))
    assert content_of(whole) == with_plain_arguments(hearing(name, script).reply)
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == sorted(kinds, key=["thinking", "text", "tool_use"].index)


def without_cached(message: Json) -> Json:
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    return {**message, "usage": (total, usage["output_tokens"], usage["output_tokens_details"])}


@pytest.mark.sample(20)
@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["ask myself", "\n\n", "\n", "<", "|"], ANSWER, None),
        (["deep"], ANSWER.partition("deep")[0], "deep"),
        (["🌊", "nowhere"], ANSWER.partition("🌊")[0], "🌊"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", THINKING)
def test_a_stop_sequence_ends_a_text_and_no_thinking(
    name: str, stops: list[str], text: str, stop: str | None, family: FamilyServer
):
    body = {
        "messages": QUESTION,
        "thinking": {"type": "enabled"},
        "stop_sequences": stops,
        **asking("reasoned"),
    }
    for reply in answered(family(name), body), streamed(family(name), body):
        assert reply["stop_sequence"] == stop
        assert reply["stop_reason"] == ("end_turn" if stop is None else "stop_sequence")
        blocks = {block["type"]: block for block in reply["content"]}
        assert (blocks["thinking"]["thinking"], blocks["text"]["text"]) == (REASONING, text)


@pytest.mark.thorough
@pytest.mark.parametrize("name", THINKING)
def test_a_stop_sequence_in_thinking_and_in_a_call_is_none(name: str, family: FamilyServer):
    stops = ["resund 🐡", "ask myself", "\n", "<", "{", "read"]
    body = {"messages": QUESTION, "tools": ANTHROPIC_TOOLS, "thinking": {"type": "enabled"}}
    body |= asking("reasoned_call")
    expected = content_of(answered(family(name), body))
    assert len(expected.calls) == 1
    for reply in (send(family(name), {**body, "stop_sequences": stops}) for send in (answered, streamed)):
        assert (content_of(reply), reply["stop_sequence"]) == (expected, None)


# ------------------------------------------------------------------------------------------ what is sent back


class ClaudeCode:
    """A client as Claude Code is one: what it changes from turn to turn is what was recorded of it."""

    def __init__(
        self, server: Server | None = None, *, display: str = "summarized", key: str = "one"
    ) -> None:
        self.server = server
        self.messages: list[Json] = []
        self.usage: Json = {}
        self._display = display
        self._headers = {"x-api-key": key, "x-claude-code-session-id": "u1"}

    def ask(self, *blocks: Json) -> Json:
        """One turn. The newest message carries the mark that the one before it has lost."""
        for earlier in self.messages:
            earlier["content"] = _unmarked(earlier["content"])
        marked = [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]
        self.messages.append({"role": "user", "content": marked})
        assert self.server
        reply = answered(self.server, self.body, self._headers)
        self.messages.append({"role": "assistant", "content": reply["content"]})
        self.usage = reply["usage"]
        return reply

    @property
    def body(self) -> Json:
        header = f"x-anthropic-billing-header: cc_version=2.1.126.d79; cch=d{len(self.messages)};"
        user = {"device_id": "d1", "account_uuid": "", "session_id": "u1"}
        return {
            "system": [
                {"type": "text", "text": header},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "\nWork for the user. Be brief.\n" * 4},
            ],
            "messages": self.messages,
            "tools": ANTHROPIC_TOOLS,
            "thinking": {"type": "adaptive", "display": self._display},
            "metadata": {"user_id": json.dumps(user)},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }

    def results(self, text: str) -> list[Json]:
        """Of all the calls of the last reply."""
        return [
            {"type": "tool_result", "tool_use_id": block["id"], "content": text, "is_error": False}
            for block in self.messages[-1]["content"]
            if block["type"] == "tool_use"
        ]


def _unmarked(content: list[Json] | str) -> list[Json] | str:
    """Without the mark; a text alone becomes a string."""
    if isinstance(content, str):
        return content
    bare = [{name: value for name, value in block.items() if name != "cache_control"} for block in content]
    return bare[0]["text"] if [block["type"] for block in bare] == ["text"] else bare


def text(words: str) -> Json:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`caller("glm")` is the folder of a model that thinks and calls, whatever it is asked.

    Gemma goes on after a result without a turn of its own, and then has an answer.
    """

    @cache
    def folder(name: str) -> Path:
        form = FORMS[name]
        starts = {form.tail: form.reasoning(REASONING) + form.calls(PATH)}
        starts |= {GEMMA_RESULT: ANSWER} if name == "gemma4" else {}
        return write_model(tmp_path_factory.mktemp(name), form.trait, starts=starts)

    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("name", THINKING)
@pytest.mark.product
def test_claude_code_is_bound_at_each_reply(name: str, display: str, caller: Callable[[str], Path]):
    with serving(caller(name)) as server:
        claude = ClaudeCode(server, display=display)
        assert content_of(claude.ask(text("Read it."))).calls[0].name == PATH[0]
        for turn in range(3):
            before = claude.usage
            claude.ask(*(claude.results(f"Turn {turn}.") or [text(f"Turn {turn}.")]))
            known = prompt_tokens(before) + before["output_tokens"] - 1
            assert claude.usage["cache_read_input_tokens"] >= known
            assert claude.usage["input_tokens"] <= CLOSERS
        claude.ask(*claude.results("done"), text("Thanks. Again."))
        assert claude.usage["input_tokens"] <= 2 * CLOSERS
        stats = server.get("/stats")
    assert stats["transcripts"]["bound"] == 4
    assert stats["prompt_cache"]["efficiency"] >= 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("display", ["summarized", "omitted"])
@pytest.mark.parametrize("name", THINKING)
@pytest.mark.product
def test_claude_code_is_bound_after_each_restart(
    name: str, display: str, caller: Callable[[str], Path], tmp_path: Path
):
    claude, known = ClaudeCode(display=display), 0
    for turn in range(4):
        with serving(caller(name), ssd_folder=str(tmp_path)) as claude.server:
            claude.ask(*(claude.results(f"Turn {turn}.") if turn else []), text(f"Turn {turn}."))
            assert claude.usage["cache_read_input_tokens"] >= known
            assert not turn or claude.usage["input_tokens"] <= 2 * CLOSERS
            known = prompt_tokens(claude.usage) + claude.usage["output_tokens"] - 1
            stats = claude.server.get("/stats")
            assert stats["transcripts"]["bound"] == (turn > 0)
            assert stats["prompt_cache"]["efficiency"] in (None, 1.0) or not turn


def prompt_tokens(usage: Json) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


@pytest.mark.thorough
@pytest.mark.parametrize("key", ["one", "two"], ids=["its own", "another tenant's"])
def test_a_signature_alone_gives_its_tenant_the_reasoning_again_on_another_server(
    key: str, caller: Callable[[str], Path]
):
    """As after a restart: nothing of the conversation is known, and the client has left out the text."""
    with ExitStack() as servers:
        claude = ClaudeCode(servers.enter_context(serving(caller("qwen_xml"))), display="omitted")
        claude.ask(text("Read it."))
        other = servers.enter_context(serving(caller("qwen_xml")))
        prompts = noting_prompts(other)
        again = ClaudeCode(other, key=key)
        again.messages = [*claude.messages]
        again.ask(*again.results("done"))
        (read,) = prompts
    assert (REASONING in read) is (key == "one")


def noting_prompts(server: Server) -> list[str]:
    """The texts of the prompts that the engine is given from now on."""
    engine: Any = server.app.runtime.engine
    submit, texts = engine.submit, list[str]()
    token_bytes = server.app.runtime.token_bytes

    def noting(engine_request: Any) -> Any:
        texts.append(b"".join(map(token_bytes, engine_request.prompt.ids)).decode(errors="replace"))
        return submit(engine_request)

    engine.submit = noting
    return texts


@pytest.mark.thorough
def test_one_more_late_tool_changes_nothing_before_its_reference(caller: Callable[[str], Path]):
    with serving(caller("hermes")) as server:
        prompts = noting_prompts(server)
        claude = ClaudeCode(server)
        claude.ask(text("Read it."))
        late = {**ANTHROPIC_TOOLS[0], "name": "erase", "defer_loading": True}
        references = [{"type": "tool_reference", "tool_name": "erase"}]
        results = [{**result, "content": references} for result in claude.results("")]
        claude.messages.append({"role": "user", "content": results})
        body = {**claude.body, "tools": [late, *ANTHROPIC_TOOLS]}
        usage = answered(server, body, claude._headers)["usage"]
    assert usage["cache_read_input_tokens"] >= prompt_tokens(claude.usage)
    before, after = prompts
    assert "erase" not in before
    assert after.index('"erase"') > after.index("</tool_call>")


# -------------------------------------------------------------------------------------- life, failures, paths


@pytest.fixture(scope="module")
def broken_at_will(tiny_model: Callable[..., Path]) -> Iterator[BreakableServer]:
    with breakable(tiny_model("qwen3")) as server:
        yield server


@pytest.fixture
def breaking(broken_at_will: BreakableServer) -> Iterator[BreakableServer]:
    yield broken_at_will
    broken_at_will.network.is_broken = False
    wait_until(lambda: engine_is_free(broken_at_will.port), within_s=10)


def test_a_failure_in_mid_stream_is_an_error_event_and_a_cut_stream(breaking: BreakableServer):
    with Client(breaking.port) as client:
        body = {"model": "x", "max_tokens": 10**5, "messages": QUESTION, "stream": True}
        client.request("POST", PATH_OF_MESSAGES, body)
        _, headers = client.head()
        chunks = client.chunks()
        (start,) = named_events(next(chunks))
        assert start["type"] == "message_start"
        next(chunks)
        breaking.network.is_broken = True
        data = b""
        with pytest.raises(CutOff):
            for chunk in chunks:
                data += chunk
    failure = named_events(data)[-1]
    assert (failure["type"], failure["error"]["type"]) == ("error", "api_error")
    assert "out of order" in failure["error"]["message"]
    assert failure["request_id"] == headers["request-id"] == start["message"]["id"]


def test_a_failure_before_a_whole_reply_is_an_api_error(breaking: BreakableServer):
    breaking.network.is_broken = True
    reply = post(breaking, {"messages": QUESTION})
    assert reply.status == 500
    assert (reply.json["type"], reply.json["error"]["type"]) == ("error", "api_error")


@pytest.mark.long
def test_a_long_prompt_is_read_with_signs_of_life(tiny_model: Callable[..., Path]):
    with serving(tiny_model("qwen3"), keep_alive_s=0.02) as server, Client(server.port) as client:
        long = [{"role": "user", "content": "\x01" * 60_000}]
        client.request("POST", PATH_OF_MESSAGES, {"max_tokens": 9, "messages": long, "stream": True})
        assert client.head()[0] == 200
        chunks = client.chunks()
        assert [named_events(next(chunks))[0]["type"] for _ in range(3)] == ["message_start", "ping", "ping"]


@pytest.mark.thorough
def test_reasoning_that_is_not_shown_is_written_with_signs_of_life(caller: Callable[[str], Path]):
    asked = {"messages": QUESTION, "thinking": {"type": "adaptive", "display": "omitted"}}
    with serving(caller("glm"), keep_alive_s=0.0001) as server:
        reply = post(server, {**asked, "stream": True})
    events = named_events(reply.body)
    kinds = [event.get("delta", {}).get("type", event["type"]) for event in events]
    reasoning = kinds[kinds.index("content_block_start") + 1 : kinds.index("signature_delta")]
    assert set(reasoning) == {"ping"}
    assert put_together(events)["content"][0]["thinking"] == ""


@pytest.mark.thorough
def test_a_stream_of_a_loaded_model_never_says_that_it_is_being_loaded(caller: Callable[[str], Path]):
    with serving(caller("glm"), keep_alive_s=0.0001) as server:
        replies = [post(server, {"messages": QUESTION, "stream": True}) for _ in range(5)]
    assert all(b"being loaded" not in reply.body for reply in replies)


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (message("GET", "/v1/messages"), 405, "invalid_request_error"),
        (message("POST", "/v1/messages/nothing", {}), 404, "not_found_error"),
        (message("POST", "/v1/messages"), 411, "invalid_request_error"),
        (message("POST", "/v1/messages/count_tokens?beta=true", b"{"), 400, "invalid_request_error"),
        (message("POST", "/v1/messages", headers={"Content-Length": str(10**12)}), 413, "request_too_large"),
    ],
    ids=["405", "404", "411", "400", "413"],
)
def test_every_error_has_anthropics_form_and_the_id_of_the_header(
    sent: bytes, status: int, kind: str, family: FamilyServer
):
    with Client(family("hermes").port) as client:
        client.send(sent)
        reply = client.reply()
    assert (reply.status, reply.json["type"], reply.json["error"]["type"]) == (status, "error", kind)
    assert reply.json["request_id"] == reply.headers["request-id"]


def test_a_base_url_that_ends_in_v1_is_reported_in_a_sentence(family: FamilyServer):
    for path in ("/v1/v1/messages", "/v1/v1/messages/count_tokens"):
        reply = ask(family("hermes").port, "POST", path, {"messages": QUESTION})
        assert (reply.status, reply.json["type"]) == (404, "error")
        assert "leave /v1 out of it" in reply.json["error"]["message"]
        assert "Endpoints" not in reply.json["error"]["message"]


def test_a_message_is_known_by_one_id(family: FamilyServer):
    asked = {"messages": QUESTION, "thinking": {"type": "disabled"}, **asking("answer")}
    whole = post(family("hermes"), asked)
    assert whole.headers["request-id"] == whole.json["id"]
    stream = post(family("hermes"), {**asked, "stream": True})
    assert stream.headers["request-id"] == put_together(named_events(stream.body))["id"]


@pytest.mark.parametrize("path", ["/", "/api/hello"])
def test_clients_may_say_hello(path: str, family: FamilyServer):
    with Client(family("hermes").port) as client:
        reply = client.ask("HEAD", path)
        assert (reply.status, reply.body) == (200, b"")
        assert client.ask("GET", "/health").status == 200


def test_a_wrong_method_is_refused(family: FamilyServer):
    assert ask(family("hermes").port, "GET", "/v1/messages").status == 405
    assert ask(family("hermes").port, "GET", "/v1/messages/count_tokens").status == 405


def test_text_before_a_call_and_none_but_white_space(family: FamilyServer):
    body = {"messages": QUESTION, "tools": ANTHROPIC_TOOLS, "thinking": {"type": "disabled"}}
    kinds = [
        [block["type"] for block in answered(family("hermes"), {**body, **asking(script)})["content"]]
        for script in ("prose", "call")
    ]
    assert kinds == [["text", "tool_use"], ["tool_use"]]
    first = answered(family("hermes"), {**body, **asking("prose")})["content"][0]
    assert first == {"type": "text", "text": PROSE}


def test_half_a_character_of_a_call_is_the_same_in_every_reply_and_goes_on(tmp_path: Path):
    """The SDK's helper raises at an escape that is half of a pair."""
    call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "half \\ud83d of 2"}}\n</tool_call>'
    folder = write_model(tmp_path, "strips_old_reasoning", scripts={"half": call, "then": "Yes."})
    with (
        serving(folder, speculation="off") as server,
        anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client,
    ):
        body: Json = {"model": "m", "max_tokens": 99, "messages": QUESTION, "tools": ANTHROPIC_TOOLS}
        whole = client.messages.create(**body, extra_body=asking("half")).content
        with client.messages.stream(**body, extra_body=asking("half")) as stream:
            streamed = stream.get_final_message().content
        made = [block.input for block in (*whole, *streamed) if block.type == "tool_use"]
        assert made == [{"path": "half \ufffd of 2"}] * 2
        content = [block.model_dump(exclude_none=True) for block in streamed]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "None."}
        turns = [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        body["messages"] = [*QUESTION, *turns]
        (block,) = client.messages.create(**body, extra_body=asking("then")).content
        assert block.type == "text" and block.text == "Yes."
