"""One turn: bound to what was computed before, and recorded if a client can send back all of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.canonical import CanonicalKey, Conversation, Ignored, reasoning_digest
from start_llm.core.chat import Message, ToolCall
from start_llm.core.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Content,
    Finished,
    Output,
    Reasoning,
    Usage,
)
from start_llm.core.prompt import Boundary, ModelTokens, Prompt
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.canonical_form import canonical, ignored
from start_llm.prompt.shorten import is_shortened
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import RecordedReasoning
from start_llm.transcripts.recorded_details import Claims
from start_llm.transcripts.transcript_store import TranscriptStore
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.turn import Turn
from tests.prompt.fakes import reply, user
from tests.transcripts.fakes import conversation_of, transcripts

WINDOW = 1000
CLOSER, TAIL, STOP = "|", ">", "#"
REASONING = Reasoning("Hm.")
ITSELF, AT_A_LIMIT = Finished("stop", Usage(1, 0, 1)), Finished("length", Usage(1, 0, 1))
ASKED = user("Where?")
HERE = (Content("Here"),)


def kept(
    token_bytes: Callable[[int], bytes] = lambda token: chr(token).encode(), **policy: Any
) -> Transcripts:
    """Its tokens are characters."""
    return transcripts(token_bytes, lambda text: [*map(ord, text)], **policy)


def prompt_of(*messages: Message, shown: Sequence[str | None] = ()) -> Prompt:
    """Each message and its closer, then what makes the model answer.

    Args:
        shown: reasoning in front of the messages; of others none is shown.
    """
    text, ends = "", list[Boundary]()
    reasonings = [*shown, *[None] * len(messages)][: len(messages)]
    for index, message in enumerate(messages):
        text += (f"({reasonings[index]})" if reasonings[index] else "") + message.content
        ends.append(Boundary(index, len(text)))
        text += CLOSER
    compared = canonical(in_native_form(messages, "ordinal"))
    conversation = conversation_of(
        *compared,
        root=CanonicalKey.of(b""),
        role=[message.role for message in messages],
        echoed=[reasoning_digest(message.reasoning) for message in messages],
        ids=[frozenset(filter(None, [message.reply_name])) for message in messages],
        can_hold_note=[message.role != "assistant" for message in messages],
        ignored=ignored(messages),
        shown=[*map(reasoning_digest, reasonings)],
    )
    ids = tuple(map(ord, text + TAIL))
    return Prompt(tokens=ModelTokens(ids), boundaries=tuple(ends), conversation=conversation)


def asked(known: Transcripts, *messages: Message, window: int = WINDOW) -> Turn:
    turn = Turn.begin(known, prompt_of(*messages), window)
    turn.record_submitted()
    return turn


def answered(
    known: Transcripts, outputs: Sequence[Output], written: str, end: Finished = ITSELF, *, whole: bool = True
) -> None:
    """Somebody asks, and this is the reply."""
    turn = asked(known, ASKED)
    for output in outputs:
        turn.add_output(output)
    turn.add_generated_tokens([ord(char) for char in written])
    turn.record_reply(end, is_whole=whole)


def read(turn: Turn) -> str:
    return "".join(map(chr, turn.tokens.ids))


def next_read(known: Transcripts, message: Message, window: int = WINDOW) -> str:
    return read(asked(known, ASKED, message, user("And there?"), window=window))


def test_a_reply_ends_before_what_ends_it():
    known = kept()
    answered(known, HERE, f"Here{STOP}")
    assert next_read(known, reply("Here")) == "Where?|>Here|And there?|>"


def test_an_answer_that_was_taken_for_reasoning_is_none_that_could_be_given_back():
    known = kept()
    answered(known, (Reasoning("Here"), Content("Here")), f"Here{STOP}")
    assert next_read(known, reply("Here")) == "Where?|>Here|And there?|>"
    assert known.reasoning_texts.nbytes == 0


@pytest.mark.parametrize(("is_changed", "bound"), [(lambda _: False, True), (is_shortened, False)])
def test_a_reply_that_prompts_show_shorter_is_rendered_fresh(is_changed, bound):
    known, written = kept(is_changed=is_changed), '{"path": "x", "content": "long"}'
    answered(known, (CallStarted(0, "write"), CallArguments(0, written)), f"write{written}{STOP}")
    sent = reply("", ToolCall("1", "write", {"path": "x", "content": "long"}))
    assert (written in next_read(known, sent)) == bound


BEGUN = (Content("Here"), CallStarted(0, "read"), CallArguments(0, '{"path": "a"}'))
SENT: dict[str, tuple[Sequence[Output], Finished, bool, Message | None]] = {
    "whole": (HERE, ITSELF, True, reply("Here")),
    "text that may have begun a mark": (HERE, AT_A_LIMIT, False, reply("Here")),
    "up to a stop string": (HERE, Finished("stop", Usage(1, 0, 1), stop="!"), False, reply("Here")),
    "with its last permitted call": (
        (*BEGUN, CallEnded(0)),
        Finished("tool_calls", Usage(1, 0, 1)),
        False,
        reply("Here", ToolCall("", "read", {"path": "a"})),
    ),
    "cut in a call": (BEGUN, AT_A_LIMIT, False, None),
    "cut by the deadline": (HERE, Finished("length", Usage(1, 0, 1), cut_by="deadline"), True, None),
    "reasoning alone": ((Reasoning("Hm"),), AT_A_LIMIT, False, None),
}


@pytest.mark.parametrize("how", SENT)
def test_a_reply_is_known_as_its_client_sends_it_back_recorded_or_not(how: str):
    outputs, end, is_whole, sent = SENT[how]
    turn = asked(kept(), ASKED)
    for output in outputs:
        turn.add_output(output)
    turn.add_generated_tokens([*map(ord, "Here")])
    assert turn.take_reply() is None, "it has not ended"
    turn.record_reply(end, is_whole=is_whole)
    assert [turn.take_reply(), turn.take_reply()] == [sent, None]


def test_a_reply_that_was_cut_by_its_limit_keeps_its_last_token():
    known = kept()
    answered(known, HERE, "Here", AT_A_LIMIT)
    assert next_read(known, reply("Here")) == "Where?|>Here|And there?|>"


CUTS = {
    "two of four": ("He", "\U0001f41f".encode()[:2], "He\ufffd"),
    "a letter in the same token": ("He", b"y\xe2\x82", "Hey\ufffd"),
    "the end of another in the same token": ("H\udce2", b"\x82\xac\xf0\x9f", "H€\ufffd"),
    "nothing else": ("", b"\xf0", "\ufffd"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_reply_that_ends_inside_a_character_is_recorded_as_its_client_received_it(cut):
    """The tokens in front of the character stay as they were written."""
    text, last, received = CUTS[cut]
    token = 0x110000
    known = kept(
        token_bytes=lambda token_id: (
            last if token_id == token else chr(token_id).encode(errors="surrogateescape")
        )
    )
    turn = asked(known, ASKED)
    turn.add_output(Content(received))
    turn.add_generated_tokens([*map(ord, text), token])
    turn.record_reply(AT_A_LIMIT, is_whole=True)
    assert next_read(known, reply(received)) == f"Where?|>{received}|And there?|>"


def test_a_cut_character_is_not_recorded_if_the_tokenizer_puts_a_space_before_its_replacement():
    """As SentencePiece does at the start of a text."""
    half = 0x110000
    known = transcripts(
        lambda token: b"\xf0\x9f" if token == half else chr(token).encode(),
        lambda text: [*map(ord, f" {text}")],
    )
    turn = asked(known, ASKED)
    turn.add_output(Content("He\ufffd"))
    turn.add_generated_tokens([*map(ord, "He"), half])
    turn.record_reply(AT_A_LIMIT, is_whole=True)
    assert next_read(known, reply("He\ufffd")) == "Where?|He\ufffd|And there?|>"


def test_a_replacement_character_that_the_model_wrote_is_a_character():
    known = kept()
    answered(known, (Content("He\ufffd"),), "He\ufffd", AT_A_LIMIT)
    assert next_read(known, reply("He\ufffd")) == "Where?|>He\ufffd|And there?|>"


def test_reasoning_stays_although_the_rendering_drops_it():
    known = kept()
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    assert next_read(known, reply("Here")) == "Where?|>(Hm.)Here|And there?|>"
    assert next_read(known, reply("Here", reasoning="Hm.\n")) == "Where?|>(Hm.)Here|And there?|>"


def test_reasoning_that_was_edited_is_content():
    known = kept()
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    assert next_read(known, reply("Here", reasoning="Ha!")) == "Where?|Here|And there?|>"


def test_two_reasoning_of_one_reply_each_get_their_own_tokens():
    known = kept()
    for reasoning in ("One.", "Two."):
        answered(known, (Reasoning(reasoning), *HERE), f"({reasoning})Here{STOP}")
    for reasoning in ("One.", "Two."):
        prompt = next_read(known, reply("Here", reasoning=reasoning))
        assert prompt == f"Where?|>({reasoning})Here|And there?|>"


@pytest.mark.parametrize("policy", ["template", "false"])
def test_reasoning_that_nobody_wants_does_not_stay(policy):
    known = kept(kept_reasoning=policy)
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    assert next_read(known, reply("Here")) == "Where?|Here|And there?|>"


@pytest.mark.parametrize(
    ("outputs", "written", "end", "whole"),
    [
        ((CallStarted(0, "read"), CallArguments(0, "[1]")), "[1]", ITSELF, True),
        ((CallStarted(0, "read"), CallArguments(0, '{"a": ')), '{"a": ', AT_A_LIMIT, True),
        ((), "", ITSELF, True),
        ((Content(" \n"),), " \n", ITSELF, True),
        ((REASONING,), "(Hm.)", ITSELF, True),
        (HERE, "Here", replace(ITSELF, stop="!"), True),
        (HERE, "Here", replace(AT_A_LIMIT, cut_by="deadline"), True),
        (HERE, "Here<call", AT_A_LIMIT, False),
    ],
)
def test_what_no_client_could_send_back_is_not_recorded(outputs, written, end, whole):
    known = kept()
    asked(known, ASKED)
    before = known.store.metrics.variants
    answered(known, outputs, written, end, whole=whole)
    assert known.store.metrics.variants == before


def test_a_call_with_half_a_surrogate_pair_is_recorded_as_a_request_is_read():
    known, written = kept(), '{"path": "x\\ud83d"}'
    answered(known, (CallStarted(0, "read"), CallArguments(0, written)), f"read{written}{STOP}")
    assert written in next_read(known, reply("", ToolCall("1", "read", {"path": "x\ufffd"})))


@pytest.mark.thorough
def test_a_call_may_be_nested_deeper_than_any_request_may():
    """Some depths can be read, and not gone through."""
    for depth in range(800, 1000):
        nested = '{"a": ' + "[" * depth + "]" * depth + "}"
        answered(kept(), (CallStarted(0, "read"), CallArguments(0, nested)), nested)


def test_a_prompt_that_would_not_fit_is_read_fresh_and_begins_a_path_of_its_own():
    known = kept()
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    fresh = "Where?|Here|And there?|>"
    assert next_read(known, reply("Here"), window=len(fresh) + 1) == fresh
    assert known.metrics.refused == {"too_long": 1}
    assert next_read(known, reply("Here")) == fresh


@pytest.mark.parametrize(("shown", "is_proof"), [("aB3x" * 6, True), ("another", False), ("", False)])
def test_who_shows_the_name_of_a_reply_has_received_it(shown: str, is_proof: bool):
    """Then white space that is gone in the question is its own."""
    known = kept()
    turn = Turn.begin(known, prompt_of(user("Where?\n")), WINDOW)
    turn.record_submitted("aB3x" * 6)
    turn.add_output(*HERE)
    turn.add_generated_tokens([ord(char) for char in f"Here{STOP}"])
    turn.record_reply(ITSELF, is_whole=True)
    read_next = next_read(known, replace(reply("Here"), reply_name=shown))
    assert read_next == ("Where?\n|>Here|And there?|>" if is_proof else "Where?|Here|And there?|>")


def test_reasoning_is_given_back_to_its_own_reply_alone():
    known = kept()
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    mine, other = (prompt_of(user(asked), reply("Here")).conversation for asked in ("Where?", "When?"))
    assert mine and other
    assert known.restore_reasoning(mine, [1]) == ["Hm."]
    assert known.restore_reasoning(other, [1]) == [None]


@pytest.mark.parametrize(
    ("question", "carrier", "is_shared"),
    [
        (ASKED, (), True),
        (user("Where?\n"), (), False),
        (ASKED, (Ignored("internal context", "transient", b"alpha"),), False),
    ],
    ids=["the same words", "other white space", "a message that is gone"],
)
def test_restored_reasoning_is_only_shared_if_it_was_drawn_behind_the_same_words(
    question, carrier, is_shared
):
    known, name = kept(), "aB3x" * 6
    first = prompt_of(question)
    assert first.conversation
    with_carrier = replace(first, conversation=replace(first.conversation, transient=carrier))
    turn = Turn.begin(known, with_carrier, WINDOW)
    turn.record_submitted(name)
    for output in (REASONING, *HERE):
        turn.add_output(output)
    turn.record_reply(ITSELF, is_whole=True)
    known = replace(known, store=TranscriptStore(max_bytes=10**8))
    mine = replace(reply("Here"), reply_name=name)
    later = prompt_of(ASKED, mine, user("And there?"), shown=(None, "Hm."))
    assert later.conversation
    assert known.restore_reasoning(later.conversation, [1]) == ["Hm."]
    Turn.begin(known, later, WINDOW).record_submitted()
    expected = "Where?|(Hm.)Here|And there?|>" if is_shared else "Where?|Here|And there?|>"
    assert next_read(known, reply("Here")) == expected


@pytest.mark.parametrize(("question", "shared"), [("Where?", "Over there."), ("Where?\n", None)])
def test_reasoning_behind_tokens_that_say_what_was_said_before_is_only_given_back_by_a_proof(
    question, shared
):
    known, name = kept(), "aB3x" * 6
    first = Turn.begin(known, prompt_of(user(question)), WINDOW)
    first.record_submitted(name)
    first.add_output(HERE[0])
    first.add_generated_tokens([*map(ord, f"Here{STOP}")])
    first.record_reply(ITSELF, is_whole=True)
    mine = replace(reply("Here"), reply_name=name)
    turn = asked(known, ASKED, mine, user("And there?"))
    assert read(turn).startswith(question)
    for output in (Reasoning("Over there."), Content("There")):
        turn.add_output(output)
    turn.record_reply(ITSELF, is_whole=True)
    other = prompt_of(ASKED, reply("Here"), user("And there?"), reply("There")).conversation
    assert other
    assert known.restore_reasoning(other, [3]) == [shared]


def test_only_a_submitted_prompt_uses_what_is_kept():
    """Tokens may be counted, and a prompt explained, without a trace."""
    ticks = itertools.count(1).__next__
    known = kept(store=TranscriptStore(max_bytes=10**8, clock=ticks))
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    prompt = prompt_of(ASKED, reply("Here"), user("And there?"), shown=(None, "Hm."))
    assert prompt.conversation
    key = prompt.conversation.keys[1]
    known.reasoning_texts.keep(CanonicalKey(b"a later one"), RecordedReasoning("", b"", Claims()))

    def used() -> tuple[float, bool, int]:
        is_last = [*known.reasoning_texts._reasoning_texts][-1] == key
        return known.store.at(key)[0].last_used, is_last, known.metrics.restored_reasoning

    before = used()
    assert known.restore_reasoning(prompt.conversation, [1]) == ["Hm."]
    turn = Turn.begin(known, prompt, WINDOW)
    assert used() == before
    turn.record_submitted()
    assert used()[0] > before[0] and used()[1:] == (True, 1)


def begun_reply(known: Transcripts, reasoning: str, *, name: str = "") -> None:
    """A client has the model go on from "He", with this reasoning in front of it."""
    prompt = replace(prompt_of(ASKED), begun_reply=reply("He", reasoning=reasoning))
    ids = tuple(map(ord, f"Where?|>({reasoning})He"))
    turn = Turn.begin(known, replace(prompt, tokens=ModelTokens(ids)), WINDOW)
    turn.record_submitted(name)
    turn.add_output(Content("re"))
    turn.add_generated_tokens([*map(ord, f"re{STOP}")])
    turn.record_reply(ITSELF, is_whole=True)


def restored(known: Transcripts, name: str = "") -> str | None:
    conversation = prompt_of(ASKED, replace(reply("Here"), reply_name=name)).conversation
    assert conversation
    return known.restore_reasoning(conversation, [1])[0]


def test_reasoning_that_a_client_sent_with_a_begun_reply_is_nobody_elses():
    known, name = kept(), "aB3x" * 6
    begun_reply(known, "Hm.", name=name)
    mine = replace(reply("Here"), reply_name=name)
    assert next_read(known, mine) == "Where?|>(Hm.)Here|And there?|>"
    assert next_read(known, reply("Here")) == "Where?|Here|And there?|>"
    assert (restored(known), restored(known, name)) == (None, "Hm.")


def test_reasoning_of_the_model_stays_with_a_reply_that_goes_on():
    known = kept()
    turn = asked(known, ASKED)
    for output in (REASONING, Content("He")):
        turn.add_output(output)
    turn.record_reply(AT_A_LIMIT, is_whole=True)
    begun_reply(known, "Hm.")
    assert next_read(known, reply("Here")) == "Where?|>(Hm.)Here|And there?|>"
    assert restored(known) == "Hm."


def test_what_a_name_proves_is_asked_once_for_all_replies(monkeypatch: pytest.MonkeyPatch):
    """It takes a look at the whole conversation."""
    known, names = kept(), list[str | None]()
    monkeypatch.setattr(ConversationNames, "proving", lambda _, conversation: names.append(conversation.name))
    conversation = prompt_of(ASKED, *[reply("Here"), user("And there?")] * 9).conversation
    assert conversation
    assert known.restore_reasoning(replace(conversation, name="mine"), range(1, 19, 2)) == [None] * 9
    assert names == ["mine"]


def test_no_reasoning_is_kept_where_none_are_wanted():
    known = kept(kept_reasoning="false")
    answered(known, (REASONING, *HERE), f"(Hm.)Here{STOP}")
    assert known.reasoning_texts.nbytes == 0


def test_messages_are_known_once_they_are_computed():
    known = kept()
    messages = (ASKED, reply("Here"), user("And there?"))
    turn = asked(known, *messages)
    ends = [boundary.tokens for boundary in turn.boundaries]
    for computed, expected in [(0, 0), (ends[0] - 1, 0), (ends[1], ends[1]), (ends[0], ends[1])]:
        turn.note_prefilled(computed)
        assert Turn.begin(known, prompt_of(*messages), WINDOW).repeated_tokens == expected
    turn.add_generated_tokens([1])
    assert Turn.begin(known, prompt_of(*messages), WINDOW).repeated_tokens == ends[2]


def test_each_message_is_noted_once_while_a_prompt_is_computed(monkeypatch: pytest.MonkeyPatch):
    """Token by token of the reply nothing is done for it."""
    known, noted, built = kept(), list[CanonicalKey](), list[int]()
    turn = asked(known, ASKED, reply("Here"), user("And there?"))
    keys, all_keys = prompt_of(ASKED, reply("Here"), user("And there?")).conversation, Conversation.keys.fget
    assert keys and all_keys
    monkeypatch.setattr(PrefixHistory, "note", lambda _, *keys: noted.extend(keys))
    monkeypatch.setattr(
        Conversation, "keys", property(lambda conversation: built.append(1) or all_keys(conversation))
    )
    for computed in range(len(turn.tokens) + 1):
        turn.note_prefilled(computed)
    for _ in range(9):
        turn.add_generated_tokens([1])
    assert (noted, len(built)) == ([*all_keys(keys)], 3)


def test_a_text_leaves_nothing_after():
    known = kept()
    turn = Turn.begin(known, Prompt(tokens=ModelTokens((1, 2))), WINDOW)
    turn.record_submitted()
    turn.add_generated_tokens([3])
    turn.add_output(Content("Here"))
    turn.record_reply(ITSELF, is_whole=True)
    assert (turn.tokens.ids, known.store.metrics.variants) == ((1, 2), 0)
