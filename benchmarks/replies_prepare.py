"""Preparing long prompts: parts of `replies.py`."""

import gc
import pickle
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.harness import medians, row, table
from start_llm.core.chat import ChatRequest, Message
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.prepare import Preparer
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.turn import Turn
from tests.prompt.fakes import call, family_of, function, reply, result, system, user
from tests.templates.traits import trait_tokenizer
from tests.transcripts.fakes import transcripts

TRAITS = ("strips_old_reasoning", "channels", "stop_opens_next", "kimi")
TOOLS = (function("write", path={"type": "string"}, text={"type": "string"}),)
WORDS = "alpha beta function return value the file src/main.py error: line { } \n".split(" ")
WINDOW = 10**9


def seconds[T](action: Callable[[], T]) -> tuple[float, T]:
    began = time.thread_time()
    done = action()
    return time.thread_time() - began, done


def _parts_of(trait: str) -> tuple[Tokenizer, Preparer, Transcripts]:
    tokenizer = trait_tokenizer(trait)
    known = transcripts(tokenizer.token_bytes, partial(tokenizer.encode, as_document=False))
    return tokenizer, Preparer(tokenizer, family_of(trait), restore_reasoning=known.restore_reasoning), known


class Desk:
    """One template, and a conversation that grows.

    Args:
        tokens: about as many as it has.
    """

    def __init__(self, trait: str, tokens: int) -> None:
        self._rng = random.Random(1)
        self._tokenizer, self._preparer, self._transcripts = _parts_of(trait)
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
        turn = Turn.begin(self._transcripts, prompt, WINDOW)
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
        _, self._preparer, self._known = _parts_of(TRAITS[0])
        self._messages: list[Message] = []
        while len(self._messages) < count:
            number = len(self._messages)
            made = call(f"c{number}", path=f"file{number}", text="hello")
            self._messages += [user(f"Question {number}: what is it?"), reply(f"Let me see {number}.", made)]
            self._messages += [result(f"done {number}", f"c{number}"), reply(f"Thus {number}.")]
        self._messages.append(user("And?"))

    def bind(self, status: str) -> tuple[float, float, int]:
        """Seconds of preparing, seconds of binding, and how many messages were bound."""
        rules = system(f"Be brief.\n\ngitStatus: {status}\n\nRecent commits:\n1a2b3c {status}\n\n")
        request = parsed(ChatRequest(messages=(rules, *self._messages), tools=TOOLS, conversation_id="one"))
        preparing, prompt = seconds(lambda: self._preparer.prepare(request))
        binding, turn = seconds(lambda: Turn.begin(self._known, prompt, WINDOW))
        if status == "known":
            turn.record_submitted()
            self._messages += [reply("So."), user("And?")]
        return preparing, binding, turn.prefix_match.messages


def prepare(_: Path, *, rounds: int = 15, tokens: int = 30_000) -> None:
    """How long a long prompt that grew by one message takes to prepare, beside tokenising it whole.

    A chat with tool calls is prepared, bound and recorded, a message is added, and it is prepared again:
    comparing, rendering, finding the ends of messages, tokenising what is new, binding. CPU time of this
    thread, for some of the templates that the tests have.

    Args:
        tokens: about as many as the prompt has
    """
    table("template | tokens | prepared | tokenised whole | ratio (<= 0.25)")
    for trait in TRAITS:
        desk, pairs, ids = Desk(trait, tokens), list[tuple[float, float]](), tuple[int, ...]()
        while len(pairs) < rounds:
            desk.grow()
            grown, ids = seconds(desk.prepare)
            pairs.append((grown, seconds(desk.tokenise(ids))[0]))
        ours, theirs = medians(pairs)
        row(trait, f"{len(ids):,}", f"{ours * 1e3:.1f} ms", f"{theirs * 1e3:.1f} ms", f"{ours / theirs:.2f}")


def many(_: Path, *, rounds: int = 15, messages: Sequence[int] = (2000, 4000, 8000)) -> None:
    """Very many short messages: preparing and binding a prompt that goes on from what is known.

    And one that finds as much and may take none of it, because a status in its first message is another one
    and nothing proves whose it is.
    """
    table("messages | what is known | bound | prepared | bound in | both")
    for count in messages:
        chat = Many(count)
        chat.bind("known")
        gc.freeze()
        for outcome, status in (("taken", "known"), ("may not be taken", "other {}")):
            binds = [chat.bind(status.format(number)) for number in range(rounds)]
            spent = medians((preparing, binding, preparing + binding) for preparing, binding, _ in binds)
            row(f"{count:,}", outcome, f"{binds[-1][2]:,}", *(f"{1e3 * seconds:.0f} ms" for seconds in spent))
