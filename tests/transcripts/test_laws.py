"""Nothing hidden, nothing foreign: what a model reads, whatever clients did before."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.templates.traits import TRAITS
from tests.transcripts.clients import World

N = int(os.environ.get("N", "5"))


@pytest.mark.parametrize("trait", TRAITS)
@settings(max_examples=N, deadline=None)
@given(
    random=st.randoms(use_true_random=False),
    kept=st.sampled_from(["true", "template", "false"]),
    strict=st.booleans(),
)
def test_nothing_is_hidden_and_nothing_is_foreign(trait: str, random: Random, kept: Any, strict: bool):
    World(trait, kept, random, strict=strict).live(8)
