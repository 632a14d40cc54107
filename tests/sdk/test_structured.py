"""The official packages' own helpers for answers of a type: the model says anything, and the type holds."""

from collections.abc import Generator
from typing import Annotated, Any, Literal

import pytest
from anthropic import Anthropic
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from tests.conftest import TinyModel
from tests.serving import Server, serving

BY_CHANCE: dict[str, Any] = {"top_k": 0, "min_p": 0, "seed": 7, "enable_thinking": False}
QUESTION: Any = [{"role": "user", "content": "Which fish?"}]


class Fish(BaseModel):
    """A fish."""

    kind: Literal["cod", "eel"]
    lengths: Annotated[list[Annotated[int, Field(ge=0, le=99)]], Field(max_length=3)]


class Catch(BaseModel):
    """The package leaves out bounds of a schema, so only the fields that it sends are checked."""

    kind: Literal["cod", "eel"]
    is_long: bool


@pytest.fixture(scope="module")
def server(tiny_model: TinyModel) -> Generator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2)) as running:
        yield running


@pytest.fixture
def openai(server: Server) -> Generator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="local", max_retries=0) as client:
        yield client


@pytest.mark.thorough
def test_a_chat_answer_is_parsed(openai: OpenAI):
    answer = openai.chat.completions.parse(
        model="any", messages=QUESTION, response_format=Fish, temperature=1, extra_body=BY_CHANCE
    )
    assert isinstance(answer.choices[0].message.parsed, Fish)


@pytest.mark.thorough
def test_the_arguments_of_a_chat_call_are_parsed(openai: OpenAI):
    tool = pydantic_function_tool(Fish)
    answer = openai.chat.completions.parse(
        model="any", messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        temperature=1, extra_body=BY_CHANCE,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Fish)


def test_a_response_is_parsed(openai: OpenAI):
    response = openai.responses.parse(
        model="any", input="Which fish?", text_format=Fish, temperature=1, extra_body=BY_CHANCE
    )
    assert isinstance(response.output_parsed, Fish)


def test_a_message_is_parsed(server: Server):
    with Anthropic(base_url=server.url, api_key="local", max_retries=0) as client:
        message = client.messages.parse(
            model="any",
            max_tokens=300,
            messages=QUESTION,
            output_format=Catch,
            extra_body={**BY_CHANCE, "temperature": 1},
        )
    assert isinstance(message.parsed_output, Catch)
