"""/tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from start_llm.models.loader import read
from tests.images.files import data_url, picture
from tests.server.client import ask
from tests.serving import Server, serving

TALK = [{"role": "user", "content": "Wie geht\u2019s? \U0001f41f"}]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def server(tiny_model) -> Iterator[Server]:
    with serving(tiny_model("qwen3", hidden=128, layers=2), max_kv_size=4096) as server:
        yield server


def tokenized(server: Server, **body: Any) -> dict[str, Any]:
    return server.post("/tokenize", body)


def test_a_text_has_the_tokens_that_a_completion_is_charged_for(server: Server):
    answer = tokenized(server, prompt="The fish in the sea")
    reply = server.post("/v1/completions", {"prompt": "The fish in the sea", "max_tokens": 1})
    assert sorted(answer) == ["count", "max_model_len", "tokens"]
    assert answer["count"] == len(answer["tokens"]) == reply["usage"]["prompt_tokens"]
    assert answer["max_model_len"] == server.get("/v1/models")["data"][0]["context_window"]
    assert tokenized(server, prompt=answer["tokens"])["tokens"] == answer["tokens"]


def test_messages_have_the_tokens_that_a_chat_is_charged_for(server: Server, tiny_model):
    for more in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = tokenized(server, messages=TALK, **more)
        chat = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 1, **more})
        assert answer["count"] == chat["usage"]["prompt_tokens"]
    tokenizer = read(tiny_model("qwen3", hidden=128, layers=2)).tokenizer
    plain = tokenized(server, messages=TALK)["tokens"]
    assert plain == list(
        tokenizer.encode(server.post("/detokenize", {"tokens": plain})["prompt"], as_document=False)
    )


def test_what_was_tokenized_can_be_read_again(server: Server):
    for text in ("The fish", "  Wie geht\u2019s?\n\n\U0001f41f \u6f22\u5b57", "<|im_start|>user"):
        tokens = tokenized(server, prompt=text)["tokens"]
        assert server.post("/detokenize", {"tokens": tokens}) == {"prompt": text}
    assert server.post("/detokenize", {"tokens": []}) == {"prompt": ""}
    half = tokenized(server, prompt="\U0001f41f")["tokens"][:1]
    assert server.post("/detokenize", {"tokens": half})["prompt"] in ("\ufffd", "\U0001f41f")


def test_nothing_is_computed_or_kept(server: Server):
    before = server.get("/stats")
    tokenized(server, messages=TALK)
    after = server.get("/stats")
    assert after["engine"]["generated_tokens"] == before["engine"]["generated_tokens"]
    assert after["prompt_cache"] == before["prompt_cache"]


@pytest.mark.thorough
def test_an_image_is_counted_with_the_tokens_that_the_network_reads(tiny_vision_model):
    part = {"type": "image_url", "image_url": {"url": data_url(picture())}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    with serving(tiny_vision_model()) as server:
        answer = tokenized(server, messages=messages)
        chat = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer["count"] == chat["usage"]["prompt_tokens"]
        assert max(answer["tokens"]) < 2**31, "no names of images"
        assert server.post("/detokenize", {"tokens": answer["tokens"]})["prompt"].endswith("assistant\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ("/tokenize", {"messages": TALK, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 10**9]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(server: Server, path: str, body: dict[str, Any], param: str):
    refused = ask(server.port, "POST", path, body)
    assert refused.status == 400
    assert refused.error["param"] == param
