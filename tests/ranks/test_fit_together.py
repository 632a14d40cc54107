"""What each of several machines has of a model, by arithmetic and as it is divided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from start_llm.library.fit import report
from start_llm.library.fit_together import divided, together_lines
from start_llm.library.folders import shape_in
from start_llm.library.well_known import WELL_KNOWN
from start_llm.models.footprint import weights_bytes
from start_llm.models.loader import load
from start_llm.models.machines import machine_named
from start_llm.models.rank_group import RankGroup

DIVISIBLE = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "gpt_oss", "glm4_moe_lite", "deepseek_v3")


def rank_of(size: int) -> RankGroup:
    """The first of so many ranks, which are not there: nothing is computed."""
    return RankGroup(cast("Any", SimpleNamespace(rank=lambda: 0, size=lambda: size)), "127.0.0.1")


@pytest.mark.parametrize("family", DIVISIBLE)
@pytest.mark.sample(8)
def test_the_weights_of_a_part_are_about_those_of_the_divided_network(family, tiny_model):
    folder = tiny_model(family)
    predicted = divided(shape_in(family, folder), 2)
    model = load(folder)
    whole = weights_bytes(model)
    rank_of(2).shard(model.network, model.config)
    part = weights_bytes(model)
    assert part < 0.75 * whole
    assert predicted
    # Small parts stay whole that count as divided; of qwen3_5 the head is divided that counts as whole.
    assert 0.95 * part < predicted.weights.total < 1.15 * part


def test_a_type_that_mlx_lm_does_not_divide_fits_no_several_machines(tiny_model):
    shape = shape_in("gemma", tiny_model("gemma3_text"))
    assert divided(shape, 2) is None
    assert list(together_lines(shape, machine_named("M4 Pro 24 GB"))) == [
        "2 machines cannot divide it",
        "4 machines cannot divide it",
    ]


def test_heads_that_do_not_come_out_even_fit_no_three_machines(tiny_model):
    assert divided(shape_in("qwen3", tiny_model("qwen3")), 3) is None


def test_a_latent_is_kept_whole_and_heads_are_divided(tiny_model):
    latent, heads = (shape_in(name, tiny_model(name)) for name in ("glm4_moe_lite", "qwen3"))
    parts = [divided(shape, 2) for shape in (latent, heads)]
    assert parts[0]
    assert parts[1]
    assert parts[0].cost.token_bytes == latent.cost.token_bytes
    assert parts[1].cost.token_bytes == heads.cost.token_bytes // 2


def test_what_fits_no_single_machine_fits_two():
    shape = next(model.shape for model in WELL_KNOWN if "gpt-oss-120b" in model.repository)
    machine = machine_named("M4 Max 64 GB")
    part = divided(shape, 2)
    assert part
    assert not report(shape, machine).fits
    assert report(part, machine).fits
    first, _ = together_lines(shape, machine)
    assert first.startswith("2 machines like it: fits, with all of its 131,072 tokens; each has ")
