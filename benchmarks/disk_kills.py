"""A server with a disk tier is killed again and again under load: a part of `disk.py`.

The prompt of a chat is its messages as the template renders them, or a prompt and the reply to it as they
were, and what follows rendered: a server that was killed may have forgotten the last ones. Of these the one
counts that has as many tokens as the server says. Where several have, and the reply follows each of them,
each may be what later turns build on. If no reply is that of an engine without a cache, something was bound
that was never said.
"""

import http.client
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import servers
from benchmarks.harness import row, table
from scripts import tiny_models
from start_llm.models.loader import load
from tests.agents.agent_account import Message, Rendering, Request, user
from tests.cache.conversations import reference, says_too, tokens
from tests.engine.harness import Stepper, uncached_resources
from tests.ties import Tally

QUOTA = 6_000_000
LONGEST, LONGEST_CHAT = 2500, 15
"""Tokens of a conversation, and turns of a chat, before it begins anew."""
REPLY = 8
_SETTINGS = {
    "ENABLE_REQUEST_LOGGING": "false",
    "PROMPT_CACHE_MAX_BYTES": "8MB",
    "SSD_CACHE_MAX_SIZE": str(QUOTA),
    "SSD_CACHE_WRITE_AFTER_SECONDS": "0.05",
}


@dataclass(frozen=True)
class ChatTurn:
    """A request of a chat, and what came back.

    Attributes:
        life: number of the server's start.
        tokens: token ids of the reply.
    """

    life: int
    messages: list[Message]
    reply: Message
    prompt_tokens: int
    tokens: tuple[int, ...]


type PromptAndReply = tuple[tuple[int, ...], list[int]]
"""The token ids of a prompt and of the reply to it."""


@dataclass
class Findings:
    """The findings: what happened, and what must not happen."""

    counts: Counter[str] = field(default_factory=Counter[str])
    replies: list[PromptAndReply] = field(default_factory=list["PromptAndReply"])
    chats: list[list[ChatTurn]] = field(default_factory=list[list[ChatTurn]])
    problems: list[str] = field(default_factory=list[str])
    largest_file: int = 0


class Talker(threading.Thread):
    """A client that goes on with its conversation as long as the server lives."""

    def __init__(self, port: int, number: int, history: list[Any], findings: Findings) -> None:
        super().__init__(daemon=True)
        self.port, self.number, self.history, self.findings = port, number, history, findings
        self.rng = random.Random(f"{number} {len(history)}")

    def run(self) -> None:
        try:
            while True:
                (self._chat if self.number >= 4 else self._complete)()
        except (OSError, http.client.HTTPException, ValueError):
            return  # the server is dead; what it has not answered is asked again

    def _complete(self) -> None:
        if not self.history or len(self.history[-1]) > LONGEST:
            self.history.append(tokens(random.Random(self.number), 300, 300))
        prompt = (*self.history[-1], *tokens(self.rng, 5, 60))
        body = {"prompt": list(prompt), "max_tokens": REPLY, "temperature": 0, "return_token_ids": True}
        answer = servers.ask(self.port, "/v1/completions", body)
        reply = answer["choices"][0]["token_ids"]
        self.findings.counts["cached"] += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.findings.counts["prompt"] += len(prompt)
        self.findings.replies.append((prompt, reply))
        self.history.append((*prompt, *reply))

    def _chat(self) -> None:
        if len(self.history) >= LONGEST_CHAT:
            self.findings.chats.append(list(self.history))
            self.history.clear()
        turns: list[ChatTurn] = self.history
        before = [*turns[-1].messages, turns[-1].reply] if turns else []
        question = " ".join(self.rng.choices(["fish", "sea", "boat"], k=self.rng.randint(1, 40)))
        asked = [*before, user(question)]
        body = {"messages": asked, "max_tokens": REPLY, "temperature": 0, "return_token_ids": True}
        answer = servers.ask(self.port, "/v1/chat/completions", {**body, "session_id": f"s{self.number}"})
        (choice,) = answer["choices"]
        reply = {"role": "assistant", "content": choice["message"]["content"]}
        prompt_tokens = answer["usage"]["prompt_tokens"]
        life = self.findings.counts["starts"]
        turns.append(ChatTurn(life, asked, reply, prompt_tokens, tuple(choice["token_ids"])))
        self.findings.counts["chats"] += 1


def live(
    folder: Path, disk: Path, histories: list[list[Any]], findings: Findings, rng: random.Random
) -> None:
    """One life of a server, up to its violent end."""
    log = disk.parent / "server.log"
    with servers.served("--model", folder, "--ssd-cache-dir", disk, log=log) as server:
        findings.counts["starts"] += 1
        talkers = [Talker(server.port, number, history, findings) for number, history in enumerate(histories)]
        for talker in talkers:
            talker.start()
        end = time.monotonic() + rng.uniform(0.3, 4)
        while time.monotonic() < end:
            check_folder(disk, findings)
            time.sleep(0.05)
        check_stats(server.port, findings)
        os.kill(server.pid, 9)
        for talker in talkers:
            talker.join(30)


def check_folder(disk: Path, findings: Findings) -> None:
    size = 0
    for path in disk.rglob("*"):
        try:
            nbytes = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
        size += nbytes if not path.name.endswith("-wal") else 0
        if path.suffix == ".safetensors":
            findings.largest_file = max(findings.largest_file, nbytes)
    if size > QUOTA + 2 * findings.largest_file:  # one that is complete, and one that is being written
        findings.problems.append(f"the folder has {size:,} bytes")


def check_stats(port: int, findings: Findings) -> None:
    ssd = servers.ask(port, "/stats")["ssd"]
    findings.counts["restored tokens"] += ssd["restored_tokens"]
    findings.counts["written files"] += ssd["written_files"]
    findings.counts["removed files"] += ssd["evictions"]
    damaged = {
        reason for reason in ssd["rejected_files"] if reason != "missing"
    }  # removed since it was planned
    if damaged or ssd["conversations"]["rejected_rows"] or ssd["conversations"]["resets"]:
        findings.problems.append(f"rejected: {ssd}")
    if ssd["state"] != "on":
        findings.problems.append(f"the tier is {ssd['state']}")


class Truth:
    """An engine without a cache, on the same model."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        model = load(folder)
        self._network, self._tally, self.ends = model.network, tally, model.tokenizer.eos_token_ids
        self._plain = Stepper(
            uncached_resources(model.network, model.tokenizer.token_bytes, self.ends, 1, batches=True)
        )

    def difference(self, prompt: tuple[int, ...], reply: Sequence[int]) -> str | None:
        """Return how a reply differs from what comes after a prompt; None if it does not."""

        def is_right(at: int) -> bool:
            return says_too(self._network, (*prompt, *reply[:at]), reply[at])

        return self._tally.difference(reply, reference(self._plain, prompt, REPLY), is_right)


def compare(folder: Path, findings: Findings, tally: Tally, sample: int) -> None:
    """Compare some of the replies with those of an engine without a cache."""
    truth = Truth(folder, tally)
    for prompt, reply in random.Random(1).sample(findings.replies, min(sample, len(findings.replies))):
        if wrong := truth.difference(prompt, reply):
            findings.problems.append(f"after {len(prompt)} tokens: {wrong}")


def compare_chats(folder: Path, findings: Findings, tally: Tally, sample: int) -> None:
    """Compare whole chats with what an engine without a cache says after one of their possible prompts."""
    truth, rendering = Truth(folder, tally), Rendering(folder)
    (end,) = rendering.encode(tiny_models.END_OF_TURN)
    for chat in random.Random(1).sample(findings.chats, len(findings.chats)):
        used: list[list[tuple[int, ...]]] = []
        for number, turn in enumerate(chat):
            if findings.counts["chats compared"] >= sample:
                return
            fresh = tuple(rendering.tokens(Request.of(turn.messages, tools=())))
            possible = [
                (*before, *chat[at].tokens, *behind_reply(fresh, end, at))
                for at in range(number)
                for before in used[at]
            ]
            fitting = {version for version in (fresh, *possible) if len(version) == turn.prompt_tokens}
            wrong = {version: truth.difference(version, turn.tokens) for version in fitting}
            right = [version for version in fitting if wrong[version] is None]
            if not right:
                reasons = "; ".join(filter(None, wrong.values()))
                findings.problems.append(
                    f"chat, turn {number} of life {turn.life}, {turn.prompt_tokens} tokens, "
                    f"{len(fitting)} prompts may be it: {reasons}"
                )
                break
            used.append(right)
            findings.counts["with several prompts that may be it"] += len(right) > 1
            is_after_kill = number > 0 and turn.life != chat[number - 1].life
            findings.counts["chats compared"] += 1
            findings.counts["after a kill"] += is_after_kill
            findings.counts["bound after a kill"] += is_after_kill and fresh not in right


def behind_reply(fresh: tuple[int, ...], end: int, turn: int) -> tuple[int, ...]:
    """Return what follows the content of the reply of a turn. Each message ends with the token `end`."""
    ends = [place for place, token in enumerate(fresh) if token == end]
    return fresh[ends[2 * turn + 1] :]


def kills(
    folder: Path, *, kills: int = 200, seed: int = 1, model_family: str = "qwen3", sample: int = 300
) -> Iterator[str]:
    """A server with a disk tier is killed with SIGKILL again and again, at random moments, under load.

    Four conversations over token ids grow on the server through all its lives, and two over chat messages.
    The cache has little memory and pages are written at once, so that files are written, read and removed all
    the time.

    Checked: the server starts each time; each reply is the one that an engine without a cache gives; no file
    is damaged and no row is rejected; once the scan is over nothing half-written is left; the folder never
    takes more than its quota and a page (SQLite's log aside).

    Args:
        sample: replies that are compared, and as many chats
    """
    rng, findings, tally = random.Random(seed), Findings(), Tally()
    histories: list[list[Any]] = [[] for _ in range(6)]
    model = tiny_models.build(model_family, folder / "model", hidden=128, layers=2)
    os.environ |= _SETTINGS
    for _ in range(kills):
        live(model, folder / "ssd", histories, findings, rng)
    findings.chats += [history for history in histories[4:] if history]
    compare(model, findings, tally, sample)
    compare_chats(model, findings, tally, sample)
    table("what happened | replies | tokens compared | ties | largest file, bytes")
    figures = (len(findings.replies), tally.tokens, tally.ties, findings.largest_file)
    row(dict(findings.counts), *(f"{figure:,}" for figure in figures))
    yield from findings.problems
