"""Greedy replies of the real model are those of `mlx_lm.server`, byte by byte."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.real.replies import CHAT, QUESTIONS, Reference, text_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

MOST_DIFFERENCE = 1e-3
"""Of a log-probability. Batches round differently."""


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_reply_is_that_of_mlx_lm(name: str, whole: dict[str, Any], theirs: dict[str, Reference]):
    theirs[name].compare(text_of(whole[name]), name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", QUESTIONS)
def test_a_streamed_reply_is_that_of_mlx_lm(name: str, streams: dict[str, str], theirs: dict[str, Reference]):
    theirs[name].compare(streams[name], f"{name}, streamed")


def test_nearly_all_of_the_replies_can_be_compared(theirs: dict[str, Reference]):
    compared = [len(ref.logprobs) if ref.tie is None else ref.tie for ref in theirs.values()]
    assert sum(compared) > 0.9 * sum(len(ref.logprobs) for ref in theirs.values())


@pytest.mark.parametrize("name", QUESTIONS)
def test_log_probabilities_are_those_of_mlx_lm(
    name: str, whole: dict[str, Any], theirs: dict[str, Reference]
):
    """Up to a tie. The token that ends a reply is not reported here."""
    here, there = logprobs_of(whole[name]), theirs[name].logprobs[: theirs[name].tie]
    assert len(here) >= len(there) - 1
    for ours, reference in zip(here, there, strict=False):
        assert math.isclose(ours, reference, abs_tol=MOST_DIFFERENCE)


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_tokens_of_a_reply_make_its_text(name: str, whole: dict[str, Any]):
    """Their bytes, in a chat. In a text completion, tokens with a part of a character are not compared."""
    (choice,) = whole[name]["choices"]
    if QUESTIONS[name].path == CHAT:
        spelled = bytes(byte for token in choice["logprobs"]["content"] for byte in token["bytes"])
        assert spelled.decode() == text_of(whole[name])
    else:
        spelled = "".join(choice["logprobs"]["tokens"])
        assert "bytes:" in spelled or spelled == text_of(whole[name])


def logprobs_of(reply: Any) -> list[float]:
    logprobs = reply["choices"][0]["logprobs"]
    if "content" in logprobs:
        return [token["logprob"] for token in logprobs["content"]]
    return logprobs["token_logprobs"]
