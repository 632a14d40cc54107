"""Images in prompts: where the client put them, as the template writes them, and named by their pixels."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from start_llm.core.chat import ChatRequest, Json, Message
from start_llm.core.errors import InvalidRequest, ModelError
from start_llm.core.images import FIRST_IMAGE_TOKEN, Image, image_spans
from start_llm.core.prompt import Prompt
from start_llm.prompt.adapt import needed
from start_llm.prompt.canonical_form import canonical
from start_llm.prompt.pieces import PieceEncoder
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template_audit.audit import audit, described
from tests.images.fakes import FakeVision, by_digest, image, network_ids, vision_of
from tests.prompt.fakes import (
    NOON,
    FakeTokenizer,
    call,
    family_of,
    fresh_preparer,
    function,
    preparer_of,
    reply,
    result,
    system,
    text_of,
    user,
)
from tests.templates.traits import SEEING, trait_tokenizer

CAT, DOG, MAP = image("cat"), image("dog", 28, 28), image("map", 112, 30)
TOOLS = (function("look", at={"type": "string"}),)
IN_PLACE = [trait for trait in SEEING if preparer_of(trait).facts.images_in_results]
BEHIND = [trait for trait in SEEING if trait not in IN_PLACE]
OPENCLAW = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n{}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"


def vision(trait: str) -> FakeVision:
    fake_vision = vision_of(trait)
    assert fake_vision
    return fake_vision


def asked(*messages: Message, **more: Any) -> ChatRequest:
    return ChatRequest(messages=messages, images=by_digest(CAT, DOG, MAP), **more)


def prompt(trait: str, *messages: Message, **more: Any) -> Prompt:
    return fresh_preparer(trait).prepare(asked(*messages, **more))


def as_read(trait: str, made: Prompt) -> str:
    """What the network reads, as text."""
    return text_of(trait, network_ids(made.tokens.ids, made.images))


def written(trait: str, image: Image) -> str:
    """What a prompt holds for an image, as text."""
    around = preparer_of(trait).facts.image_text
    assert around
    before, after = around
    return before + vision(trait).text(image) + after


# ------------------------------------------------------------------------------- as the template writes them


def listed(*parts: str | Image, kind: str) -> Json:
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": kind} for part in parts]


def by_the_template(trait: str, *messages: dict[str, Json], images: Sequence[Image]) -> str:
    """The template's own rendering of lists, expanded as the family's processor does it."""
    text = trait_tokenizer(trait).render(
        list(messages), None, {}, add_generation_prompt=True, strftime_now=NOON.strftime
    )
    placeholder = vision(trait).placeholder
    first, *rest = text.split(placeholder)
    assert len(rest) == len(images)
    return first + "".join(vision(trait).text(item) + after for item, after in zip(images, rest, strict=True))


CONTENTS: tuple[tuple[str | Image, ...], ...] = (
    ("one", CAT, "two"),
    (CAT, "two"),
    ("one", CAT),
    (CAT,),
    ("one", CAT, "two", DOG, "three"),
    (CAT, CAT, MAP),
    ("zażółć\n日本", DOG, ".", DOG, "`x`\n\n1"),
)


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize("trait", SEEING)
def test_a_prompt_has_the_tokens_of_the_templates_own_list(trait: str, content: tuple[str | Image, ...]):
    kind = "image_url" if trait == "sees_marks" else "image"
    images = [part for part in content if isinstance(part, Image)]
    expected = by_the_template(
        trait,
        {"role": "user", "content": listed(*content, kind=kind)},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": listed("more", MAP, kind=kind)},
        images=[*images, MAP],
    )
    question = "".join(part if isinstance(part, str) else part.word for part in content)
    made = prompt(trait, user(question), reply("ok"), user(f"more{MAP.word}"))
    whole = trait_tokenizer(trait).encode(expected, as_document=False)
    assert network_ids(made.tokens.ids, made.images) == whole


@pytest.mark.parametrize("trait", SEEING)
def test_the_tokens_of_an_image_name_it_wherever_it_stands(trait: str):
    made = prompt(trait, user(f"{CAT.word} or {DOG.word}"), reply("?"), user(f"again {CAT.word}"))
    spans = image_spans(made.tokens.ids, {run.tokens[0]: run for run in made.images})
    runs = [vision(trait).expand(picture).tokens for picture in (CAT, DOG, CAT)]
    assert [made.tokens.ids[span.start : span.end] for span in spans] == runs
    assert {run.tokens for run in made.images} >= set(runs)


@pytest.mark.parametrize("trait", SEEING)
def test_a_text_that_spells_the_placeholder_is_no_image(trait: str):
    spelled = vision(trait).placeholder
    made = prompt(trait, user(f"what is {spelled}? and {CAT.word}?"))
    spans = image_spans(made.tokens.ids, {run.tokens[0]: run for run in made.images})
    assert [span.run.tokens for span in spans] == [vision(trait).expand(CAT).tokens]
    assert f"what is {spelled}? and " in as_read(trait, made)


def test_a_model_that_is_blind_has_no_images_in_its_prompts():
    made = preparer_of("plain").prepare(ChatRequest(messages=(user("hi"),)))
    assert made.images == ()
    assert max(made.tokens.ids) < FIRST_IMAGE_TOKEN


# ------------------------------------------------------------------------------------- tool results, system


def agent(trait: str, *more: Message) -> Prompt:
    return prompt(
        trait,
        system(f"Be brief. {MAP.word}"),
        user("look"),
        reply("", call("c1", "look", at="a"), call("c2", "look", at="b")),
        result(f"first {CAT.word}.", "c1"),
        result(f"{DOG.word}{CAT.word}second", "c2"),
        *more,
        tools=TOOLS,
    )


@pytest.mark.parametrize("trait", IN_PLACE)
def test_images_in_results_and_system_text_stand_where_the_client_put_them(trait: str):
    read = as_read(trait, agent(trait))
    cat, dog = written(trait, CAT), written(trait, DOG)
    assert f"Be brief. {written(trait, MAP)}" in read
    assert f"first {cat}." in read
    assert f"{dog}{cat}second" in read


@pytest.mark.parametrize("trait", BEHIND)
def test_where_results_have_no_place_for_images_these_follow_in_a_user_message(trait: str):
    read = as_read(trait, agent(trait))
    cat, dog = written(trait, CAT), written(trait, DOG)
    assert "first [Image 1: below]." in read
    assert "[Image 2: below][Image 3: below]second" in read
    assert f"[Image 1]\n{cat}\n[Image 2]\n{dog}\n[Image 3]\n{cat}" in read
    assert read.index("second") < read.index("[Image 1]\n")


@pytest.mark.parametrize("trait", BEHIND)
def test_a_result_with_an_image_ends_behind_the_message_that_has_it(trait: str):
    """Else a conversation that ends with it would go on from tokens without the image."""
    made = agent(trait, user("and?"))
    ends = {end.message: end.tokens for end in made.boundaries}
    assert 3 not in ends, "the image of the first result stands behind the second one"
    ids = network_ids(made.tokens.ids, made.images)
    assert text_of(trait, ids[: ends[4]]).endswith(written(trait, CAT))
    assert agent(trait).tokens.ids[: ends[4]] == made.tokens.ids[: ends[4]]


def test_merged_with_the_next_question_it_ends_there():
    """A template that writes calls, refuses neighbours of one role and has no images in results."""
    template = """
{%- for m in messages -%}
{%- if not loop.first and m.role == messages[loop.index0 - 1].role == 'user' -%}
{{ raise_exception('alternate') }}{%- endif -%}
<{{ m.role }}>{{ m.content if m.content is string or m.role == 'tool' else '' }}
{%- if m.content is not string and m.role == 'user' -%}
{%- for p in m.content -%}{{ '<img>' if p.type == 'image' else p.text }}{%- endfor -%}{%- endif -%}
{%- for c in m.tool_calls or [] -%}[{{ c.function.name }}{{ c.function.arguments | tojson }}]{%- endfor -%}
</e>
{%- endfor -%}{%- if tools -%}{{ tools | tojson }}{%- endif -%}<assistant>"""
    tokenizer = FakeTokenizer(
        template, ("<user>", "<assistant>", "<tool>", "<system>", "</e>", "<img>"), ("</e>",)
    )
    seeing = FakeVision(
        lambda text: tokenizer.encode(text, as_document=False),
        "<img>",
        lambda columns, rows: ["<img>"] * columns,
    )
    preparer = Preparer(tokenizer, family_of("plain"), vision=seeing, now=lambda: NOON)
    assert not preparer.facts.takes_neighbours
    assert not preparer.facts.images_in_results
    talk = (user("look"), reply("", call("c1", "look", at="a")), result(f"got {CAT.word}"))
    ends = [
        {end.message: end.tokens for end in preparer.prepare(asked(*some, tools=TOOLS)).boundaries}
        for some in (talk, (*talk, user("and?")))
    ]
    assert 2 in ends[0]
    assert 2 not in ends[1]
    assert 3 in ends[1]


def test_the_audit_says_what_becomes_of_images():
    assert "images of results in a user message behind them" in needed(preparer_of("sees_marks").facts)
    assert needed(preparer_of("sees_everywhere").facts) == []
    assert ", images," in described(preparer_of("sees_everywhere").facts)
    blind = audit(trait_tokenizer("sees_everywhere"), family_of("sees_everywhere"))
    assert ", images," not in described(blind)


def test_a_template_that_refuses_lists_writes_the_placeholder_alone():
    tokenizer = FakeTokenizer(
        "{% for m in messages %}<u>{{ m.content.strip() }}</u>{% endfor %}<a>",
        ("<u>", "</u>", "<a>", "<img>"),
        ("</u>",),
    )
    seeing = FakeVision(
        lambda text: tokenizer.encode(text, as_document=False), "<img>", lambda columns, rows: ["<img>"]
    )
    preparer = Preparer(tokenizer, family_of("plain"), vision=seeing, now=lambda: NOON)
    made = preparer.prepare(asked(user(f"see {CAT.word} there")))
    ids = network_ids(made.tokens.ids, made.images)
    assert tokenizer.decode(ids) == "<u>see <img> there</u><a>"


def test_a_placeholder_that_is_no_token_is_an_error_at_the_start():
    tokenizer = FakeTokenizer("{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}", ("<u>", "</u>"))
    seeing = FakeVision(lambda text: tokenizer.encode(text, as_document=False), "<img>", lambda c, r: ["<u>"])
    with pytest.raises(ModelError, match="'<img>', is not a token"):
        Preparer(tokenizer, family_of("plain"), vision=seeing)


# --------------------------------------------------------------------------------- ends, growth, transients


@pytest.mark.parametrize("trait", SEEING)
def test_messages_end_where_the_same_conversation_ended_before(trait: str):
    """Each prefix of a conversation has the tokens that it had when it was the whole."""
    talk = (
        system("Be brief."),
        user(f"look {CAT.word} here"),
        reply("a cat"),
        user(f"{DOG.word}"),
        reply("a dog"),
        user(f"and {CAT.word}{MAP.word}"),
    )
    whole = prompt(trait, *talk)
    ends = {boundary.message: boundary.tokens for boundary in whole.boundaries}
    assert {1, 2, 3, 4, 5} <= ends.keys()
    for count in (2, 4):
        before = prompt(trait, *talk[:count])
        end = ends[count - 1]
        assert before.boundaries[-1].tokens == end
        assert before.tokens.ids[:end] == whole.tokens.ids[:end]


@pytest.mark.parametrize("trait", SEEING)
def test_a_long_conversation_that_grows_has_the_prompt_of_a_new_one(trait: str):
    """The ends of messages are found in the new part alone (`prompt.growing`)."""
    preparer = fresh_preparer(trait)
    talk = [user(f"first {CAT.word}"), reply("ok")]
    for turn in range(40):
        talk += [user(f"{turn} {(CAT, DOG, MAP)[turn % 3].word} {turn}"), reply(f"seen {turn}")]
    for count in (len(talk) - 5, len(talk) - 3, len(talk) - 1):
        grown = preparer.prepare(asked(*talk[:count]))
        new = fresh_preparer(trait).prepare(asked(*talk[:count]))
        assert grown.tokens == new.tokens
        assert grown.boundaries == new.boundaries


@pytest.mark.parametrize("trait", SEEING)
def test_a_transient_message_behind_an_image_has_the_lasting_end_beside_it(trait: str):
    lasting = (user(f"see {CAT.word}"),)
    plain, more = prompt(trait, *lasting), prompt(trait, *lasting, user(OPENCLAW.format("now")))
    assert more.has_transient
    (end,) = more.boundaries
    assert plain.tokens.ids == (*more.tokens.ids[: end.tokens], *(more.lasting_end or ()))


def test_a_transient_text_with_an_image_in_it_is_content():
    made = prompt("sees_everywhere", user("hi"), user(OPENCLAW.format(CAT.word)))
    assert not made.has_transient
    assert made.conversation
    assert len(made.conversation.messages) == 2


# --------------------------------------------------------------------------------------------- what is named


def key(*messages: Message) -> bytes:
    made = prompt("sees_everywhere", *messages)
    assert made.conversation
    return made.conversation.keys[-1].digest


def test_another_image_another_place_or_no_image_is_another_conversation():
    texts = (
        f"a {CAT.word} b",
        f"a {DOG.word} b",
        f"a  b{CAT.word}",
        f"{CAT.word}a  b",
        "a  b",
        f"a {CAT.word}{CAT.word} b",
        f"a {CAT.word}{DOG.word} b",
        f"a {DOG.word}{CAT.word} b",
    )
    assert len({key(user(text)) for text in texts}) == len(texts)
    assert key(user(texts[0])) == key(user(texts[0]))


def test_no_text_can_pretend_to_be_an_image():
    (with_image,) = canonical([user(f"a{CAT.word}")])
    parts, _, text = with_image.data.partition(b"\0")
    assert text == b"a"
    for pretended in (parts.decode(), f"a{parts.decode()}", f"a\0{CAT.digest.hex()}", "a[image]"):
        (other,) = canonical([user(pretended)])
        assert other.data != with_image.data


def test_the_random_word_of_this_process_is_in_nothing_that_is_kept():
    """Keys outlive the process, and what is left out of them is shown to the model."""
    reminder = (
        "<system-reminder>\nWhat you can use:\n# claudeMd\nFollow these.\n{}\n# currentDate\n"
        "Today's date is 2026-11-21.\n</system-reminder>\n"
    )
    made = prompt(
        "sees_everywhere",
        system(f"Today's date: 2026-11-21\n{CAT.word}"),
        user(reminder.format(DOG.word) + f"see {CAT.word} \n"),
    )
    assert made.conversation
    kept = repr([(item.data, item.omitted) for item in made.conversation.canonical]) + repr(made.conversation)
    for item in (CAT, DOG):
        assert item.word not in kept
        assert item.word[:37] not in kept
    first, second = made.conversation.messages
    assert [item.name for item in first.omitted] == ["today's date"]
    assert {item.name for item in second.omitted} == {"date in the reminder", "white space"}, (
        "instructions with an image in them are content"
    )


def test_a_date_before_an_image_and_one_behind_it_are_not_the_same():
    before, behind = (
        canonical([system(text)])[0]
        for text in (f"Today's date: 2026-11-21\n{CAT.word}", f"{CAT.word}\nToday's date: 2026-11-21\n")
    )
    assert before.omitted[0].place != behind.omitted[0].place


def test_a_templates_error_does_not_tell_the_word():
    tokenizer = FakeTokenizer(
        "{% for m in messages %}<u>{{ m.content }}</u>{% if 'no' in m.content %}"
        "{{ raise_exception('not ' ~ m.content) }}{% endif %}{% endfor %}",
        ("<u>", "</u>", "<img>"),
        ("</u>",),
    )
    seeing = FakeVision(
        lambda text: tokenizer.encode(text, as_document=False), "<img>", lambda c, r: ["<img>"]
    )
    preparer = Preparer(tokenizer, family_of("plain"), vision=seeing)
    with pytest.raises(InvalidRequest) as refused:
        preparer.prepare(asked(user(f"no {CAT.word}")))
    assert "not no [image]" in refused.value.message
    assert CAT.word not in refused.value.message


# --------------------------------------------------------------------------------------------------- pieces


def test_a_run_takes_the_place_of_its_placeholder_and_the_rest_is_as_in_the_whole():
    tokenizer = FakeTokenizer("", ("<a>", "<img>"))
    text = "<a>x<img>y<a><img>"
    run = vision("sees_everywhere").expand(CAT)
    places = [at for at in range(len(text)) if text.startswith("<img>", at)]
    encoded = PieceEncoder(tokenizer).encode(text, [0, 10], images=dict.fromkeys(places, run))
    plain = [
        token
        for piece in ("<a>x", "y<a>")
        for token in (*tokenizer.encode(piece, as_document=False), *run.tokens)
    ]
    assert list(encoded.ids) == plain
    assert encoded.cuts == (0, 2 + len(run) + 1)
    assert all(token < FIRST_IMAGE_TOKEN for token in encoded.ids[:2])


def test_an_image_at_the_start_and_a_cut_there_are_one_place():
    tokenizer = FakeTokenizer("", ("<img>",))
    run = vision("sees_everywhere").expand(CAT)
    encoded = PieceEncoder(tokenizer).encode("<img>", [0], images={0: run})
    assert encoded.ids == run.tokens
    assert encoded.cuts == (0,)
    assert list(pairwise(encoded.cuts)) == []
