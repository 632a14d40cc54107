"""Long prompts of three real agents: a part of `agents.py`."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benchmarks.harness import ROOT, row, table
from scripts import real_model
from start_llm.core import chat
from start_llm.core.chat import ChatRequest
from tests.agents.agent_account import Charge, Ledger, Message, Rendering, Request
from tests.serving import Server, serving
from tests.transcripts.recorded import parsed, raw_recording

CLIENTS = ("claude", "codex", "pi")
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat": "/v1/chat/completions"}
LIMITS = {"messages": "max_tokens", "responses": "max_output_tokens", "chat": "max_completion_tokens"}

type Body = dict[str, Any]


# ------------------------------------------------------------------------------------------------ the prompts


@dataclass(frozen=True)
class Prompt:
    """A request of a client, as it is sent and as it is charged."""

    path: str
    headers: dict[str, str]
    body: Body
    charged: Request


class Reading:
    """Real text, piece by piece: no two pieces are alike."""

    def __init__(self, rendering: Rendering) -> None:
        self._rendering = rendering
        files = sorted((ROOT / "start_llm").rglob("*.py"))
        self._lines = chain.from_iterable(path.read_text(encoding="utf-8").splitlines(True) for path in files)
        self._guide = chain.from_iterable(
            path.read_text(encoding="utf-8").splitlines(True)
            for path in (ROOT / "CLAUDE.md", ROOT / "docs" / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md")
        )

    def guide(self, tokens: int) -> str:
        return self._piece(self._guide, tokens)

    def source(self, tokens: int) -> str:
        return self._piece(self._lines, tokens)

    def _piece(self, lines: Iterator[str], tokens: int) -> str:
        text = ""
        for line in lines:
            text += line
            tokens -= len(self._rendering.encode(line))
            if tokens <= 0:
                break
        return text


def with_texts(protocol: str, body: Body, guide: str, results: Sequence[str]) -> Body:
    """A recorded body whose instructions end with `guide`, and whose tools return `results` one by one."""
    opening, returned = PLACES[protocol](body)
    opening["text" if "text" in opening else "content"] += guide
    for (part, field), text in zip(returned, cycle(results), strict=False):
        part[field] = text
    return body


def places_in_messages(body: Body) -> tuple[Body, list[tuple[Body, str]]]:
    parts = (
        part
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
    )
    return body["system"][-1], [(part, "content") for part in parts if part["type"] == "tool_result"]


def places_in_responses(body: Body) -> tuple[Body, list[tuple[Body, str]]]:
    outputs = [(item, "output") for item in body["input"] if item["type"] == "function_call_output"]
    return body["input"][0]["content"][0], outputs


def places_in_chat(body: Body) -> tuple[Body, list[tuple[Body, str]]]:
    results = [(message, "content") for message in body["messages"] if message["role"] == "tool"]
    return body["messages"][0], results


PLACES: dict[str, Callable[[Body], tuple[Body, list[tuple[Body, str]]]]] = {
    "messages": places_in_messages,
    "responses": places_in_responses,
    "chat": places_in_chat,
}
"""What holds the last of the instructions, and the results of tools with the field that each is in."""


def conversation(client: str, rendering: Rendering, tokens: int) -> list[Prompt]:
    """The requests of a recording, grown until the last prompt has about so many tokens."""
    recorded = raw_recording(client)
    reading = Reading(rendering)
    guide = reading.guide(tokens * 2 // 5)
    results = [reading.source(tokens // 5) for _ in range(3)]
    prompts: list[Prompt] = []
    for exchange in recorded["exchanges"]:
        protocol = recorded["protocol"]
        body = with_texts(protocol, {**exchange["request"], "tools": recorded["tools"]}, guide, results)
        body |= {"stream": False, "temperature": 0, LIMITS[protocol]: 1}
        body.pop("stream_options", None)
        charged = Request.of(*charged_as(parsed(protocol, body, exchange["headers"])))
        prompts.append(Prompt(PATHS[protocol], exchange["headers"], body, charged))
    return prompts


def charged_as(request: ChatRequest) -> tuple[list[Message], list[Body]]:
    """Messages and tools of a parsed request, in the form of the account."""
    return [message_of(message) for message in request.messages], [dict(tool) for tool in request.tools]


def message_of(message: chat.Message) -> Message:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    converted: Message = {"role": message.role, "content": message.content}
    converted |= {"tool_calls": calls} if calls else {}
    return converted | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


# ------------------------------------------------------------------------------------------------ the measure


@dataclass(frozen=True)
class Answer:
    """What a prompt cost, in tokens and in seconds to the first token, and what it had to cost."""

    computed: int
    seconds: float
    charge: Charge


def ask(server: Server, prompt: Prompt, ledger: Ledger) -> Answer:
    charge = ledger.charge(prompt.charged)
    before = server.get("/stats")["engine"]["prefilled_tokens"]
    began = time.perf_counter()
    server.post(prompt.path, prompt.body, prompt.headers)
    seconds = time.perf_counter() - began
    computed = server.get("/stats")["engine"]["prefilled_tokens"] - before + 1
    return Answer(computed, seconds, charge)


def long(
    _: Path,
    *,
    clients: Annotated[Sequence[str], CLIENTS] = CLIENTS,
    tokens: Sequence[int] = (2048, 4096, 8192, 16384),
    kind: Annotated[str, real_model.KINDS] = "float32",
    wheels: Path | None = None,
) -> None:
    """Long prompts of three real agents on a real tokenizer: tokens computed, and times to the first one.

    The recorded conversations of Claude Code (Messages), Codex (Responses) and pi (chat), with their own
    fields, ids and metadata, get this project's guide for agents as system prompt and its sources as results
    of their tools, so that the last prompt has about so many tokens. Gemma 3 270M (`scripts/real_model.py`)
    reads them.

    All requests but the last go to one server, the last one to another that was started on the same disk
    cache. Efficiency is unavoidable / computed tokens, as for `turns`: what the recorded replies say is new
    to this model. A reply has one token, so the time of an answer is the time to the first token; "cold" is
    that of the last prompt on a server which keeps nothing. The tokens of the prompt are those of the last
    request.

    Args:
        tokens: of the last prompt
        wheels: a folder with the wheels of the packages
    """
    folder = real_model.model_folder(kind, real_model.default_folder(), wheels)
    rendering = Rendering(folder)
    table(
        "client | prompt | requests | computed | unavoidable | efficiency | first token, warm ÷ cold | "
        "computed after a restart | unavoidable | first token ÷ cold"
    )
    for length in tokens:
        for client in clients:
            row(client, *_long_cells(folder, rendering, conversation(client, rendering, length)))


def _long_cells(folder: Path, rendering: Rendering, prompts: Sequence[Prompt]) -> list[str]:
    *before, last = prompts
    ledger = Ledger(rendering)
    with TemporaryDirectory() as disk:
        with serving(folder, ssd_folder=disk, drain_s=60) as server:
            answers = [ask(server, prompt, ledger) for prompt in before]
        with serving(folder, ssd_folder=disk) as server:
            restarted = ask(server, last, ledger)
    with serving(folder, cache_is_on=False) as server:
        cold = [ask(server, prompt, Ledger(rendering)) for prompt in prompts]
    computed = sum(answer.computed for answer in answers)
    unavoidable = sum(answer.charge.unavoidable for answer in answers)
    pairs = zip(answers[1:], cold[1:-1], strict=True)
    ratios = [warm_answer.seconds / cold_answer.seconds for warm_answer, cold_answer in pairs]
    return [
        *(
            f"{count:,}"
            for count in (len(rendering.tokens(last.charged)), len(answers), computed, unavoidable)
        ),
        *(f"{unavoidable / computed:.3f}", f"{statistics.median(ratios):.3f}"),
        *(f"{count:,}" for count in (restarted.computed, restarted.charge.unavoidable)),
        f"{restarted.seconds / cold[-1].seconds:.3f}",
    ]
