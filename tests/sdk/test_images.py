"""The official SDKs show images to a model that sees, at both ports."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import anthropic
import openai
import pytest

from tests.conftest import TinyModel
from tests.images.files import data_url, empty_png, picture
from tests.sdk.endpoints import WAY_NAMES, WAYS, Client, anthropic_client, openai_client
from tests.serving import Server, serving

pytestmark = [pytest.mark.product, pytest.mark.sample(2)]

PNG = data_url(picture(size=(96, 64)))
BOMB = data_url(empty_png(10_000, 10_000))


@pytest.fixture(scope="module")
def seeing(tiny_vision_model: TinyModel) -> Generator[Server]:
    with serving(tiny_vision_model()) as server:
        yield server


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def openai_(request: Any, seeing: Server, endpoints: Any) -> Generator[Client]:
    with closing(openai_client(request.param, seeing, endpoints)) as client:
        yield client


@pytest.fixture(scope="module", params=WAYS, ids=WAY_NAMES)
def anthropic_(request: Any, seeing: Server, endpoints: Any) -> Generator[Client]:
    with closing(anthropic_client(request.param, seeing, endpoints)) as client:
        yield client


def chat(client: Client, *urls: str) -> Any:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "See"}, *parts]
    messages = [{"role": "user", "content": content}]
    return client.call("chat.completions.create", model="any", max_tokens=2, messages=messages)


def respond(client: Client, *urls: str, **more: Any) -> Any:
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    content = [{"type": "input_text", "text": "See"}, *parts]
    asked: Any = [{"role": "user", "content": content}]
    return client.call("responses.create", model="any", max_output_tokens=2, input=asked, **more)


def block(url: str) -> Any:
    data = url.partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def say(*urls: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "See"}, *map(block, urls)]}]


def message(client: Client, *urls: str) -> Any:
    return client.call("messages.create", model="any", max_tokens=2, messages=say(*urls))


@pytest.mark.thorough
def test_a_chat_sees_an_image(openai_: Client):
    counts = [chat(openai_, *urls).usage.prompt_tokens for urls in ((), (PNG,), (PNG, PNG))]
    assert counts[1] - counts[0] == counts[2] - counts[1] > 5


@pytest.mark.sample(4)
def test_a_response_sees_an_image_and_goes_on_with_it(openai_: Client):
    without, first = respond(openai_), respond(openai_, PNG)
    assert first.usage.input_tokens > without.usage.input_tokens + 5
    second = respond(openai_, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > without.usage.input_tokens


@pytest.mark.sample(4)
def test_a_message_sees_an_image_also_in_a_result(anthropic_: Client):
    without, seen = message(anthropic_).usage, message(anthropic_, PNG).usage
    counts = [spent.input_tokens + spent.cache_read_input_tokens for spent in (without, seen)]
    assert counts[1] > counts[0] + 5
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block(PNG)]}
    talk = [*say(), {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    usage = anthropic_.call("messages.create", model="any", max_tokens=2, messages=talk).usage
    assert usage.input_tokens + usage.cache_read_input_tokens > counts[1]


def test_tokens_of_images_are_counted(anthropic_: Client):
    counted = anthropic_.call("messages.count_tokens", model="any", messages=say(PNG)).input_tokens
    usage = message(anthropic_, PNG).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.thorough
@pytest.mark.checked(2)
def test_a_bomb_is_an_exception_that_names_its_field(openai_: Client):
    for ask, field in (
        (chat, "messages[0].content[1].image_url.url"),
        (respond, "input[0].content[1].image_url"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(openai_, BOMB)
        assert field in refused.value.message
        assert refused.value.code == "image_too_large"


def test_anthropics_exception_names_the_place_of_the_image(anthropic_: Client):
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\.0\.content\.1\.image\.source\.base64: image"
    ):
        message(anthropic_, BOMB)
