"""Measure how long a long prompt that grew by one message takes to prepare, beside tokenising it whole.

    python benchmarks/prepare.py [--rounds N] [--tokens N] [--messages N ...]

A chat with tool calls is prepared, bound and recorded, a message is added, and it is prepared again:
comparing, rendering, finding the ends of messages, tokenising what is new, binding. Takes the CPU time of
this thread, and the median of the rounds, for some of the templates that the tests have.

A second table has very many short messages: preparing and binding one that goes on from what is known, and
one that finds as much and may take none of it, because a status in its first message is another one and
nothing proves whose it is.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import servers  # noqa: E402 - found through the line above
from start_llm.core.chat import ChatRequest, Message  # noqa: E402
from start_llm.core.openblas import run_with_openblas  # noqa: E402
from start_llm.prompt.prepare import Preparer  # noqa: E402
from tests.prompt.fakes import call, family_of, function, reply, result, system, user  # noqa: E402
from tests.templates.traits import trait_tokenizer  # noqa: E402
from tests.transcripts.fakes import transcripts  # noqa: E402

TRAITS = ("strips_old_reasoning", "channels", "stop_opens_next", "kimi")
TOOLS = (function("write", path={"type": "string"}, text={"type": "string"}),)
WORDS = "alpha beta function return value the file src/main.py error: line { } \n".split(" ")
WINDOW = 10**9


def seconds[T](action: Callable[[], T]) -> tuple[float, T]:
    began = time.thread_time()
    done = action()
    return time.thread_time() - began, done


class Desk:
    """One template, and a conversation that grows.

    Args:
        tokens: about as many as it has.
    """

    def __init__(self, trait: str, tokens: int) -> None:
        self._rng = random.Random(1)
        self._tokenizer = trait_tokenizer(trait)
        self._transcripts = transcripts(
            self._tokenizer.token_bytes, partial(self._tokenizer.encode, as_document=False)
        )
        self._preparer = Preparer(
            self._tokenizer, family_of(trait), restore_reasoning=self._transcripts.restore_reasoning
        )
        self._messages: list[Message] = [system(self._text(1500))]
        while len(self.prepare()) < tokens:
            self._turn(len(self._messages))

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(words))

    def _turn(self, number: int) -> None:
        made = call(f"c{number}", path="x", text=self._text(100))
        self._messages += [user(self._text(100)), reply(self._text(20), made)]
        self._messages += [result(self._text(700), f"c{number}"), reply(self._text(50))]

    def grow(self) -> None:
        asks = self._messages[-1].role == "assistant"
        self._messages.append(user(self._text(50)) if asks else reply(self._text(50)))

    def prepare(self) -> tuple[int, ...]:
        """The tokens that the engine would be given."""
        prompt = self._preparer.prepare(ChatRequest(messages=tuple(self._messages), tools=TOOLS))
        turn = self._transcripts.begin(prompt, WINDOW)
        turn.record_submitted()
        return turn.tokens.ids

    def tokenise(self, ids: tuple[int, ...]) -> Callable[[], list[int]]:
        text = b"".join(map(self._tokenizer.token_bytes, ids)).decode()
        return lambda: self._tokenizer.encode(text, as_document=False)


def parsed(request: ChatRequest) -> ChatRequest:
    """As the next request brings it: nothing in it is the same object as before."""
    return pickle.loads(pickle.dumps(request))  # noqa: S301 - bytes of its own


class Many:
    """Very many short messages of a conversation with a name, with a status in the first one."""

    def __init__(self, count: int) -> None:
        self._tokenizer = trait_tokenizer(TRAITS[0])
        self._known = transcripts(
            self._tokenizer.token_bytes, partial(self._tokenizer.encode, as_document=False)
        )
        self._preparer = Preparer(
            self._tokenizer, family_of(TRAITS[0]), restore_reasoning=self._known.restore_reasoning
        )
        self._messages: list[Message] = []
        while len(self._messages) < count:
            number = len(self._messages)
            made = call(f"c{number}", path=f"file{number}", text="hello")
            self._messages += [user(f"Question {number}: what is it?"), reply(f"Let me see {number}.", made)]
            self._messages += [result(f"done {number}", f"c{number}"), reply(f"Thus {number}.")]
        self._messages.append(user("And?"))

    def bind(self, status: str) -> tuple[float, float, int]:
        """Seconds of preparing, seconds of binding, and how many messages were bound."""
        told = system(f"Be brief.\n\ngitStatus: {status}\n\nRecent commits:\n1a2b3c {status}\n\n")
        request = parsed(ChatRequest(messages=(told, *self._messages), tools=TOOLS, conversation_id="one"))
        preparing, prompt = seconds(lambda: self._preparer.prepare(request))
        binding, turn = seconds(lambda: self._known.begin(prompt, WINDOW))
        if status == "known":
            turn.record_submitted()
            self._messages += [reply("So."), user("And?")]
        return preparing, binding, turn.prefix_match.messages


def measured_many(count: int, rounds: int) -> Iterator[str]:
    """Two rows of the second table."""
    many = Many(count)
    many.bind("known")
    gc.freeze()
    known = [many.bind("known") for _ in range(rounds)]
    others = [many.bind(f"other {number}") for number in range(rounds)]
    for found, some in (("taken", known), ("may not be taken", others)):
        preparing, binding = (1e3 * statistics.median(column) for column in list(zip(*some, strict=True))[:2])
        whole = statistics.median(one[0] + one[1] for one in some) * 1e3
        bound = some[-1][2]
        yield f"| {count:,} | {found} | {bound:,} | {preparing:.0f} ms | {binding:.0f} ms | {whole:.0f} ms |"


def measured(trait: str, tokens: int, rounds: int) -> str:
    """A row of the table."""
    desk, grown, whole = Desk(trait, tokens), list[float](), list[float]()
    ids: tuple[int, ...] = ()
    for _ in range(rounds):
        desk.grow()
        spent, ids = seconds(desk.prepare)
        grown.append(spent)
        whole.append(seconds(desk.tokenise(ids))[0])
    ours, theirs = statistics.median(grown), statistics.median(whole)
    return f"| {trait} | {len(ids):,} | {ours * 1e3:.1f} ms | {theirs * 1e3:.1f} ms | {ours / theirs:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--messages", type=int, nargs="*", default=[2000, 4000, 8000])
    options = parser.parse_args()
    print(f"{servers.machine('tokenizers', 'jinja2')}\n")
    print(f"    {shlex.join(['python', *sys.argv])}\n")
    print("| template | tokens | prepared | tokenised whole | ratio (<= 0.25) |\n|---|---|---|---|---|")
    for trait in TRAITS:
        print(measured(trait, options.tokens, options.rounds), flush=True)
    print("\n| messages | what is known | bound | prepared | bound in | both |\n|---|---|---|---|---|---|")
    for count in options.messages:
        for row in measured_many(count, options.rounds):
            print(row, flush=True)


if __name__ == "__main__":
    run_with_openblas()
    main()
