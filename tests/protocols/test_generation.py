"""How the limit of a reply is read in each protocol."""

from typing import Any

import pytest

from start_llm.core.chat import ChatRequest
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.anthropic import messages
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.responses import create
from tests.protocols.helpers import CONTEXT, body

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
NAMES = (
    (chat.parse, "max_tokens"),
    (chat.parse, "max_completion_tokens"),
    (create.parse, "max_output_tokens"),
    (messages.parse, "max_tokens"),
)


def limit(parse: Any, **fields: Any) -> int | None:
    request = parse(body(**QUESTION, **fields), {}, CONTEXT).request
    assert isinstance(request, ChatRequest)
    return request.options.max_tokens


@pytest.mark.parametrize(("parse", "name"), NAMES)
def test_minus_one_is_no_limit(parse: Any, name: str):
    assert limit(parse, **{name: -1}) is None
    assert limit(parse, **{name: 7}) == 7


@pytest.mark.parametrize(("parse", "name"), NAMES[:3])
def test_no_token_at_all_is_refused_and_what_means_no_limit_is_named(parse: Any, name: str):
    with pytest.raises(InvalidRequest, match="or -1 for no limit") as refused:
        limit(parse, **{name: 0})
    assert refused.value.param == name


def test_the_first_of_several_limits_counts_also_if_it_is_none():
    assert limit(chat.parse, max_tokens=5, max_completion_tokens=-1) is None
    assert limit(create.parse, max_tokens=5, max_output_tokens=3) == 3
