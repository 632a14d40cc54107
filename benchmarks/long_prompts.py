"""Long prompts of three real agents on a real tokenizer: tokens that are computed, and times to the first.

    python benchmarks/long_prompts.py [--clients NAME ...] [--tokens N ...] [--kind float32] [--wheels FOLDER]

The recorded conversations of Claude Code (Messages), Codex (Responses) and pi (chat), with their own fields,
ids and metadata, get this project's guide for agents as system prompt and its sources as results of their
tools, so that the last prompt has about so many tokens. Gemma 3 270M (`scripts/real_model.py`) reads them.

All requests but the last go to one server, the last one to another that was started on the same disk cache.
Efficiency is unavoidable / computed tokens, as in `agent_turns.py`: what the recorded replies say is new to
this model. A reply has one token, so the time of an answer is the time to the first token; "cold" is that of
the last prompt on a server which keeps nothing. The tokens of the prompt are those of the last request.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from benchmarks.agent_account import Charge, Ledger, Message, Rendering, Request  # noqa: E402
from scripts import real_model  # noqa: E402
from start_llm.core import chat  # noqa: E402
from start_llm.core.chat import ChatRequest  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from tests.serving import Server, serving  # noqa: E402
from tests.transcripts.recorded import parsed, raw_recording  # noqa: E402

CLIENTS = ("claude", "codex", "pi")
PATHS = {"messages": "/v1/messages", "responses": "/v1/responses", "chat": "/v1/chat/completions"}
LIMITS = {"messages": "max_tokens", "responses": "max_output_tokens", "chat": "max_completion_tokens"}
COLUMNS = (
    "client | prompt | requests | computed | unavoidable | efficiency | first token, warm ÷ cold |"
    " computed after a restart | unavoidable | first token ÷ cold"
)

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
    return [message_of(one) for one in request.messages], [dict(tool) for tool in request.tools]


def message_of(message: chat.Message) -> Message:
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    said: Message = {"role": message.role, "content": message.content}
    said |= {"tool_calls": calls} if calls else {}
    return said | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


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


def row(folder: Path, rendering: Rendering, client: str, tokens: int) -> str:
    *before, last = conversation(client, rendering, tokens)
    ledger = Ledger(rendering)
    with tempfile.TemporaryDirectory() as disk:
        with serving(folder, ssd_folder=disk, drain_s=60) as server:
            answers = [ask(server, prompt, ledger) for prompt in before]
        with serving(folder, ssd_folder=disk) as server:
            restarted = ask(server, last, ledger)
    with serving(folder, cache_is_on=False) as server:
        cold = [ask(server, prompt, Ledger(rendering)) for prompt in (*before, last)]
    computed = sum(answer.computed for answer in answers)
    unavoidable = sum(answer.charge.unavoidable for answer in answers)
    warm = [one.seconds / other.seconds for one, other in zip(answers[1:], cold[1:-1], strict=True)]
    cells = [
        client,
        f"{len(rendering.tokens(last.charged)):,}",
        f"{len(answers)}",
        f"{computed:,}",
        f"{unavoidable:,}",
        f"{unavoidable / computed:.3f}",
        f"{statistics.median(warm):.3f}",
        f"{restarted.computed:,}",
        f"{restarted.charge.unavoidable:,}",
        f"{restarted.seconds / cold[-1].seconds:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--kind", choices=real_model.KINDS, default="float32")
    parser.add_argument("--wheels", type=Path, help="a folder with the wheels of the packages")
    options = parser.parse_args()
    folder = real_model.model_folder(options.kind, real_model.default_folder(), options.wheels)
    rendering = Rendering(folder)
    print(f"{servers.machine('mlx', 'mlx-lm')}\n\n    {shlex.join(['python', *sys.argv])}\n")
    print(f"| {COLUMNS} |\n|{'---|' * (COLUMNS.count('|') + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as state:
        os.environ["STATE_ROOT"] = state
        for tokens in options.tokens:
            for client in options.clients:
                print(row(folder, rendering, client, tokens), flush=True)


if __name__ == "__main__":
    run_with_openblas()
    main()
