"""A conversation with the real model is the same out of the cache, after a restart, and computed anew."""

from __future__ import annotations

import bisect
import inspect
from pathlib import Path
from typing import Any

import pytest

from tests.real.replies import CHAT, GREEDY, STREAMS, chat_reference, post_scored, text_of
from tests.serving import Server, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

FILE = inspect.getsource(bisect)[:2600]
"""Some 800 tokens; the sliding window has 512."""
FIRST_TURN = [
    {"role": "system", "content": "You read Python."},
    {"role": "user", "content": f"{FILE}\n\nWhich functions does this file have?"},
]
SECOND_TURN = [
    *FIRST_TURN,
    {"role": "assistant", "content": "It has insort_right and bisect_right."},
    {"role": "user", "content": "And which is the fastest?"},
]
NEW_TOKENS = 100
"""The second turn adds less."""


def ask(server: Server, messages: list[dict[str, Any]], key: str = "", length: int = 10) -> Any:
    return post_scored(server.port, CHAT, {**GREEDY, "max_tokens": length, "messages": messages}, key)


def cached_tokens(reply: Any) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def computed(server: Server) -> Any:
    """The second turn as a tenant gets it who has asked nothing before."""
    reply = ask(server, SECOND_TURN, "a stranger")
    assert cached_tokens(reply) == 0
    return reply


def check(reply: Any, computed: Any) -> None:
    """The reply is the one that was computed, though most of its prompt was not."""
    tokens = reply["usage"]["prompt_tokens"]
    assert tokens == computed["usage"]["prompt_tokens"]
    assert tokens - cached_tokens(reply) < NEW_TOKENS
    chat_reference(computed).compare(text_of(reply), "the second turn")


def test_the_second_turn_says_what_it_says_computed_anew(server: Server, computed: Any):
    ask(server, FIRST_TURN, length=1)
    check(ask(server, SECOND_TURN), computed)


def test_a_restarted_server_goes_on_from_its_disk(folder: Path, tmp_path: Path, computed: Any):
    with serving(folder, batch=STREAMS, ssd_folder=str(tmp_path), drain_s=60) as before:
        ask(before, FIRST_TURN, length=1)
    with serving(folder, batch=STREAMS, ssd_folder=str(tmp_path)) as after:
        check(ask(after, SECOND_TURN), computed)
        assert after.get("/stats")["ssd"]["hits"] == 1
