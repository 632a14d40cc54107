"""The chat template's view of a conversation, and the fate of its complaints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from jinja2 import TemplateError, UndefinedError

from start_llm.core.chat import ChatRequest, Json, Message, ToolCall
from start_llm.core.errors import InvalidRequest
from start_llm.core.family import Family
from start_llm.prompt.adapt import adapt
from start_llm.prompt.call_ids import in_native_form
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template import Rendering, TemplateMessage
from start_llm.prompt.template_audit.facts import TemplateFacts

USER = Message(role="user", content="hi")
SEEN_USER: TemplateMessage = {"role": "user", "content": "hi"}
THINKING = TemplateFacts(reasoning_key="reasoning_content")


class FakeTokenizer:
    """Renders nothing: it keeps what it was asked to render, or raises `error`."""

    added_tokens: Sequence[str] = ()
    end_texts: frozenset[str] = frozenset()
    chat_template = ""
    control_tokens: Mapping[str, int] = {}

    def __init__(self, *, has_chat_template: bool = True, error: Exception | None = None) -> None:
        self.has_chat_template = has_chat_template
        self.rendered: list[Any] = []
        self._error = error

    def render(
        self,
        messages: list[TemplateMessage],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        self.rendered.append((messages, tools, options, add_generation_prompt, strftime_now("%Y")))
        if self._error:
            raise self._error
        return "rendered"

    def encode(self, text: str, *, as_document: bool) -> list[int]:
        raise AssertionError("rendering needs no tokens")

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text, as_document=False)


def clock(form: str) -> str:
    return f"now as {form}"


def seen(*messages: Message, facts: TemplateFacts = THINKING) -> list[Any]:
    tokenizer = FakeTokenizer()
    adapted = adapt(ChatRequest(messages=in_native_form(messages, facts.call_ids)), facts).messages
    assert Rendering(tokenizer, (), {}, clock).text(adapted, add_generation_prompt=True) == "rendered"
    return tokenizer.rendered[0][0]


def test_a_template_sees_role_and_content_and_only_what_else_was_given():
    assert seen(USER) == [{"role": "user", "content": "hi"}]
    assert seen(Message(role="user", name="Ann")) == [{"role": "user", "content": "", "name": "Ann"}]


def test_reasoning_and_calls_are_seen_in_the_form_that_templates_expect():
    call = ToolCall("client-spelling", "read", {"path": "a.txt"})
    turn = Message(role="assistant", reasoning="because", tool_calls=(call,))
    result = Message(role="tool", content="9 m", tool_call_id="client-spelling")
    function = {"name": "read", "arguments": {"path": "a.txt"}}
    assert seen(turn, result) == [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "because",
            "tool_calls": [{"id": "call0", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "9 m", "tool_call_id": "call0"},
    ]


def test_reasoning_stands_under_the_name_that_the_template_reads_and_under_no_other():
    turn = Message(role="assistant", content="Yes", reasoning="because")
    (elsewhere,) = seen(turn, facts=TemplateFacts(reasoning_key="thinking"))
    assert elsewhere == {"role": "assistant", "content": "Yes", "thinking": "because"}
    assert seen(turn, facts=TemplateFacts()) == [{"role": "assistant", "content": "Yes"}]


def test_a_template_cannot_change_the_request():
    call = ToolCall("call1", "read", {"path": "a.txt"})
    (message,) = seen(Message(role="assistant", tool_calls=(call,)))
    message["tool_calls"][0]["function"]["arguments"]["path"] = "b.txt"
    assert call.arguments == {"path": "a.txt"}


def test_tools_and_options_and_the_clock_reach_the_template_and_no_tools_are_none():
    tokenizer = FakeTokenizer()
    tool: dict[str, Json] = {"type": "function", "function": {"name": "read"}}
    Rendering(tokenizer, [tool], {"enable_thinking": False}, clock).text(
        [SEEN_USER], add_generation_prompt=True
    )
    Rendering(tokenizer, [], {}, str.lower).text([SEEN_USER], add_generation_prompt=False)
    assert tokenizer.rendered == [
        ([SEEN_USER], [tool], {"enable_thinking": False}, True, "now as %Y"),
        ([SEEN_USER], None, {}, False, "%y"),
    ]


@pytest.mark.parametrize(
    "error",
    [
        TemplateError("System message must be at the beginning"),
        UndefinedError("'dict object' has no attribute 'name'"),
        TypeError("can only concatenate str"),
        ValueError("Conversation roles must alternate"),
        KeyError("arguments"),
        AttributeError("'list' object has no attribute 'strip'"),
        AssertionError("Invalid message for role"),
        NotImplementedError("Unknown role"),
        IndexError("list index out of range"),
        ZeroDivisionError("division by zero"),
        RecursionError("maximum recursion depth exceeded"),
        AssertionError("Invalid message for role `assistant`"),
        IndexError("list index out of range"),
        RuntimeError("cannot render this"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_template_that_refuses_gives_a_400_that_names_the_messages(error):
    with pytest.raises(InvalidRequest) as refused:
        Rendering(FakeTokenizer(error=error), (), {}, clock).text([SEEN_USER], add_generation_prompt=True)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert str(error) in refused.value.message


@pytest.mark.parametrize("error", [OSError("gone"), MemoryError()])
def test_an_error_that_is_not_the_templates_is_not_blamed_on_the_client(error):
    with pytest.raises(type(error)):
        Rendering(FakeTokenizer(error=error), (), {}, clock).text([SEEN_USER], add_generation_prompt=True)


def test_an_error_without_words_is_reported_by_its_name():
    with pytest.raises(InvalidRequest, match="refuses these messages: AssertionError"):
        Rendering(FakeTokenizer(error=AssertionError()), (), {}, clock).text(
            [SEEN_USER], add_generation_prompt=True
        )


def test_a_model_without_a_template_refuses_conversations():
    tokenizer = FakeTokenizer(has_chat_template=False)
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions") as refused:
        Preparer(tokenizer, Family(name="generic")).prepare(ChatRequest(messages=(USER,)))
    assert refused.value.param == "messages"
    assert tokenizer.rendered == []
