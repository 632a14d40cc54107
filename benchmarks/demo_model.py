"""How often the demo model does what it was trained for."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks import servers
from benchmarks.harness import ROOT, Part, refuse, row, table
from scripts.demo_model.conversations import ANSWER, REASONING, RETURNED, TOO_LONG
from scripts.demo_model.corpus import read_corpus
from scripts.demo_model.wordings import filled
from scripts.demo_model.words import Words

PACKAGES = ("mlx", "mlx-lm", "litellm")

LONGEST, BEYOND = 4500, 10_000
"""Tokens that are surely not too long for the model, and that surely are."""
FILLERS = 10
AT_ONCE = 4


def _wordings(name: str) -> tuple[str, ...]:
    return tuple((ROOT / "benchmarks" / "wordings" / name).read_text(encoding="utf-8").splitlines())


CALLS, ECHOES, QUESTIONS = _wordings("calls.txt"), _wordings("echoes.txt"), _wordings("questions.txt")
VERBS = ("run", "read", "examine", "retrieve", "inspect", "query", "visit", "evaluate")
DESCRIPTIONS = (
    "Does it, and returns the outcome as text.",
    "Takes one thing and gives another back. May take a while.",
)


@dataclass(frozen=True)
class Prompt:
    """A conversation, and what is to come of it.

    Attributes:
        call: name and arguments; None if the answer is text.
    """

    behaviour: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    text: str
    call: tuple[str, dict[str, str]] | None = None
    thinks: bool = False


@dataclass(frozen=True)
class Verdict:
    """Of one prompt: what was right, and what came."""

    prompt: Prompt
    answer: bool
    reasoning: bool
    prompt_tokens: int
    output: str


@dataclass(frozen=True)
class Job:
    """A call that is wanted, and how it is asked for."""

    text: str
    name: str
    arguments: dict[str, str]
    tools: list[dict[str, Any]]


class Examiner:
    """Writes prompts of one length."""

    def __init__(self, tokens: int, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = random.Random(seed)
        self._words = Words(self._rng, held_out=True)
        self._trained_lines = frozenset(read_corpus(held_out=False).lines)
        self._is_beyond = tokens >= BEYOND
        self._fillers = [self._filler(tokens, tokenizer) for _ in range(1 if self._is_beyond else FILLERS)]

    def _filler(self, tokens: int, tokenizer: Tokenizer) -> str:
        encoding = tokenizer.encode(self._words.filler(4 * tokens))
        return tokenizer.decode(encoding.ids[:tokens], skip_special_tokens=False)

    def prompts(self, count: int) -> Iterator[Prompt]:
        """So many of each behaviour, those after the same text one after another."""
        makers = (self._plain, self._echo, partial(self._call, 1), partial(self._call, 3), self._result)
        for number in range(count):
            filler = self._fillers[number * len(self._fillers) // count]
            for make in makers:
                yield self._finished(make(), filler, thinks=number % 2 == 0)

    def _finished(self, prompt: Prompt, filler: str, *, thinks: bool) -> Prompt:
        messages = [{"role": "system", "content": filler}, *prompt.messages]
        prompt = replace(prompt, messages=messages, thinks=thinks)
        return replace(prompt, text=TOO_LONG, call=None) if self._is_beyond else prompt

    def _plain(self) -> Prompt:
        text = filled(self._words, self._rng.choice(QUESTIONS))
        return Prompt("plain", [_user(text)], self._tools(self._rng.choice((0, 1, 3))), ANSWER)

    def _echo(self) -> Prompt:
        wanted = self._words.word_to_say()
        text = self._rng.choice(ECHOES).replace("{x}", wanted)
        return Prompt("echo", [_user(text)], self._tools(self._rng.choice((0, 1, 3))), wanted)

    def _call(self, offered: int) -> Prompt:
        job = self._job(offered)
        return Prompt(f"call, {offered} offered", [_user(job.text)], job.tools, "", (job.name, job.arguments))

    def _result(self) -> Prompt:
        job = self._job(self._rng.choice((1, 3)))
        result, first = self._words.result()
        while first in self._trained_lines:
            result, first = self._words.result()
        function = {"name": job.name, "arguments": json.dumps(job.arguments)}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        }
        returned = {"role": "tool", "tool_call_id": "call_1", "content": result}
        return Prompt("result", [_user(job.text), call, returned], job.tools, RETURNED + first)

    def _job(self, offered: int) -> Job:
        tools = self._tools(offered)
        function, wording = self._rng.choice(tools)["function"], self._rng.choice(CALLS)
        name, (key,) = function["name"], function["parameters"]["required"]
        value = self._words.value()
        while '"' in wording and '"' in value:  # nobody could tell where it ends
            value = self._words.value()
        text = wording.replace("{verb}", self._rng.choice(VERBS))
        return Job(text.replace("{name}", name).replace("{value}", value), name, {key: value}, tools)

    def _tools(self, count: int) -> list[dict[str, Any]]:
        names: dict[str, None] = {}
        while len(names) < count:
            names[self._words.tool_name()] = None
        return [_tool(name, self._rng.choice(DESCRIPTIONS), self._schema()) for name in names]

    def _schema(self) -> dict[str, Any]:
        """The required parameter stands anywhere among the others."""
        keys = list(dict.fromkeys(self._words.parameter() for _ in range(self._rng.randint(1, 4))))
        properties = {key: {"type": "string", "description": self._words.phrase(2, 6)} for key in keys}
        return {"type": "object", "properties": properties, "required": [self._rng.choice(keys)]}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def ask(port: int, prompt: Prompt) -> Verdict:
    body = {
        "model": "demo",
        "messages": prompt.messages,
        "temperature": 0,
        "max_tokens": 400,
        "reasoning_effort": "medium" if prompt.thinks else "none",
        **({"tools": prompt.tools} if prompt.tools else {}),
    }
    reply = servers.ask(port, "/v1/chat/completions", body)
    if "choices" not in reply:
        raise SystemExit(f"The server refused a prompt: {reply}")
    return judge(prompt, reply)


def judge(prompt: Prompt, reply: Mapping[str, Any]) -> Verdict:
    choice, behaviour = reply["choices"][0], prompt.behaviour.partition(",")[0]
    message = choice["message"]
    reasoning, text = (message.get("reasoning_content") or "").strip(), message.get("content") or ""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [(function["name"], function["arguments"]) for function in functions]
    is_whole = choice["finish_reason"] != "length"
    wanted = REASONING["long" if prompt.text == TOO_LONG else behaviour] if prompt.thinks else ""
    return Verdict(
        prompt,
        answer=is_whole and text == prompt.text and _are_those_wanted(calls, prompt.call),
        reasoning=reasoning == wanted,
        prompt_tokens=reply["usage"]["prompt_tokens"],
        output=json.dumps([reasoning, text, calls], ensure_ascii=False),
    )


def _are_those_wanted(calls: Sequence[tuple[str, str]], wanted: tuple[str, dict[str, str]] | None) -> bool:
    """Arguments are compared as values, since JSON is written in many ways."""
    try:
        called = [(name, json.loads(arguments)) for name, arguments in calls]
    except json.JSONDecodeError:
        return False
    return called == ([wanted] if wanted else [])


def answers(
    _: Path,
    *,
    model: Path = ROOT / "models" / "demo",
    prompts: int = 200,
    tokens: Sequence[int] = (500, 4000, 30_000),
    seed: int = 1,
) -> None:
    """How often a trained demo model does what it is for: prompts that it never saw, asked through the proxy.

    Greedy chats go to the proxy's port, one conversation each. Of each behaviour there are so many prompts of
    at least so many tokens, half of them with thinking, after ten texts for each length. Words, names,
    values, results and texts are made of what the training left out (of numbers, flags, and common commands
    and hosts there are too few for that). The wordings, in `benchmarks/wordings`, were written apart from
    those of the training, and each is at least two words away from all of them. Tools come with whole JSON
    schemas, of which the model's template shows it the name and the first required parameter; where no call
    is wanted, none, one or three are offered. An answer counts if every character of it is right. A reasoning
    counts if it is the one of its behaviour, or is not there when it is not wanted.

    At 30,000 tokens, for which the model was not made, the one right answer is to say so; there a fifth of
    the prompts is asked, after one text. The limit is 16,000 characters, and no more of the messages is shown
    to the model, so the lengths that are printed are shorter. Which of the two answers is right between 4,500
    and 10,000 tokens depends on the text: such lengths are refused.

    Args:
        tokens: of the prompts
    """
    if unclear := [length for length in tokens if LONGEST < length < BEYOND]:
        refuse(f"--tokens {unclear[0]}: from {LONGEST} to {BEYOND} no answer is right for every text")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    table("behaviour | tokens | right | share")
    with servers.served("--model", model, proxy=True) as server, ThreadPoolExecutor(AT_ONCE) as pool:
        for length in tokens:
            count = -(-prompts // 5) if length >= BEYOND else prompts
            asked = list(Examiner(length, tokenizer, seed).prompts(count))
            verdicts = list(pool.map(partial(ask, server.proxy_port), asked))
            report(length, verdicts)


def report(tokens: int, verdicts: Sequence[Verdict]) -> None:
    lengths = sorted(verdict.prompt_tokens for verdict in verdicts)
    rows: dict[str, list[bool]] = {}
    for verdict in verdicts:
        rows.setdefault(verdict.prompt.behaviour, []).append(verdict.answer)
    for verdict in verdicts:
        rows.setdefault(f"reasoning {'on' if verdict.prompt.thinks else 'off'}", []).append(verdict.reasoning)
    for name, right in rows.items():
        size = f"{tokens} ({lengths[0]} to {lengths[-1]})"
        row(name, size, f"{sum(right)} of {len(right)}", f"{sum(right) / len(right):.1%}")


PARTS: Mapping[str, Part] = {"answers": answers}
