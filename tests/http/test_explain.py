"""POST /v1/cache/explain, and the same in the trace and, in plain words, in the terminal."""

from __future__ import annotations

import threading
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TinyModel
from tests.http.forms import FORMS, reasoning_texts
from tests.http.scripts import asking, write_model
from tests.http.test_trace import traced
from tests.server.client import CHAT, engine_is_free, wait_until
from tests.server.client import ask as call
from tests.serving import Server, serving

pytestmark = pytest.mark.sample(3)

PATH = "/v1/cache/explain"
RULES = "Look after the lighthouse. " * 30
MUCH = "Where is the boat, and who has rowed it there? " * 12
FAMILIES = ["qwen3", "gemma3_text", "qwen3_5"]

type Message = dict[str, Any]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Any:
    return tiny_model(request.param, hidden=128, layers=2)


def conversation(date: str = "21 November 2026", rules: str = RULES, question: str = MUCH) -> list[Message]:
    return [
        {"role": "system", "content": f"Today's date: {date}\n{rules}"},
        {"role": "user", "content": question},
    ]


def body(messages: list[Message], **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 12, "temperature": 0, "session_id": "lamp", **more}


def ask(server: Server, messages: list[Message], **more: Any) -> tuple[list[Message], dict[str, Any]]:
    """The conversation with the reply and another question, and the usage."""
    answer = server.post("/v1/chat/completions", body(messages, **more))
    text = answer["choices"][0]["message"]["content"]
    new_messages = [{"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    return [*messages, *new_messages], answer["usage"]


def with_first(messages: list[Message], **changes: str) -> list[Message]:
    return [conversation(**changes)[0], *messages[1:]]


CHANGES = {
    "nothing": ({}, None, None),
    "a date": ({"date": "22 November 2026"}, "live", "today's date"),
    "rules": ({"rules": f"{RULES}Look twice."}, "content", None),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sample(12)
def test_what_is_said_of_a_request_is_what_then_happens_to_it(folder, name):
    changes, drift, rule = CHANGES[name]
    with serving(folder, thinking=False) as server:
        grown, _ = ask(server, conversation())
        changed = with_first(grown, **changes)
        report = server.post(PATH, body(changed))
        again = server.post(PATH, body(changed))
        _, usage = ask(server, changed)
    assert report == again
    assert (report["prompt_tokens"], report["cached_tokens"]) == (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    divergence = report["divergence"]
    assert (divergence and (divergence["class"], divergence["rule"])) == (drift and (drift, rule))
    assert report["compared_with"]["messages"] == 3


def test_lost_tokens_are_those_of_the_messages_that_stayed_the_same(folder):
    with serving(folder, thinking=False) as server:
        grown, _ = ask(server, conversation())
        info = server.post(PATH, body(with_first(grown, rules=f"Look twice. {RULES}")))
    assert info["divergence"]["message"] == 0
    assert "Look after" in info["divergence"]["computed"]
    assert "Look twice" in info["divergence"]["asked"]
    assert info["cached_tokens"] < 30
    assert info["lost_tokens"] > 100
    assert f"{info['lost_tokens']:,} tokens again: message 0 (system) says something else" in info["summary"]


def test_explaining_costs_no_generation_and_no_token(folder):
    with serving(folder, thinking=False) as server:
        grown, _ = ask(server, conversation())
        wait_until(lambda: engine_is_free(server.port), within_s=5)
        before = server.get("/stats")
        server.post(PATH, body(with_first(grown, rules="Be brief.")))
        wait_until(lambda: engine_is_free(server.port), within_s=5)
        after = server.get("/stats")
    assert after == before | {name: after[name] for name in after if "uptime" in name}


@pytest.mark.thorough
def test_it_answers_while_a_reply_is_written(folder):
    with serving(folder, thinking=False) as server:
        grown, _ = ask(server, conversation())
        running = threading.Thread(
            target=ask, args=(server, conversation(question="Tell!")), kwargs={"max_tokens": 200}
        )
        running.start()
        assert server.post(PATH, body(grown))["lost_tokens"] == 0
        assert running.is_alive()
        running.join()


def test_nobody_learns_of_what_another_key_has_asked(folder):
    def explained(key: str) -> Any:
        changed = body(with_first(conversation(), rules="Another."))
        return call(server.port, "POST", PATH, changed, {"Authorization": f"Bearer {key}"}).json

    with serving(folder, thinking=False, isolates_tenants=True) as server:
        call(server.port, "POST", CHAT, body(conversation()), {"Authorization": "Bearer one"})
        mine, theirs = explained("one"), explained("two")
    assert mine["divergence"]["computed"]
    assert (theirs["compared_with"], theirs["divergence"], theirs["differences"]) == (None, None, [])


@pytest.mark.parametrize(
    ("sent", "status", "names"),
    [
        ({"messages": "hello"}, 400, "messages"),
        ({}, 400, "messages"),
        ({"messages": [], "tools": 3}, 400, "tools"),
    ],
)
def test_a_bad_body_is_refused_as_a_chat_request_is(folder, sent, status, names):
    with serving(folder, thinking=False) as server:
        refusal = call(server.port, "POST", PATH, sent)
    assert refusal.status == status
    assert names in refusal.json["error"]["message"]


def test_it_is_asked_by_post(folder):
    with serving(folder, thinking=False) as server:
        refusal = call(server.port, "GET", PATH)
    assert (refusal.status, "POST" in refusal.json["error"]["message"]) == (405, True)


@pytest.mark.thorough
def test_the_line_of_a_request_says_why_it_was_read_again_and_its_trace_says_the_same(folder, tmp_path):
    with traced(folder, tmp_path / "traces") as desk:
        grown, _ = ask(desk.server, conversation())
        ask(desk.server, with_first(grown, rules=f"Look twice. {RULES}"))
        first, second = desk.lines()
        lines = [line for line in desk.server.printed().splitlines() if "tokens again" in line]
    assert len(lines) == 1
    assert lines[0].endswith(
        f"read {second['lost_tokens']:,} tokens again: message 1 (system) says something else"
    )
    assert (second["drift_class"], second["divergent_message"]) == ("content", 0)
    assert second["divergent_token"] < 40
    assert (first["drift_class"], first["lost_tokens"]) == (None, 0)


def cutting_template(characters: int) -> str:
    """The demo model's template, which shows so many characters of a prompt and nothing of later messages."""
    text = (Path(__file__).parents[2] / "scripts/demo_model/chat_template.jinja").read_text(encoding="utf-8")
    return text.replace("16000", str(characters))


@pytest.mark.thorough
def test_behind_a_template_that_cuts_long_prompts_nothing_is_called_read_again(tiny_model):
    """It shows neither the reply nor the next question, so where the one ends is unknown."""
    folder = tiny_model("qwen3", hidden=128, layers=2, chat_template=cutting_template(600))
    with serving(folder, thinking=False) as server:
        talk, usage = ask(server, [{"role": "user", "content": MUCH * 2}])
        for _ in range(2):
            talk, usage = ask(server, talk)
        report = server.post(PATH, body(talk))
        printed = server.printed()
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] - 40
    assert "again" not in printed
    assert (report["lost_tokens"], report["summary"].partition(":")[0]) == (0, "nothing again")


@pytest.mark.thorough
def test_a_reply_that_its_template_shows_without_its_reasoning_is_read_again_for_that_reason(tmp_path):
    form = FORMS["hermes"]
    folder = write_model(tmp_path, form.trait, scripts=reasoning_texts(form))
    with serving(folder, kept_reasoning="false") as server:
        talk, _ = ask(server, conversation(), **asking("reasoned"), max_tokens=200)
        report = server.post(PATH, body(talk, **asking("reasoned")))
    assert (report["lost_tokens"] > 0, report["differences"]) == (True, [])
    assert "the template shows earlier messages otherwise than they were computed" in report["summary"]


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_nobody_learns_of_another_conversation_in_the_terminal(folder):
    """Chats that begin alike, with other tools each; the second of two with one name continues the first."""

    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}

    with serving(folder, thinking=False) as server:
        for session, name in (("", "read"), ("", "write"), ("one", "list"), ("one", "find")):
            named = {"session_id": session} if session else {"session_id": None}
            ask(server, conversation(), tools=[tool(name)], **named)
        wait_until(lambda: engine_is_free(server.port), within_s=5)
        lines = [line for line in server.printed().splitlines() if " written " in line]
    assert ["again" in line for line in lines] == [False, False, False, True]
    reason = lines[-1].partition("tokens again: ")[2]
    assert reason.startswith(("the request has other tools", "this model can only resume at certain points"))


@pytest.mark.thorough
def test_a_prompt_of_any_protocol_is_explained(tiny_model: TinyModel):
    first, more = conversation(), [{"role": "user", "content": MUCH}]
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": first, "max_tokens": 2},
        "/v1/messages": {"system": first[0]["content"], "messages": first[1:], "max_tokens": 2},
        "/v1/responses": {"instructions": first[0]["content"], "input": more, "max_output_tokens": 16},
    }
    explained = {path: f"{PATH}/{path.rpartition('/')[2]}" for path in asked} | {CHAT: PATH}
    with serving(tiny_model("qwen3", hidden=128, layers=2)) as server:
        for path, request in asked.items():
            key = {"Authorization": f"Bearer {path}"}
            assert server.post(explained[path], request, key)["cached_tokens"] == 0
            server.post(path, request, key)
            report = server.post(explained[path], request, key)
            assert report["cached_tokens"] == report["prompt_tokens"] - 1 > 100
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post(f"{PATH}/messages", {"messages": 3, "max_tokens": 2})
        assert refused.value.code == 400
