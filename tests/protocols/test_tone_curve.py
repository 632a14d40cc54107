"""`hlg`, the tone curve of a request, in every protocol that has generation options."""

from collections.abc import Callable
from typing import Any

import pytest

from start_llm.core.errors import InvalidRequest
from start_llm.core.sampling import RANGES, SamplingChoice
from start_llm.protocols.anthropic import messages
from start_llm.protocols.base import ParsedRequest
from start_llm.protocols.openai import chat_completions as chat
from start_llm.protocols.openai import completions
from start_llm.protocols.responses import create
from tests.protocols.helpers import CONTEXT, body

HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, tuple[Callable[..., ParsedRequest], dict[str, Any]]] = {
    "chat": (chat.parse, {"messages": HI}),
    "completions": (completions.parse, {"prompt": "hi"}),
    "messages": (messages.parse, {"messages": HI, "max_tokens": 1}),
    "responses": (create.parse, {"input": "hi"}),
}
pytestmark = pytest.mark.parametrize("protocol", LEAST)


def sampling(protocol: str, **fields: Any) -> SamplingChoice:
    parse, least = LEAST[protocol]
    return parse(body(**least, **fields), {}, CONTEXT).request.options.sampling


def test_a_curve_is_read_field_by_field(protocol):
    curve = {"enabled": True, "width": 3, "shoulder": 2.5, "toe": 7, "pivot_offset": 0}
    assert sampling(protocol, hlg=curve) == SamplingChoice(
        hlg=True, hlg_width=3, hlg_shoulder=2.5, hlg_toe=7, hlg_pivot_offset=0
    )


def test_what_a_curve_does_not_say_is_left_to_the_server(protocol):
    assert sampling(protocol, hlg={"width": 3}) == SamplingChoice(hlg_width=3)
    for nothing in (None, {}, {"enabled": None, "toe": None, "unknown": 1}):
        assert sampling(protocol, hlg=nothing) == SamplingChoice()


@pytest.mark.parametrize("switch", [True, False])
def test_a_boolean_turns_the_curve_on_or_off(protocol, switch):
    assert sampling(protocol, hlg=switch) == sampling(protocol, hlg={"enabled": switch})
    assert sampling(protocol, hlg=switch).hlg is switch


@pytest.mark.parametrize(
    ("curve", "field", "problem"),
    [
        (1, "hlg", "must be an object, not a number"),
        ("on", "hlg", "must be an object, not a string"),
        ({"enabled": 1}, "hlg.enabled", "must be a boolean, not a number"),
        ({"width": "4"}, "hlg.width", "must be a number, not a string"),
        ({"width": -1}, "hlg.width", f"must be {RANGES['hlg_width']}"),
        ({"shoulder": 0}, "hlg.shoulder", f"must be {RANGES['hlg_shoulder']}"),
        ({"toe": 1e9}, "hlg.toe", f"must be {RANGES['hlg_toe']}"),
        ({"pivot_offset": -0.1}, "hlg.pivot_offset", f"must be {RANGES['hlg_pivot_offset']}"),
    ],
)
def test_a_curve_that_makes_no_sense_is_refused_with_its_field(protocol, curve, field, problem):
    with pytest.raises(InvalidRequest) as refused:
        sampling(protocol, hlg=curve)
    assert refused.value.param == field
    assert refused.value.message == f"'{field}' {problem}."
