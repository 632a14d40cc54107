"""Conversations with images are bound, explained and noted like those without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.images import FIRST_IMAGE_TOKEN, Image, image_spans
from start_llm.prompt.prepare import Preparer
from start_llm.transcripts import bind
from start_llm.transcripts.bind import PromptBinder
from start_llm.transcripts.turn import Turn
from tests.images.fakes import by_digest, image, vision_of
from tests.prompt.fakes import NOON, call, family_of, reply, result, system, user
from tests.prompt.replies import TOOLS
from tests.templates.traits import SEEING, trait_tokenizer
from tests.transcripts.fakes import transcripts
from tests.transcripts.world import Reply, Server, Shape

CAT, DOG, MAP = image("cat"), image("dog", 28, 28), image("map", 112, 30)
ANSWER = Shape(reasoning=False, text=True, calls=0)
DATED = "Today's date: {}\nBe brief. {}"


class Talk:
    """A client that sends its conversation again and again, and a model that says what it is given."""

    def __init__(self, trait: str, *messages: Message, server: Server | None = None, **more: Any) -> None:
        self.server = server or Server(trait, "true")
        self.messages = messages
        self._more = more

    def request(self) -> ChatRequest:
        images = by_digest(CAT, DOG, MAP)
        return ChatRequest(messages=self.messages, images=images, **self._more)

    def ask(self, text: str, *more: Message) -> tuple[int, ...]:
        """The tokens that the model read. What it says is in the conversation then, and what follows it."""
        _, answer = self.server.answer(self.request(), text, Reply(ANSWER, (text,), ""))
        self.messages += (answer, *more)
        return self.server.model.read

    @property
    def bound(self) -> int:
        return self.server.transcripts.metrics.bound


def same_start(tokens: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(tokens, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other)))


@pytest.mark.parametrize("trait", SEEING)
def test_a_conversation_with_images_goes_on_from_what_was_computed(trait: str):
    talk = Talk(trait, user(f"look {CAT.word} here"))
    first = talk.ask(" A cat,  as I  see.", user(f"and {DOG.word}{CAT.word}?"))
    second = talk.ask("Both.", user("thanks"))
    third = talk.ask("Yes.")
    assert talk.bound == 2
    assert same_start(first, second) == len(first)
    assert same_start(second, third) == len(second)
    assert sum(item >= FIRST_IMAGE_TOKEN for item in third) == sum(
        len(vision.expand(item)) for vision in [vision_of(trait)] if vision for item in (CAT, DOG, CAT)
    )


def test_of_many_recorded_prefixes_each_token_is_counted_once(monkeypatch: pytest.MonkeyPatch):
    talk = Talk(next(iter(SEEING)), user(f"look {CAT.word} here"))
    for turn in range(6):
        talk.ask(f"Answer {turn}.", user("go on"))
    counted: list[int] = []

    def count(tokens: Any, runs: Any) -> Any:
        counted.append(len(tokens))
        return image_spans(tokens, runs)

    def look_at_all(binder: PromptBinder, ids: Any, boundaries: Any) -> Any:
        assert len(list(binder._candidates(boundaries))) > 10
        return bind_best(binder, ids, boundaries)

    bind_best = PromptBinder.bind
    monkeypatch.setattr(PromptBinder, "bind", look_at_all)
    monkeypatch.setattr(bind, "image_spans", count)
    read = talk.ask("The last.")
    assert talk.bound == 6
    assert 0 < sum(counted) < len(read)


@pytest.mark.parametrize("trait", SEEING)
def test_the_same_words_with_another_image_share_nothing_behind_its_start(trait: str):
    talk = Talk(trait, user(f"look {CAT.word} here"))
    first = talk.ask("A cat.", user("sure?"))
    talk.messages = (user(f"look {DOG.word} here"), *talk.messages[1:])
    second = talk.ask("No.")
    assert talk.bound == 0
    start = next(at for at, token in enumerate(first) if token >= FIRST_IMAGE_TOKEN)
    assert same_start(first, second) == start


def test_a_moved_image_is_another_conversation():
    talk = Talk("sees_everywhere", user(f"look {CAT.word} here"))
    talk.ask("A cat.", user("sure?"))
    talk.messages = (user(f"look here {CAT.word}"), *talk.messages[1:])
    talk.ask("No.")
    assert talk.bound == 0


def test_an_agent_that_reads_a_picture_goes_on_behind_its_result():
    for trait in SEEING:
        talk = Talk(
            trait,
            system("Be brief."),
            user("look"),
            reply("", call("c1", path="a.png")),
            result(CAT.word, "c1"),
            tools=TOOLS,
        )
        first = talk.ask("A cat.", user(f"again {CAT.word}"))
        second = talk.ask("Still.")
        assert talk.bound == 1, trait
        assert same_start(first, second) == len(first), trait


@pytest.mark.parametrize("trait", SEEING)
def test_a_date_that_changed_before_an_image_is_stated_in_a_note(trait: str):
    talk = Talk(
        trait, system(DATED.format("2026-11-20", MAP.word)), user(f"look {CAT.word}"), conversation_id="one"
    )
    read = talk.ask("A cat.", user("and now?"))
    talk.messages = (system(DATED.format("2026-11-21", MAP.word)), *talk.messages[1:])
    later = talk.ask("Tomorrow.")
    text = talk.server.transcripts.text(later)
    assert talk.bound == 1
    assert same_start(read, later) == len(read)
    assert "[Now: Today's date: 2026-11-21]" in text
    assert "2026-11-20" in text


def test_clients_of_one_conversation_who_send_it_in_their_own_ways_are_bound_alike():
    """Reasoning left out, white space respelled, arguments reordered: none of it concerns an image."""
    asked = (user(f"look {CAT.word}  \n"), reply("", call("x", path="p", count=1)), result(DOG.word, "x"))
    talk = Talk("sees_everywhere", *asked, tools=TOOLS)
    first = talk.ask("A dog.", user("more"))
    spelled = (
        replace(asked[0], content=f"look {CAT.word}"),
        reply("", call("y", count=1.0, path="p")),
        result(DOG.word, "y"),
        *talk.messages[3:],
    )
    other = Talk("sees_everywhere", *spelled, server=talk.server, tools=TOOLS)
    second = other.ask("Yes.")
    # The white space that the first client sent stays: it is equal for nobody who cannot prove to be it.
    assert talk.bound == 0
    named = Talk("sees_everywhere", *asked, tools=TOOLS, conversation_id="me")
    first = named.ask("A dog.", user("more"))
    named.messages = (spelled[0], *spelled[1:3], *named.messages[3:])
    second = named.ask("Yes.")
    assert named.bound == 1
    assert same_start(first, second) == len(first)


def test_an_explanation_shows_that_there_was_an_image_and_no_more():
    question = user(f"look {CAT.word} here")
    talk = Talk("sees_everywhere", user("hi"), reply("hi"), question, conversation_id="mine")
    talk.ask("A cat.", user("sure?"))
    talk.messages = (*talk.messages[:2], user(f"look {DOG.word} here"), *talk.messages[3:])
    explained = talk.server.explain(talk.request())
    (difference,) = explained.differences
    assert (difference.message, difference.drift) == (2, "content")
    assert "<|vision_start|>[image]<|vision_end|> here" in difference.computed
    assert "<|vision_start|>[image]<|vision_end|> here" in difference.asked
    for picture in (CAT, DOG):
        assert picture.word not in repr(explained)


def test_tokens_of_another_limit_are_not_taken():
    """What a server with another IMAGE_MAX_TOKENS recorded has other tokens for the same image."""
    trait = "sees_everywhere"
    tokenizer = trait_tokenizer(trait)
    kept = transcripts(tokenizer.token_bytes, lambda text: tokenizer.encode(text, as_document=False))

    def begun(limit: bytes, *messages: Message) -> Any:
        vision = vision_of(trait, limit=limit)
        preparer = Preparer(tokenizer, family_of(trait), vision=vision, now=lambda: NOON)
        made = preparer.prepare(ChatRequest(messages=messages, images=by_digest(CAT)))
        turn = Turn.begin(kept, made, 10**6)
        turn.record_submitted()
        return made, turn

    asked = (user(f"look {CAT.word}"), reply("A cat."), user("sure?"))
    begun(b"small", *asked)
    made, turn = begun(b"large", *asked)
    assert turn.prefix_match.messages == 0
    assert turn.tokens == made.tokens
    _, again = begun(b"large", *asked)
    assert again.prefix_match.messages == 3


def test_images_of_a_request_have_their_runs_even_where_a_rendering_hides_them():
    picture: Image = image("hidden")
    made = Preparer(
        trait_tokenizer("sees_everywhere"), family_of("sees_everywhere"), vision=vision_of("sees_everywhere")
    ).prepare(ChatRequest(messages=(user("hi"),), images=by_digest(picture)))
    (run,) = made.images
    vision = vision_of("sees_everywhere")
    assert vision
    assert run.tokens == vision.expand(picture).tokens
