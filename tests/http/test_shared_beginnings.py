"""Conversations that begin alike and part inside their first message share that beginning."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import TinyModel
from tests.serving import Server, serving
from tests.templates.traits import trait_folder

FAMILIES = ["qwen3", "gemma3_text", "qwen3_5", "glm4_moe_lite"]
RULES = " ".join(random.Random(1).choices(["fish", "sea", "boat", "cod", "net", "tide"], k=550))


def cached_share(server: Server, system: str, question: str) -> float:
    """The share of a prompt that the cache had."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    usage = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"]


@pytest.mark.thorough
@pytest.mark.checked(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_third_of_three_system_texts_with_another_folder_at_the_end_reads_only_that(
    family: str, tiny_model: TinyModel
):
    with serving(tiny_model(family, hidden=64, layers=2)) as server:
        shares = [
            cached_share(server, f"{RULES}\nFolder: /{name}", f"What is in {name}?")
            for name in ("a", "b", "c")
        ]
    assert shares[0] == 0
    assert shares[2] > 0.97


@pytest.mark.thorough
def test_sub_agents_share_a_system_text_that_the_template_folds_into_the_question(tmp_path: Path):
    with serving(trait_folder("no_system", tmp_path, hidden=64, family="gemma3_text")) as server:
        shares = [cached_share(server, RULES, f"{name}, please?") for name in ("One", "Two", "Three")]
    assert shares[2] > 0.97
