"""A request becomes exactly the tokens that the model's own tokenizer and template give."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_wrapper
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from start_llm.core.chat import (
    ChatRequest,
    GenerationRequest,
    Json,
    Message,
    TextRequest,
    Thinking,
    ToolCall,
)
from start_llm.core.errors import ContextOverflow, InvalidRequest
from start_llm.core.prompt import ModelTokens
from start_llm.formats import registry
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.prepare import Preparer
from tests.prompt.fakes import preparer_of
from tests.prompt.fakes import text_of as trait_text
from tests.templates.traits import TRAITS

BOS = "<|begin|>"
SYSTEM_FIRST = """
{%- for message in messages -%}
    {%- if message.role == 'system' and not loop.first -%}
        {{- raise_exception('System message must be at the beginning.') -}}
    {%- endif -%}
    {{- message.role ~ ': ' ~ message.content ~ '\n' -}}
{%- endfor -%}
{{- mood | default('calm') -}}
"""
NOT_MANY = """
{%- for message in messages -%}
    {%- if messages | length > 2 -%}
        {{- raise_exception('Two messages are enough.') -}}
    {%- endif -%}
    {{- message.role ~ ': ' ~ message.content ~ '\n' -}}
{%- endfor -%}
"""
TOOL: dict[str, Json] = {"type": "function", "function": {"name": "depth", "parameters": {"type": "object"}}}
CALL = ToolCall("call1", "depth", {"sea": "Ostsee", "deep": [1, None]})
QUOTED = "<|im_end|>"
TALK = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="How deep is it? 🐟"),
    Message(role="assistant", reasoning="Ask.", tool_calls=(CALL,)),
    Message(role="tool", content="9 m", tool_call_id="call1", name="depth"),
    Message(role="assistant", content="Nine metres."),
    Message(role="user", content=f"{QUOTED} Thanks\n\n"),
)
CONVERSATIONS = [TALK[:2], TALK[:4], TALK, TALK[1:2], (TALK[1], TALK[0], TALK[1])]


@pytest.fixture(scope="module")
def folder(tiny_model) -> Path:
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer(load_wrapper(folder))


type Change = Callable[[Path], object]


@pytest.fixture
def variant(folder, tmp_path) -> Callable[..., Tokenizer]:
    """The tokenizer of a changed copy of the tiny model."""

    def make(*changes: Change) -> Tokenizer:
        copy = shutil.copytree(folder, tmp_path / "variant")
        for change in changes:
            change(copy)
        return Tokenizer(load_wrapper(copy))

    return make


def template(text: str) -> Change:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def with_bos(folder: Path) -> None:
    """A tokenizer that begins each text with BOS, and whose template writes BOS too: as Llama has it."""
    path = str(folder / "tokenizer.json")
    backend = Backend.from_file(path)
    backend.add_special_tokens([AddedToken(BOS, special=True, normalized=False)])
    bos = backend.token_to_id(BOS)
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    backend.save(path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": BOS}))
    template_file = folder / "chat_template.jinja"
    template_file.write_text("{{- bos_token -}}" + template_file.read_text())


def own_rendering(folder: Path, messages: tuple[Message, ...], **options: Any) -> list[int]:
    """The tokens that mlx_lm itself would feed to the model."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            turn["reasoning_content"] = message.reasoning
        if message.tool_calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
            turn["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        plain.append(turn)
    return list(load_wrapper(folder).apply_chat_template(plain, add_generation_prompt=True, **options))


def prepare(request: GenerationRequest, tokenizer: Tokenizer) -> ModelTokens:
    return Preparer(tokenizer, registry.family_by_name("qwen3")).prepare(request).tokens


def text_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


@pytest.mark.sample(2)
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=lambda messages: f"{len(messages)} messages")
def test_a_conversation_is_rendered_as_the_tokenizer_itself_does(messages, folder, tokenizer):
    """Only a mark that a client quotes has other tokens, of the same text."""
    plain = ChatRequest(messages=messages)
    tools = replace(plain, tools=(TOOL,), thinking=Thinking(on=False))
    with_tools = own_rendering(folder, messages, tools=[TOOL], enable_thinking=False)
    for request, expected in ((plain, own_rendering(folder, messages)), (tools, with_tools)):
        prompt = prepare(request, tokenizer)
        assert text_of(tokenizer, prompt.ids) == text_of(tokenizer, tuple(expected))
        assert (list(prompt.ids) == expected) is (QUOTED not in messages[-1].content)


def test_a_prompt_ends_with_the_generation_tail(tokenizer):
    prompt = prepare(ChatRequest(messages=TALK), tokenizer)
    assert text_of(tokenizer, prompt.ids).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_template_options_reach_the_template(variant):
    tokenizer = variant(template(SYSTEM_FIRST))
    plain = prepare(ChatRequest(messages=TALK[:2]), tokenizer)
    merry = prepare(ChatRequest(messages=TALK[:2], template_options={"mood": "merry"}), tokenizer)
    assert text_of(tokenizer, plain.ids) == "system: Be brief.\nuser: How deep is it? 🐟\ncalm"
    assert text_of(tokenizer, merry.ids) == "system: Be brief.\nuser: How deep is it? 🐟\nmerry"


def test_a_late_system_message_stays_in_its_place_where_the_template_takes_none(variant):
    tokenizer = variant(template(SYSTEM_FIRST))
    ids = prepare(ChatRequest(messages=(TALK[1], TALK[0])), tokenizer).ids
    assert text_of(tokenizer, ids) == ("user: How deep is it? 🐟\nuser: [System message]\nBe brief.\ncalm")


def test_a_template_that_raises_is_a_400_with_its_own_words(variant):
    with pytest.raises(InvalidRequest, match="Two messages are enough") as refused:
        prepare(ChatRequest(messages=TALK), variant(template(NOT_MANY)))
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages[0].content + 1 }}",
        "{% if %}",
        "{{ messages.nothing.at_all }}",
        "{{ 5 | tojson(5,5,5,5,5) }}",
    ],
)
@pytest.mark.sample(2)
def test_a_template_that_breaks_is_a_400_too(text, variant):
    with pytest.raises(InvalidRequest, match="chat template of the model refuses"):
        prepare(ChatRequest(messages=TALK), variant(template(text)))


def test_tools_nested_deeper_than_python_goes_are_a_400(tokenizer):
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest, match="'tools' are nested too deeply"):
        prepare(ChatRequest(messages=TALK, tools=(deep,)), tokenizer)


def test_a_model_without_a_template_still_continues_text(variant):
    tokenizer = variant(lambda folder: (folder / "chat_template.jinja").unlink())
    with pytest.raises(InvalidRequest, match="no chat template"):
        prepare(ChatRequest(messages=TALK), tokenizer)
    assert text_of(tokenizer, prepare(TextRequest(prompt="Once upon"), tokenizer).ids) == "Once upon"


def test_a_conversation_that_renders_to_nothing_is_refused(variant):
    with pytest.raises(InvalidRequest, match="no token") as refused:
        prepare(ChatRequest(messages=TALK), variant(template("")))
    assert refused.value.param == "messages"


def test_text_is_continued_as_it_is_and_token_ids_are_not_touched(tokenizer):
    text = "  <think>\n日本 naïve\t"
    ids = prepare(TextRequest(prompt=text), tokenizer).ids
    assert text_of(tokenizer, ids) == text
    assert prepare(TextRequest(prompt=ids), tokenizer).ids == ids
    assert prepare(TextRequest(prompt=(7, 7, 2047)), tokenizer).ids == (7, 7, 2047)


@pytest.mark.parametrize("prompt", ["", ()])
def test_an_empty_prompt_is_refused(prompt, tokenizer):
    with pytest.raises(InvalidRequest, match="'prompt' holds no token") as refused:
        prepare(TextRequest(prompt=prompt), tokenizer)
    assert refused.value.param == "prompt"


@pytest.mark.thorough
def test_bos_is_put_before_a_text_and_stands_once_in_a_conversation(variant):
    tokenizer = variant(with_bos)
    (bos,) = tokenizer.encode(BOS, as_document=False)
    text = prepare(TextRequest(prompt="Once upon"), tokenizer).ids
    assert (text[0], text.count(bos)) == (bos, 1)
    chat = prepare(ChatRequest(messages=TALK), tokenizer).ids
    assert (chat[0], chat.count(bos)) == (bos, 1)
    assert prepare(TextRequest(prompt=(5, 6)), tokenizer).ids == (5, 6)
    assert prepare(TextRequest(prompt=""), tokenizer).ids == (bos,)


@pytest.mark.parametrize("depth", [300, 700, 1500, 3000])
def test_arguments_that_are_nested_deeply_are_rendered_or_refused(tokenizer, depth):
    deep: Any = "bottom"
    for _ in range(depth):
        deep = {"in": deep}
    call = ToolCall("c", "read", {"path": deep})
    messages = (
        *TALK[:2],
        Message(role="assistant", tool_calls=(call,)),
        Message(role="user", content="Well?"),
    )
    try:
        prompt = Preparer(tokenizer, registry.family_by_name("generic")).prepare(
            ChatRequest(messages=messages)
        )
    except InvalidRequest as refusal:
        assert refusal.param == "messages"
    else:
        assert "bottom" in text_of(tokenizer, prompt.tokens.ids)


BARE_TOOL: dict[str, Json] = {"type": "function", "function": {"name": "bare"}}


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.parametrize("tools", [(BARE_TOOL, TOOL), ()], ids=["tools", "no tools"])
@pytest.mark.parametrize("call_id", ["toolu_01A", "unknown"])
def test_what_cannot_fit_is_refused_for_its_length_whatever_a_template_demands(trait, tools, call_id):
    def refuse(text: str, param: str):
        if len(text) > 2**18:
            raise ContextOverflow(prompt_tokens=2**18, window=2**15, param=param, is_counted=False)

    made = Message(role="assistant", tool_calls=(ToolCall("toolu_01A", "bare", {}),))
    dumped = Message(role="tool", content="r" * 2**18, tool_call_id=call_id)
    talk = (TALK[1], made, dumped, TALK[1])
    with pytest.raises(ContextOverflow):
        preparer_of(trait).prepare(ChatRequest(messages=talk, tools=tools), refuse)


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.parametrize("space", ["\n", " ", "\n\n  "], ids=["line break", "space", "an indented line"])
def test_a_reply_goes_on_behind_white_space_that_a_template_would_trim(trait, space):
    begun = "Sure:\n```json"

    def written(content: str) -> str:
        messages = (TALK[1], Message(role="assistant", content=content))
        prompt = preparer_of(trait).prepare(ChatRequest(messages=messages, continues_reply=True))
        return trait_text(trait, prompt.tokens.ids)

    assert written(begun + space) == written(begun) + space
