"""Conversations that clients send back changed: what was computed for them is found."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from start_llm.core.engine_request import EngineRequest
from start_llm.engine.prefill import Prefill
from tests.conftest import ChainModel, TinyModel
from tests.server.client import wait_until
from tests.serving import AS_JSON, Server, serving
from tests.ties import Reference, Tally

pytestmark = pytest.mark.sample(3)

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5"]
"""Plain; windows; recurrent layers."""
REPLY_TOKENS = 12
CLOSERS = 20
"""Tokens that a template writes after a reply, around a question and before a reply, at most."""
STATE = 64
"""Tokens after the last place where state was kept, of a network that needs it to branch, at most."""

TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
]

type Message = dict[str, Any]


@dataclass
class Talk:
    """A client on a server of its own, and the prompts that the engine was given."""

    server: Server
    prompts: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])

    def __post_init__(self) -> None:
        engine: Any = self.server.app.runtime.engine
        submit = engine.submit

        def noting(engine_request: EngineRequest) -> Any:
            self.prompts.append(engine_request.prompt.ids)
            return submit(engine_request)

        engine.submit = noting

    def ask(self, messages: Sequence[Message], **more: Any) -> Any:
        body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0, **more}
        return self.server.post("/v1/chat/completions", body)

    def length(self, text: str) -> int:
        return len(self.server.app.runtime.service._requests._tokenizer.encode(text, as_document=False))

    def reply_to(self, messages: Sequence[Message], **more: Any) -> tuple[Message, int]:
        """Return the parts of the reply that a client keeps, and how many prompt tokens were computed."""
        answer = self.ask(messages, **more)
        usage = answer["usage"]
        message = answer["choices"][0]["message"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        return {"role": "assistant", "content": message["content"]}, computed


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Any:
    return tiny_model(request.param, hidden=128, layers=2)


@contextmanager
def talking(folder: Any, **settings: Any) -> Generator[Talk]:
    with serving(folder, thinking=False, **settings) as server:
        yield Talk(server)


@pytest.fixture(scope="module")
def talk(folder: Any) -> Iterator[Talk]:
    with talking(folder) as chat:
        yield chat


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice("fish sea deep net boat tide wind salt".split()) for _ in range(count))


def system(name: str) -> Message:
    return {"role": "system", "content": f"{name}. " + "Be brief and say what you see. " * 8}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def changed(rng: random.Random, messages: Sequence[Message]) -> list[Message]:
    """The same conversation, spelled otherwise."""
    spelled: list[Message] = []
    for message in messages:
        text = message["content"]
        forms = [text, f"{text}\n", [{"type": "text", "text": text}]]
        spelled.append({**message, "content": rng.choice(forms)})
    return spelled


def test_own_replies_are_not_read_again_however_they_are_spelled(talk: Talk):
    rng, messages = random.Random(1), [system("Spelling")]
    for turn in range(4):
        question = user(words(rng, 20))
        reply, computed = talk.reply_to([*changed(rng, messages), question], session_id="spelling")
        messages += [question, reply]
        if turn:
            assert computed <= talk.length(question["content"]) + CLOSERS


@pytest.mark.thorough
@pytest.mark.parametrize("whole_bytes", [1, 2, 3])
def test_a_reply_that_was_cut_inside_a_character_is_not_read_again(chain_model: ChainModel, whole_bytes: int):
    """The hint of the question goes away, as in OpenClaw, and the client sends the reply as it came."""
    fish = "🐟".encode()
    pieces = [fish[:whole_bytes], fish[whole_bytes:]]
    folder = chain_model({"\n\n": [*(f" w{number}".encode() for number in range(40)), *pieces]})
    question = " ".join(words(random.Random(3), 20).split()) * 9
    with talking(folder) as talk:
        messages = [system("Inside"), user(f"[message_id: 7] {question}")]
        reply, _ = talk.reply_to(messages, tools=TOOLS, max_tokens=41, session_id="inside")
        assert reply["content"].endswith("w39\ufffd")
        again = [messages[0], user(question), reply, user("And now?")]
        _, computed = talk.reply_to(again, tools=TOOLS, max_tokens=4, session_id="inside")
        assert computed <= talk.length("\ufffd" + "And now?") + CLOSERS


@pytest.mark.thorough
def test_a_reply_that_was_cut_where_markup_might_have_begun_is_not_read_again(chain_model: ChainModel):
    """`functools[` begins a call in one format, and replies end with an f in all."""
    folder = chain_model({"\n\n": [*(f" w{number}".encode() for number in range(40)), " if", " so"]})
    with talking(folder) as talk:
        messages = [system("Cut"), user("Look.")]
        reply, _ = talk.reply_to(messages, tools=TOOLS, max_tokens=41)
        assert reply["content"].endswith(" if")
        _, computed = talk.reply_to([*messages, reply, user("Go on.")], tools=TOOLS)
    assert computed <= 4 + CLOSERS


@pytest.mark.thorough
def test_a_question_that_nobody_can_prove_is_read_again_and_nothing_in_front_of_it(talk: Talk):
    """Its client sends a line with it that the next request does not have (OpenClaw)."""
    rng, messages, before = random.Random(7), [system("Lines that vanish")], 0
    for turn in range(10):  # more than a conversation keeps states
        question = words(rng, 80)
        newest = user(f"[message_id: {turn:012x}]\n{question}")
        reply, computed = talk.reply_to([*messages, newest])
        messages += [user(question), reply]
        if turn > 1:
            assert computed <= before + talk.length(newest["content"]) + 3 * CLOSERS
        before = talk.length(question) + talk.length(reply["content"])


@pytest.mark.sample(2)
def test_what_is_said_is_what_a_server_without_a_cache_says_to_the_same_tokens(talk: Talk, folder: Any):
    rng, messages, tally = random.Random(2), [system("Truth")], Tally()
    with serving(folder, cache_is_on=False) as plain:
        for _ in range(4):
            question = user(words(rng, 9))
            choice = talk.ask([*changed(rng, messages), question], return_token_ids=True)["choices"][0]
            tally.compare(choice["token_ids"], reference_reply(plain, talk.prompts[-1]))
            messages += [question, {"role": "assistant", "content": choice["message"]["content"]}]
    assert tally.tokens > REPLY_TOKENS
    tally.assert_ties_are_rare()


def reference_reply(plain: Server, prompt: Sequence[int]) -> Reference:
    body = {"prompt": list(prompt), "max_tokens": REPLY_TOKENS, "temperature": 0}
    choice = plain.post("/v1/completions", body | {"logprobs": 2, "return_token_ids": True})["choices"][0]
    best = [sorted(scores.values())[-2:] for scores in choice["logprobs"]["top_logprobs"]]
    return Reference(tuple(choice["token_ids"]), tuple(high - low for low, high in best))


@pytest.mark.thorough
def test_without_a_cache_the_same_tokens_are_prepared(talk: Talk, folder: Any):
    """So that the two can be compared at all."""
    with ExitStack() as servers:
        plain = servers.enter_context(talking(folder, cache_is_on=False))
        rng, messages = random.Random(3), [system("Both")]
        for _ in range(3):
            question = user(words(rng, 9))
            sent = [*changed(rng, messages), question]
            reply, _ = talk.reply_to(sent, session_id="both")
            plain.reply_to(sent, session_id="both")
            assert talk.prompts[-1] == plain.prompts[-1]
            messages += [question, reply]
        assert plain.server.get("/stats")["transcripts"]["bound"] == 2


@pytest.mark.thorough
def test_with_the_policy_exact_it_says_what_a_server_without_a_cache_says(folder: Any):
    """With a clock that changes in each turn: nothing of the old one is read."""
    rng, messages, tally = random.Random(6), [system("Exact")], Tally()
    with ExitStack() as servers:
        exact = servers.enter_context(talking(folder, drift="exact"))
        plain = servers.enter_context(talking(folder, drift="exact", cache_is_on=False))
        for minute in range(3):
            clock = {**messages[0], "content": f"Current time is 10:0{minute}.\n{messages[0]['content']}"}
            sent = [clock, *messages[1:], user(words(rng, 9))]
            choice = exact.ask(sent, return_token_ids=True)["choices"][0]
            tally.compare(choice["token_ids"], chatted(plain.server, sent))
            assert exact.prompts[-1] == plain.prompts[-1]
            assert text_of(exact, exact.prompts[-1]).count("Current time is") == 1
            messages += [sent[-1], {"role": "assistant", "content": choice["message"]["content"]}]
    assert tally.tokens > REPLY_TOKENS
    tally.assert_ties_are_rare()


@pytest.mark.thorough
def test_with_the_policy_exact_all_is_reused_up_to_the_changed_field_and_nothing_after_it(folder: Any):
    """Up to the very token where no layer has state, else up to the last place before it with state."""
    rng = random.Random(7)
    front, after = words(rng, 300), words(rng, 300)

    def clocked(minute: int) -> list[Message]:
        return [system(f"{front}\nCurrent time is 10:0{minute}.\n{after}"), user("And?")]

    with talking(folder, drift="exact") as talk:
        talk.reply_to(clocked(1))
        _, computed = talk.reply_to(clocked(2))
        was, now = talk.prompts
        cuts_anywhere = talk.server.get("/stats")["prompt_cache"]["checkpoints"] == 0
    changed = next(place for place, (old, new) in enumerate(zip(was, now, strict=True)) if old != new)
    assert changed > 300
    reused = len(now) - computed
    assert reused == changed if cuts_anywhere else reused <= changed


def chatted(plain: Server, messages: Sequence[Message]) -> Reference:
    body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0, "return_token_ids": True}
    answer = plain.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 2})
    choice = answer["choices"][0]
    best = [
        sorted(entry["logprob"] for entry in token["top_logprobs"]) for token in choice["logprobs"]["content"]
    ]
    return Reference(tuple(choice["token_ids"]), tuple(high - low for low, high in best))


@pytest.mark.thorough
def test_sub_agents_do_not_disturb_and_a_branch_returns_to_where_it_was(talk: Talk):
    rng = random.Random(4)
    main = [system("Branch"), user(words(rng, 30))]
    first, _ = talk.reply_to(main, session_id="s")
    main += [first, user(words(rng, 30))]
    second, _ = talk.reply_to(main, session_id="s")
    main.append(second)
    for agent in range(5):
        talk.reply_to([system("Branch"), user(f"{agent} " + words(rng, 30))], session_id="s")
    has_state = talk.server.get("/stats")["prompt_cache"]["checkpoints"] > 0
    for beginning in (main[:3], main):
        question = user(words(rng, 5))
        _, computed = talk.reply_to([*beginning, question], session_id="s")
        assert computed <= talk.length(question["content"]) + CLOSERS + has_state * STATE


def test_a_conversation_that_was_edited_is_another_one_from_there_on(talk: Talk):
    rng = random.Random(5)
    messages = [system("Edit"), user("I live in Bremen. " + words(rng, 30))]
    reply, _ = talk.reply_to(messages)
    edited = [messages[0], user(messages[1]["content"].replace("Bremen", "Lübeck")), reply, user("Where?")]
    talk.reply_to(edited)
    shown = text_of(talk, talk.prompts[-1])
    assert "Lübeck" in shown and "Bremen" not in shown


def text_of(talk: Talk, ids: Sequence[int]) -> str:
    token_bytes = talk.server.app.runtime.token_bytes
    return b"".join(map(token_bytes, ids)).decode(errors="replace")


@pytest.mark.thorough
def test_a_first_turn_that_was_given_up_late_is_not_read_twice(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    """No drift, no reply: what was computed of the prompt is enough."""
    give_up(talk, retried(0), monkeypatch)
    _, computed = talk.reply_to(retried(0))
    assert computed <= 0.25 * len(talk.prompts[-1])


@pytest.mark.thorough
def test_a_first_turn_goes_on_with_another_clock(talk: Talk, monkeypatch: pytest.MonkeyPatch):
    """It stands in the system prompt; the question, which is most of the prompt, gets the new one."""
    give_up(talk, retried(1, "Current time is 10:00.\n"), monkeypatch)
    _, computed = talk.reply_to(retried(1, "Current time is 10:07.\n"))
    assert computed <= 0.25 * len(talk.prompts[-1])
    read = text_of(talk, talk.prompts[-1])
    assert read.index("Current time is 10:00.") < read.index("[Now: Current time is 10:07.]")


def retried(seed: int, clock: str = "") -> list[Message]:
    return [system(f"{clock}Retry {seed}"), user(words(random.Random(seed), 1500))]


def give_up(talk: Talk, messages: Sequence[Message], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave once four fifths of the prompt are computed: its prefill waits there until it is cancelled."""
    reached, step = threading.Event(), Prefill.step

    def held(prefill: Prefill, allowance: int) -> int:
        computed = step(prefill, allowance)
        if 0.8 * prefill.total <= prefill.done < prefill.total - 1:
            reached.set()
            wait_until(lambda: prefill.sequence.generation.cancelled, within_s=30)
        return computed

    with monkeypatch.context() as patch:
        # A fast model would skip the moment.
        patch.setattr("start_llm.engine.start_measurements.LONGEST_CHUNK", 256)
        patch.setattr(Prefill, "step", held)
        body = {"messages": messages, "max_tokens": 4, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", talk.server.port, timeout=60)
        connection.request("POST", "/v1/chat/completions", json.dumps(body), AS_JSON)
        assert connection.getresponse().status == 200
        assert reached.wait(60)
        connection.close()
        wait_until(lambda: not talk.server.get("/stats")["requests"]["in_flight"], within_s=30)


@pytest.mark.thorough
def test_what_conversations_have_in_common_counts_as_new_while_the_first_is_being_read(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
):
    rules = {"role": "system", "content": "At once. " + words(random.Random(7), 1500)}
    before = talk.server.get("/stats")["prompt_cache"]
    ask_at_once(talk, [rules, user("Fish?")], [rules, user("Boats?")], monkeypatch)
    after = talk.server.get("/stats")["prompt_cache"]
    computed, unavoidable = (after[name] - before[name] for name in ("computed_tokens", "unavoidable_tokens"))
    assert len(talk.prompts[-1]) <= computed <= len(talk.prompts[-1]) + STATE + CLOSERS
    assert computed - unavoidable <= STATE


def ask_at_once(
    talk: Talk, first: Sequence[Message], second: Sequence[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is asked in the middle of the first one's prompt."""
    reached, step = threading.Event(), Prefill.step

    def held(prefill: Prefill, allowance: int) -> int:
        computed = step(prefill, allowance)
        if 0 < prefill.done < 0.5 * prefill.total:
            reached.set()
            wait_until(lambda: talk.server.get("/stats")["requests"]["in_flight"] == 2, within_s=30)
        return computed

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr("start_llm.engine.start_measurements.LONGEST_CHUNK", 256)
        patch.setattr(Prefill, "step", held)
        answer = pool.submit(talk.ask, first)
        assert reached.wait(60)
        talk.ask(second)
        answer.result(60)
