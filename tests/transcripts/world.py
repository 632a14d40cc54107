"""Clients, a server and a model in little: conversations grow, drift and fork, and every prompt is checked.

Every text holds words that stand nowhere else, so that what a prompt hides, or has from somewhere else, is
seen by its words:

    v1x  what anybody said      t1x  reasoning             m1x  a message id, which changes
    b1x  a billing header       i1x  an id of a call       d1x  a date, which changes
    c1x  a carrier              k1x  a block of one chat, which changes
    r1x  a rule of a project

The model writes in its template's own form, or less tidily, and may be cut. What it reads is what the engine
was given.
"""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import cache, partial

from start_llm.audit.reply_message import message_from_events
from start_llm.core.canonical import Conversation
from start_llm.core.chat import ChatRequest, KeptReasoning, Message, RequestOrigin
from start_llm.core.engine_request import EngineRequest
from start_llm.core.events import Event, Finished, Restored, Usage
from start_llm.core.events import Text as Written
from start_llm.core.explanation import Explanation
from start_llm.prompt.canonical_form import DriftPolicy
from start_llm.prompt.prepare import Preparer, PromptPolicy
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.serving.service import Service
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.transcripts.transcripts import Transcripts
from tests.images.fakes import vision_of
from tests.model_cards import model_card
from tests.prompt.fakes import NOON, call, family_of, reply, text_of
from tests.prompt.replies import REASONING_FORMS, NoEndError, turn
from tests.templates.traits import TRAITS, trait_of, trait_tokenizer
from tests.transcripts.fakes import transcripts

_FIRST_DAY, _DAYS = date(1900, 1, 1), re.compile(r"\b19\d\d-\d\d-\d\d\b")
WORD = re.compile(r"[a-z]\d+x")
WINDOW = 10**6
NUMBER = re.compile(r'(?<=functions\.write:)\d+|(?<=functions\.now:)\d+|(?<="tool_call_id": ")\d+|\b\d{9}\b')
"""Of a call, in the id that some models write with it."""
MOVING = "tools_before_last_user"
"""Its conversations have neither tools nor a system message: with those it is never bound."""
OWN = 'Conversation info:\n```json\n{{\n  "message_id": "{}",\n  "sender": "ann"\n}}\n```\n'
DATE = "Today's date: {}\n"
BLOCK = '## Inbound Context (trusted metadata)\nOf this chat.\n```json\n{{"chat": "{}"}}\n```\n'
BLOCK_FORM = r"## Inbound Context \(trusted metadata\)\nOf this chat\.\n```json\n(?:(?!```)[^\n]*\n)*```"
REMINDER = (
    "<system-reminder>\nWhat you can use:\n{}# currentDate\nToday's date is {}.\n\n"
    "      IMPORTANT: this context may or may not be relevant.\n</system-reminder>\n\n"
)
INSTRUCTIONS = "# claudeMd\nFollow these.\n\n{}\n"
INSTRUCTIONS_FORM = r"# claudeMd\nFollow these\.\n(?:\nr\d+x)+"
CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
BILLING = "x-anthropic-billing-header: cc_version=2; cch={};\n"
_REASONING = re.compile(
    r"(<(?:seed:|mm:)?think>[\w\s]*)?</(?:seed:|mm:)?think>"
    r"|<\|channel\|>analysis<\|message\|>[\w\s]*<\|end\|><\|start\|>assistant"
    r"|<\|channel>thought[\w\s]*<channel\|>"
    r"|<\|open\|>think<\|sep\|>[\w\s]*<\|close\|>think<\|sep\|>"
    r"|<\|START_THINKING\|>[\w\s]*<\|END_THINKING\|>"
)


def day(word: str) -> str:
    """The date that a word stands for: lines of dates hold nothing else."""
    return (_FIRST_DAY + timedelta(int(word[1:-1]))).isoformat()


def words(text: str, kinds: str) -> list[str]:
    text = _DAYS.sub(lambda day: f"d{(date.fromisoformat(day[0]) - _FIRST_DAY).days}x", text)
    return [word for word in WORD.findall(text) if word[0] in kinds]


def visible_words(message: Message) -> list[str]:
    """The words of a message that nobody may hide."""
    arguments = [str(dict(tool_call.arguments)) for tool_call in message.tool_calls]
    return words(" ".join([message.content, *arguments]), "v")


def without_reasoning(text: str) -> str:
    """A prompt without reasoning and white space, also where that is escaped, its numbers in one spelling.

    What the model wrote before a call that was then cut off is the answer, for client and template.
    """
    text = _REASONING.sub("", text).replace("<|channel|>commentary<|message|>", "<|channel|>final<|message|>")
    return re.sub(r"(?:\s|\\n)+", "", text).replace("1000.0", "1000")


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Shape:
    """The parts of a reply."""

    reasoning: bool
    text: bool
    calls: int


SHAPES = tuple(Shape(reasoning, text, calls) for reasoning in (False, True) for text, calls in
               ((True, 0), (True, 1), (True, 2), (False, 1), (False, 2)))  # fmt: skip


@cache
def form_of(trait: str, shape: Shape, *, on: bool) -> str | None:
    """A reply as the model writes it; None if the template has no such reply, or the model does not think."""
    if shape.reasoning and not (on and trait in REASONING_FORMS):
        return None
    calls = [call(f"c{n}", path=f"v{n}x", ratio=1000.0) for n in range(1, shape.calls + 1)]
    message = reply("v0x" if shape.text else "", *calls, reasoning="t0x" if shape.reasoning else None)
    try:
        written = turn(trait, message, on=on).reply
    except NoEndError:
        return None
    return None if any(end in written for end in TRAITS[trait].eos) else written


@dataclass(frozen=True)
class Reply:
    """A reply to be written: its form, the words for those of the form, and where it is cut."""

    shape: Shape
    visible: tuple[str, ...]
    reasoning: str
    tidy: bool = True
    cut: float | None = None
    stop: bool = False

    def text(self, form: str, calls_before: int) -> str:
        values = {f"v{n}x": word for n, word in enumerate(self.visible)} | {"t0x": self.reasoning}
        if not self.tidy:
            values["v0x"] = f"\n {values['v0x']}\n\n"
        text = WORD.sub(lambda match: values[match[0]], form)
        return NUMBER.sub(lambda match: f"{int(match[0]) + calls_before:0{len(match[0])}}", text)


class Model:
    """Writes what it is given, and keeps what it was given to read."""

    def __init__(self, trait: str) -> None:
        self._tokenizer = trait_tokenizer(trait)
        self._end = self._tokenizer.encode(trait_of(trait).eos[0], as_document=False)[0]
        self.next: tuple[str, Reply] = ("", Reply(SHAPES[0], (), ""))
        self.read: tuple[int, ...] = ()

    def submit(self, request: EngineRequest) -> Model:
        self.read = request.prompt.ids
        return self

    def peek(self, request: EngineRequest) -> Restored:
        """Nothing is kept here."""
        return Restored(0, "evicted", repeated_tokens=request.repeated_tokens)

    def take(self, timeout_s: float) -> list[Event]:
        text, how = self.next
        tokens = self._tokenizer.encode(text, as_document=False)
        pieces: list[Event] = [
            Written(self._tokenizer.token_bytes(token).decode(), (token,)) for token in tokens
        ]
        if how.cut is None:
            return [*pieces, Written("", (self._end,)), Finished("stop", Usage(1, 0, 1))]
        pieces = pieces[: round(how.cut * len(pieces))]
        if how.stop:
            return [*pieces, Finished("stop", Usage(1, 0, 1), stop="a")]
        return [*pieces, Finished("length", Usage(1, 0, 1))]

    def cancel(self, *, is_over: bool = False) -> None:
        pass


# ------------------------------------------------------------------------------------------------ the server


@dataclass
class _Memory:
    """A preparer's memory for healing, and its clock: a preparer is dear, and shared by many worlds."""

    transcripts: Transcripts | None = None
    now: datetime = NOON


@cache
def _preparer(
    trait: str, kept: KeptReasoning, drift: DriftPolicy, *, heals: bool
) -> tuple[Preparer, _Memory]:
    memory = _Memory()

    def restore_reasoning(conversation: Conversation, replies: Sequence[int]) -> list[str | None]:
        if memory.transcripts and heals:
            return memory.transcripts.restore_reasoning(conversation, replies)
        return [None] * len(replies)

    policy = PromptPolicy(kept_reasoning=kept, drift=drift)
    tokenizer = trait_tokenizer(trait)
    return Preparer(
        tokenizer,
        family_of(trait),
        vision=vision_of(trait),
        policy=policy,
        restore_reasoning=restore_reasoning,
        now=lambda: memory.now,
    ), memory


class Server:
    """The real service around the model."""

    def __init__(self, trait: str, kept: KeptReasoning, drift: DriftPolicy = "note") -> None:
        self.trait, self.kept, self.drift = trait, kept, drift
        self.model = Model(trait)
        self.restart()

    def restart(self) -> None:
        """It remembers nothing."""
        trait = self.trait
        tokenizer = trait_tokenizer(trait)
        self.transcripts = transcripts(
            tokenizer.token_bytes,
            partial(tokenizer.encode, as_document=False),
            kept_reasoning=self.kept,
            takes_proof=self.drift == "note",
        )
        preparer, self._memory = _preparer(trait, self.kept, self.drift, heals=True)
        self._memory.transcripts = self.transcripts
        model = model_card(family=family_of(trait), vocabulary=2**16, window=WINDOW)
        self._service = Service(
            engine=self.model,
            requests=RequestPreparer(preparer, tokenizer, model),
            transcripts=self.transcripts,
            reports=Reports(RequestMetrics(), Terminal(io.StringIO())),
        )

    @contextmanager
    def at(self, now: datetime) -> Generator[None]:
        """Its clock says so."""
        self._memory.now = now
        yield
        self._memory.now = NOON

    def answer(self, request: ChatRequest, text: str, how: Reply) -> tuple[str, Message]:
        """Return the model's input, and the client's reply."""
        self.model.next = text, how
        with self._service.respond(request, RequestOrigin("id", "/chat", "model")) as answer:
            events = list(answer.events())
        return text_of(self.trait, self.model.read), message_from_events(events)

    def explain(self, request: ChatRequest) -> Explanation:
        return self._service.explain(request)

    def fresh(self, request: ChatRequest, kept: KeptReasoning | None = None) -> str:
        """The prompt of a server that has never seen anything."""
        preparer, _ = _preparer(self.trait, kept or self.kept, self.drift, heals=False)
        return text_of(self.trait, preparer.prepare(request).tokens.ids)
