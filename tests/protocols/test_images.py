"""Images in the forms of the three protocols: where they stand, and what is said of refused ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from start_llm.config.prompt_variables import ImageSettings
from start_llm.core.chat import ChatRequest
from start_llm.core.errors import InvalidImage, InvalidRequest
from start_llm.core.images import image_words
from start_llm.images.checking import ImageChecker
from start_llm.images.door import ImageDoor
from start_llm.protocols.anthropic import messages as anthropic_messages
from start_llm.protocols.anthropic.error_bodies import anthropic_refusal
from start_llm.protocols.base import ModelFacts, RequestContext, openai_refusal
from start_llm.protocols.image_parts import UNSEEN_IMAGE
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.response_store import ResponseStore, StoredResponse
from start_llm.protocols.responses import create as responses
from start_llm.protocols.responses.stored_responses import input_items
from start_llm.protocols.seal import KEY_BYTES, Seal
from tests.images.files import data_url, empty_png, picture
from tests.model_cards import model_card
from tests.protocols.helpers import body

PNG, JPEG = picture("PNG"), picture("JPEG")
SEAL = Seal(bytes(KEY_BYTES))
BIG = data_url(empty_png(10_000, 10_000))
Content = list[Any]


def context(*, sees: bool = True, **limits: Any) -> RequestContext:
    door = ImageDoor(ImageChecker(ImageSettings(**limits))) if sees else None
    return RequestContext(
        ModelFacts(model_card(), lambda _: b"", door),
        b"tenant",
        SEAL,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Form:
    """A protocol: how it writes images, questions, results and replies."""

    parse: Callable[..., Any]
    named: str = "messages"
    image: Callable[[str], Any]
    text: Callable[[str], Any]
    result: Callable[[Content], Any]
    calling: Any
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def request(self, *messages: Any, with_: RequestContext | None = None, **more: Any) -> ChatRequest:
        sent = body(**{self.named: list(messages)}, **self.more, **more)
        return self.parse(sent, {}, with_ or context()).request

    def refused(self, *messages: Any, with_: RequestContext | None = None) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as raised:
            self.request(*messages, with_=with_)
        return raised.value


def anthropic_image(url: str) -> Any:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def call(name: str) -> Any:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}}


FORMS = {
    "chat": Form(
        parse=chat.parse,
        image=lambda url: {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
        text=lambda text: {"type": "text", "text": text},
        result=lambda content: {"role": "tool", "tool_call_id": "c1", "content": content},
        calling={"role": "assistant", "content": None, "tool_calls": [call("c1")]},
    ),
    "messages": Form(
        parse=anthropic_messages.parse,
        image=anthropic_image,
        text=lambda text: {"type": "text", "text": text},
        result=lambda content: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": content}],
        },
        calling={
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}],
        },
        more={"max_tokens": 9},
    ),
    "responses": Form(
        parse=responses.parse,
        named="input",
        image=lambda url: {"type": "input_image", "image_url": url, "detail": "auto", "file_id": None},
        text=lambda text: {"type": "input_text", "text": text},
        result=lambda content: {"type": "function_call_output", "call_id": "c1", "output": content},
        calling={"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    ),
}
EACH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


def user(*content: Any) -> Any:
    return {"role": "user", "content": list(content)}


def texts_of(request: ChatRequest) -> list[str]:
    """The texts of a request, with the number of bytes of each image in its place."""
    texts: list[str] = []
    for message in request.messages:
        text = message.content
        for word in [item.group() for item in image_words(text)]:
            (image,) = [item for item in request.images.values() if item.word == word]
            text = text.replace(word, f"<{len(image.data)}>")
        texts.append(text)
    return texts


# ------------------------------------------------------------------------------------------ where they stand


@EACH
def test_images_stand_where_the_client_put_them(form: Form):
    png, jpeg = form.image(data_url(PNG)), form.image(data_url(JPEG))
    request = form.request(
        {"role": "system", "content": [form.text("sys"), jpeg]},
        user(form.text("see "), png, form.text(" and "), jpeg),
        {"role": "assistant", "content": "yes"},
        user(png),
    )
    assert texts_of(request) == [
        f"sys<{len(JPEG)}>",
        f"see <{len(PNG)}> and <{len(JPEG)}>",
        "yes",
        f"<{len(PNG)}>",
    ]
    assert sorted(len(image.data) for image in request.images.values()) == sorted((len(PNG), len(JPEG)))


@EACH
def test_images_in_results_do_too(form: Form):
    result = form.result([form.text("screen:"), form.image(data_url(PNG))])
    request = form.request(user(form.text("look")), form.calling, result)
    assert request.messages[-1].role == "tool"
    between = "\n" if form is FORMS["messages"] else ""
    assert texts_of(request)[-1] == f"screen:{between}<{len(PNG)}>"


@EACH
def test_the_media_type_is_not_believed(form: Form):
    request = form.request(user(form.image(data_url(JPEG, "application/pdf"))))
    assert texts_of(request) == [f"<{len(JPEG)}>"]


def test_messages_may_have_images_in_documents_and_system_text():
    form = FORMS["messages"]
    image = form.image(data_url(PNG))
    document = {"type": "document", "source": {"type": "content", "content": [form.text("page"), image]}}
    request = form.request(user(document), system=[form.text("sys"), image])
    assert texts_of(request)[0] == f"sys\n\n<{len(PNG)}>"
    assert f"page<{len(PNG)}>" in texts_of(request)[1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": data_url(PNG)},
        {"type": "input_image", "image_url": data_url(PNG)},
        {"type": "image", "source": anthropic_image(data_url(PNG))["source"]},
        {"type": "image", "source": {"type": "url", "url": data_url(PNG)}},
        {"type": "image", "data": data_url(PNG).partition(",")[2], "mimeType": "image/png"},
    ],
)
def test_a_chat_takes_the_other_forms_of_images_too(part: Any):
    assert texts_of(FORMS["chat"].request(user(part))) == [f"<{len(PNG)}>"]


@EACH
def test_a_text_that_looks_like_an_image_is_a_text(form: Form):
    request = form.request(user(form.text(f"{data_url(PNG)} [image]")))
    assert texts_of(request) == [f"{data_url(PNG)} [image]"]
    assert not request.images


# ------------------------------------------------------------------------------------------ what is refused

BAD = {
    "no base64": ("data:image/png;base64,####", "invalid_base64_image"),
    "nothing": ("data:image/png;base64,", "empty_image_file"),
    "a PDF": (data_url(b"%PDF-1.7 no image"), "invalid_image_format"),
    "an SVG": (data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "invalid_image_format"),
    "an EPS": (data_url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "invalid_image_format"),
    "half a file": (data_url(PNG[: len(PNG) // 2]), "invalid_image"),
    "a bomb": (BIG, "image_too_large"),
    "a line": (data_url(empty_png(1, 100_000)), "image_too_large"),
    "an address": ("http://127.0.0.1:1/a.png", "invalid_image_url"),
    "a file": ("file:///etc/passwd", "invalid_image_url"),
}
PATHS = {
    "chat": "messages[1].content[1].image_url.url",
    "messages": "messages[1].content[1]",
    "responses": "input[1].content[1].image_url",
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("name", FORMS)
def test_a_bad_image_in_the_question_is_refused_and_named(name: str, kind: str):
    form, (url, code) = FORMS[name], BAD[kind]
    refusal: Any
    error = form.refused(user(form.text("hi")), user(form.text("see"), form.image(url)))
    assert isinstance(error, InvalidImage)
    assert (error.param, error.code, error.status) == (PATHS[name], code, 400)
    if name == "messages":
        refusal = anthropic_refusal(error, "req_1")["error"]
        where = "url" if "://" in url else "base64"
        assert refusal["message"].startswith(f"messages.1.content.1.image.source.{where}: ")
    else:
        refusal = openai_refusal(error)["error"]
        assert refusal["message"].startswith(f"'{PATHS[name]}' ")
        assert (refusal["param"], refusal["code"]) == (PATHS[name], code)


@pytest.mark.parametrize("kind", BAD)
@EACH
def test_the_same_image_in_history_or_in_a_result_is_a_note(form: Form, kind: str):
    """Clients would send it in every turn, and could not go on."""
    image = form.image(BAD[kind][0])
    request = form.request(
        user(form.text("see"), image), form.calling, form.result([image]), user(form.text("and?"))
    )
    notes = [note for text in texts_of(request) for note in [text] if "[image: " in note]
    assert len(notes) == 2
    assert not request.images
    newest = form.request(user(form.text("look")), form.calling, form.result([image]))
    assert texts_of(newest)[-1].startswith("[image: ")


def test_anthropics_words_are_those_that_claude_code_knows():
    form = FORMS["messages"]
    small = context(max_bytes=100, max_pixels=100)
    large = form.refused(user(form.image(data_url(PNG))), with_=small)
    assert large.message == (
        "messages.0.content.0.image.source.base64: image exceeds 9.53674e-05 MB maximum: "
        f"{len(PNG) - len(PNG) % 3 + (3 if len(PNG) % 3 else 0)} bytes > 100 bytes."
    )
    wide = form.refused(user(form.image(data_url(PNG))), with_=context(max_pixels=100))
    assert "image dimensions exceed max allowed size: 40x30 pixels > 100 pixels" in wide.message
    damaged = form.refused(user(form.image(data_url(PNG[:200]))))
    assert "Could not process image" in damaged.message


def test_of_too_many_images_the_oldest_are_left_out_and_those_of_the_question_are_refused():
    for name, form in FORMS.items():
        image, other = form.image(data_url(PNG)), form.image(data_url(JPEG))
        sent = (user(image), form.calling, form.result([image]), user(form.text("see"), other))
        (last,) = form.request(*sent, with_=context(max_count=1)).images.values()
        assert last == next(iter(form.request(user(other)).images.values()))
        request = form.request(*sent, with_=context(max_count=2))
        assert "too many images" in request.messages[0].content
        assert len(request.images) == 2
        error = form.refused(
            user(image), form.calling, form.result([]), user(other, image), with_=context(max_count=1)
        )
        assert error.code == "too_many_images"
        assert "IMAGE_MAX_COUNT" in error.message or name == "messages"


def test_an_image_before_the_models_last_message_is_history_for_a_model_without_sight():
    for form in FORMS.values():
        image = form.image(data_url(PNG))
        sent = (user(form.text("see"), image), form.calling, form.result([form.text("done")]))
        request = form.request(*sent, with_=context(sees=False))
        assert not request.images
        assert "see" in request.messages[0].content
        form.refused(user(form.text("see"), image), with_=context(sees=False))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": 5},
        {"type": "input_image", "image_url": None},
        {"type": "image", "source": {"type": "base64"}},
        {"type": "image", "source": []},
    ],
)
def test_a_part_without_an_image_says_so(part: Any):
    error = FORMS["chat"].refused(user(part))
    assert (error.param, error.code) == ("messages[0].content[0]", "invalid_image")


def test_files_are_not_kept_here():
    error = FORMS["responses"].refused(user({"type": "input_image", "file_id": "file-1"}))
    assert error.code == "image_file_not_found"
    error = FORMS["messages"].refused(user({"type": "image", "source": {"type": "file", "file_id": "f"}}))
    assert "keeps no files" in error.message


# ------------------------------------------------------------------------------------ models that are blind


@EACH
def test_a_blind_model_refuses_an_image_in_the_question_and_notes_older_ones(form: Form):
    blind, image = context(sees=False), form.image(data_url(PNG))
    error = form.refused(user(form.text("see"), image), with_=blind)
    assert "this model cannot see images" in error.message
    assert error.code is None
    request = form.request(
        user(image), form.calling, form.result([image]), user(form.text("and?")), with_=blind
    )
    assert [text for text in texts_of(request) if text == UNSEEN_IMAGE] == [UNSEEN_IMAGE] * 2


# ------------------------------------------------------------------------------------------- stored responses


def test_a_stored_response_keeps_its_images():
    form, store = FORMS["responses"], ResponseStore()
    with_store = RequestContext(context().model, b"tenant", SEAL, store)
    items = [{"id": "msg_1", "type": "message", **user(form.image(data_url(PNG)))}]
    output: Mapping[str, Any] = {"output": [{"type": "message", "role": "assistant", "content": "yes"}]}
    store.keep(b"tenant", "resp_1", StoredResponse(input=items, instructions=None, body=output))
    request = form.request(user(form.text("and?")), with_=with_store, previous_response_id="resp_1")
    assert texts_of(request) == [f"<{len(PNG)}>", "yes", "and?"]
    listed = input_items(store, b"tenant", "resp_1", body())
    assert listed["data"] == items
    for word in (image.word for image in request.images.values()):
        assert word not in repr(store.get(b"tenant", "resp_1"))
