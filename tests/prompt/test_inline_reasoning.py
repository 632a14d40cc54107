"""Reasoning in the text of a reply: compared as reasoning, and read as they were sent."""

import pytest

from start_llm.core.canonical import CanonicalKey, reasoning_digest
from start_llm.core.chat import ChatRequest, Message
from start_llm.core.family import ReasoningMarks
from start_llm.core.prompt import Prompt
from start_llm.core.prompt_policy import PromptPolicy
from start_llm.prompt.inline_reasoning import split_inline_reasoning, with_reasoning
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import call, family_of, prepared, reply, result, shown, text_of, user
from tests.templates.traits import trait_tokenizer

MARKS = ReasoningMarks("<think>", "</think>", cut="")
TRAIT = "strips_old_reasoning"
ASKED, SPOKEN = user("Where is it?"), "<think>\nLook first.\n</think>\n\n"


def conversation(reply: Message) -> tuple[Message, ...]:
    return (ASKED, reply, result("found"))


def keys(prompt: Prompt) -> list[CanonicalKey]:
    assert prompt.conversation
    return list(prompt.conversation.keys)


def test_the_reasoning_is_taken_out_of_the_text():
    message = split_inline_reasoning(reply(SPOKEN + "Here.", call()), MARKS)
    assert (message.content.strip(), (message.reasoning or "").strip()) == ("Here.", "Look first.")


@pytest.mark.parametrize(
    "message",
    [
        reply("Here. " + SPOKEN),
        reply("<think>Look first."),
        reply("<think>\n\n</think>\n\nHere."),
        reply(SPOKEN),
        reply(SPOKEN + "Here.", reasoning="Another one."),
        user(SPOKEN + "Here."),
    ],
    ids=["after text", "open", "empty", "nothing else", "has reasoning", "a user"],
)
def test_other_texts_stay_whole(message):
    assert split_inline_reasoning(message, MARKS) is message
    assert split_inline_reasoning(reply(SPOKEN + "Here."), None).reasoning is None


def test_it_is_compared_like_reasoning_in_its_own_field():
    spoken = prepared(TRAIT, *conversation(reply(SPOKEN, call())))
    apart = prepared(TRAIT, *conversation(reply("", call(), reasoning="Look first.")))
    stripped = prepared(TRAIT, *conversation(reply("", call())))
    assert keys(spoken) == keys(apart) == keys(stripped)
    assert spoken.conversation
    assert (
        spoken.conversation.messages[1].echoed
        == spoken.conversation.messages[1].shown
        == reasoning_digest("Look first.")
    )


def test_the_model_reads_it_where_the_client_wrote_it():
    """On a template, too, that hides reasoning of earlier turns: it is text there, and nobody takes it
    out.
    """
    messages = (*conversation(reply(SPOKEN, call())), user("Go on."))
    assert SPOKEN in shown(TRAIT, *messages)
    prompt = prepared(TRAIT, *messages)
    assert prompt.conversation
    assert prompt.conversation.messages[1].shown == reasoning_digest("Look first.")


@pytest.mark.parametrize("say", ["Look first.", "think", "Here."])
def test_it_is_distinguished_from_other_texts_with_its_words(say: str):
    """The template is asked with other reasoning in its place."""
    spoken = reply(f"<think>\n{say}\n</think>\n\nHere. Look first: think.", call())
    prompt = prepared(TRAIT, *conversation(spoken))
    assert prompt.conversation
    assert prompt.conversation.messages[1].shown == reasoning_digest(say)
    assert with_reasoning(spoken, MARKS, "A").content == "<think>A</think>\n\nHere. Look first: think."


def test_no_other_reasoning_is_added_to_it():
    preparer = Preparer(
        trait_tokenizer(TRAIT),
        family_of(TRAIT),
        restore_reasoning=lambda _, replies: ["Another one."] * len(replies),
    )
    prompt = preparer.prepare(ChatRequest(messages=conversation(reply(SPOKEN, call()))))
    assert "Another one." not in text_of(TRAIT, prompt.tokens.ids)


def test_without_rules_it_is_text():
    policy = PromptPolicy(with_rules=False)
    preparer = Preparer(trait_tokenizer(TRAIT), family_of(TRAIT), policy=policy)
    spoken, apart = (
        preparer.prepare(ChatRequest(messages=conversation(message)))
        for message in (reply(SPOKEN, call()), reply("", call(), reasoning="Look first."))
    )
    assert keys(spoken) != keys(apart)


def test_an_answer_that_was_sent_as_reasoning_too_is_read_once():
    """GLM may begin inside its reasoning: until the reply ends, nobody knows that it was none."""
    both = (ASKED, reply("Over there.", reasoning=" Over there.\n"), user("And then?"))
    running = both[:2]
    for talk in (both, running):
        assert shown("stop_opens_next", *talk).count("Over there.") == 1
    first, second = (
        prepared("stop_opens_next", *talk) for talk in (both, (ASKED, reply("Over there."), both[2]))
    )
    assert first == second


def test_reasoning_of_another_family_may_be_its_answer():
    assert (
        shown(TRAIT, ASKED, reply("Over there.", call(), reasoning="Over there."), result("r")).count("Over")
        == 2
    )


@pytest.mark.parametrize(
    ("begun", "restored", "policy", "expected"),
    [
        (reply("Here."), "Look first.", PromptPolicy(), "Look first."),
        (reply("Here.", reasoning="Look first."), None, PromptPolicy(), "Look first."),
        (reply(SPOKEN + "Here."), None, PromptPolicy(), "Look first."),
        (reply("Here.", reasoning="Look first."), None, PromptPolicy(kept_reasoning="false"), None),
        (reply("Here."), None, PromptPolicy(), None),
    ],
    ids=["restored", "sent", "in the text", "not shown", "none"],
)
def test_a_begun_reply_has_the_reasoning_that_the_model_is_shown(begun, restored, policy, expected):
    preparer = Preparer(
        trait_tokenizer(TRAIT),
        family_of(TRAIT),
        policy=policy,
        restore_reasoning=lambda _, replies: [restored] * len(replies),
    )
    prompt = preparer.prepare(ChatRequest(messages=(ASKED, begun), continues_reply=True))
    assert prompt.begun_reply and prompt.begun_reply.content.strip() == "Here."
    assert reasoning_digest(prompt.begun_reply.reasoning) == reasoning_digest(expected)
    assert ("Look first." in text_of(TRAIT, prompt.tokens.ids)) == bool(expected)
