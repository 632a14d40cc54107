"""Replies that real clients send back are bound to the tokens of the replies that they were given.

Each recorded conversation is played through the preparer and the transcripts, with every trait of templates:
a model says what the client was answered, and the next request is the one that the client sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise

import pytest

from start_llm.core.canonical import Conversation
from start_llm.core.chat import ChatRequest, Message
from start_llm.core.events import CallArguments, CallStarted, Content, Finished, Output, Reasoning, Usage
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.prepare import Preparer
from start_llm.transcripts.turn import Turn
from tests.prompt.fakes import NOON, family_of, text_of
from tests.templates.traits import TRAITS, trait_tokenizer
from tests.transcripts.fakes import transcripts
from tests.transcripts.recorded import Exchange, recording, recordings

pytestmark = pytest.mark.product

WINDOW = 10**6
MOVES = "tools_before_last_user"
"""Its tools and its system text move to the next question: until then a prompt begins as another one does."""
ONE_CALL = ("dates", "strict_channels")
"""Their messages hold one call each."""
THINKING = ("strips_old_reasoning", "opens_reasoning", "stop_opens_next", "channels", "gemma4_channel")
CHANCE = 100.0
"""Bits: these replies were drawn, and nobody else draws the same."""
CARRIER = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"


@dataclass(frozen=True)
class Served:
    """One exchange, when its reply has ended.

    Attributes:
        depth: of what was bound; None if nothing was.
        bound: tokens that stand for it.
        read: tokens of the prompt.
        written: tokens of the reply, without the one that ends it.
    """

    request: ChatRequest
    depth: int | None
    bound: int
    read: tuple[int, ...]
    written: tuple[int, ...]


class Desk:
    """A preparer for one trait, which is slow to make, with transcripts that are begun anew."""

    def __init__(self, trait: str) -> None:
        self._tokenizer = trait_tokenizer(trait)
        self._kept = transcripts(
            self._tokenizer.token_bytes, partial(self._tokenizer.encode, as_document=False)
        )
        self._preparer = Preparer(
            self._tokenizer,
            family_of(trait),
            policy=PromptPolicy(kept_reasoning=self._kept.kept_reasoning),
            restore_reasoning=self._restore_reasoning,
            now=lambda: NOON,
        )

    def serve(self, exchanges: Sequence[Exchange]) -> list[Served]:
        """As the server does without any setting."""
        self._kept = transcripts(
            self._tokenizer.token_bytes, partial(self._tokenizer.encode, as_document=False)
        )
        return [self._serve(exchange) for exchange in exchanges]

    def _restore_reasoning(self, conversation: Conversation, replies: Sequence[int]) -> list[str | None]:
        return self._kept.restore_reasoning(conversation, replies)

    def _serve(self, exchange: Exchange) -> Served:
        turn = Turn.begin(self._kept, self._preparer.prepare(exchange.request), WINDOW)
        turn.record_submitted()
        written = self._tokenizer.encode(written_text(exchange.reply), as_document=False)
        answer(turn, exchange.reply, [*written, min(self._tokenizer.eos_token_ids)])
        prefix = turn._bound.prefix
        depth, length = (prefix.depth, prefix.length) if prefix else (None, 0)
        return Served(exchange.request, depth, length, turn.tokens.ids, tuple(written))


@cache
def desk_of(trait: str) -> Desk:
    return Desk(trait)


@cache
def played(name: str, trait: str) -> list[Served]:
    return desk_of(trait).serve(recording(name))


def written_text(reply: Sequence[Output]) -> str:
    """The model's text. Its form is no family's: the meaning stands beside it."""
    return "".join(f"[{part.name}]" if isinstance(part, CallStarted) else _text(part) for part in reply)


def _text(output: Output) -> str:
    return output.text if isinstance(output, Reasoning | Content | CallArguments) else ""


def answer(turn: Turn, reply: Sequence[Output], tokens: Sequence[int]) -> None:
    turn.add_generated_tokens(tokens)
    for output in reply:
        turn.add_output(output)
    turn.record_reply(Finished("stop", Usage(1, 0, len(tokens))), is_whole=True, reply_surprisal_bits=CHANCE)


def last_reply(messages: Sequence[Message]) -> int:
    return max(index for index, message in enumerate(messages) if message.role == "assistant")


def last_question(messages: Sequence[Message]) -> int:
    """Text of a user after a result is the result's, for a template that takes none there."""
    return max(
        index
        for index, message in enumerate(messages)
        if message.role == "user" and (not index or messages[index - 1].role != "tool")
    )


# --------------------------------------------------------------------------------------- how deep they bind


def depths_of(name: str, trait: str, exchanges: Sequence[Exchange]) -> list[int | None]:
    """How deep each request is bound: at its last reply, but for what cannot be."""
    full = [None, *(last_reply(exchange.request.messages) for exchange in exchanges[1:])]
    if trait == MOVES:
        questions = [last_question(exchange.request.messages) for exchange in exchanges]
        asked_before = [None, *questions[:-1]]
        moved = [question != before for question, before in zip(questions, asked_before, strict=True)]
        return [None if has_moved else depth for depth, has_moved in zip(full, moved, strict=True)]
    return [before_two_calls(trait, exchange, depth) for exchange, depth in zip(exchanges, full, strict=True)]


def before_two_calls(trait: str, exchange: Exchange, depth: int | None) -> int | None:
    """Where each message has one call, no message of the prompt ends where a reply with two of them does."""
    two = depth is not None and len(exchange.request.messages[depth].tool_calls) > 1
    return depth - 1 if depth is not None and two and trait in ONE_CALL else depth


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.parametrize("name", recordings())
@pytest.mark.sample(12)
def test_what_a_client_sends_back_is_bound_at_the_reply(name, trait):
    exchanges = recording(name)
    assert [request.depth for request in played(name, trait)] == depths_of(name, trait, exchanges)


@pytest.mark.parametrize("trait", [trait for trait in TRAITS if trait != MOVES])
@pytest.mark.parametrize("name", [name for name in recordings() if not name.startswith("openclaw")])
@pytest.mark.sample(8)
def test_what_is_bound_is_what_was_read_and_written_and_the_rest_is_what_is_new(name, trait):
    for before, now in pairwise(played(name, trait)):
        computed = (*before.read, *before.written)
        at_reply = now.bound == len(computed)
        assert at_reply is (now.depth == last_reply(now.request.messages))
        assert now.read[: now.bound] == computed[: now.bound]
        assert now.depth is not None
        after = text_of(trait, now.read[now.bound :])
        for message in in_native_form(now.request.messages, "ordinal")[now.depth + 1 :]:
            place = after.find(message.content.strip())
            assert place >= 0
            after = after[place:]


@pytest.mark.parametrize("trait", [trait for trait in TRAITS if trait != MOVES])
@pytest.mark.parametrize("name", [name for name in recordings() if name.startswith("openclaw")])
def test_a_message_that_is_gone_is_read_once_after_all_others(name, trait):
    for before, now in pairwise(played(name, trait)):
        bound, read = text_of(trait, now.read[: now.bound]), text_of(trait, now.read)
        assert CARRIER not in bound
        assert bound.endswith(text_of(trait, before.written)) is (
            now.depth == last_reply(now.request.messages)
        )
        assert read.count(CARRIER) == 1
        *_, last, _ = now.request.messages
        assert read.rindex(last.content.strip()) < read.index(CARRIER)


@pytest.mark.parametrize("trait", [trait for trait in TRAITS if trait not in (MOVES, *ONE_CALL)])
@pytest.mark.parametrize("name", [name for name in recordings() if name.startswith("openclaw")])
def test_without_its_carrier_openclaw_is_bound_at_the_reply_too(name, trait):
    """Nothing else of what it sends keeps it from that."""
    exchanges = [without_carrier(exchange) for exchange in recording(name)]
    full = [None, *(last_reply(exchange.request.messages) for exchange in exchanges[1:])]
    assert [exchange.depth for exchange in desk_of(trait).serve(exchanges)] == full


@pytest.mark.parametrize("trait", THINKING)
@pytest.mark.parametrize("name", [name for name in recordings() if "_" not in name])
def test_a_client_that_leaves_its_reasoning_out_is_bound_as_deep(name, trait):
    """OpenClaw does so with another field for them, Claude Code where it knew none."""
    exchanges = [without_reasoning(item) for item in recording(name)]
    assert [item.depth for item in desk_of(trait).serve(exchanges)] == depths_of(name, trait, exchanges)


def without_reasoning(exchange: Exchange) -> Exchange:
    messages = tuple(replace(message, reasoning=None) for message in exchange.request.messages)
    return replace(exchange, request=replace(exchange.request, messages=messages))


def without_carrier(exchange: Exchange) -> Exchange:
    *messages, carrier = exchange.request.messages
    assert carrier.content.startswith(CARRIER)
    return replace(exchange, request=replace(exchange.request, messages=tuple(messages)))


def test_all_five_clients_are_recorded():
    assert {name.partition("_")[0] for name in recordings()} == {
        "claude",
        "codex",
        "openclaw",
        "opencode",
        "pi",
    }
