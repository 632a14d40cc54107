"""The cost model, held against what others have measured and against what its terms are for."""

import pytest

from tests.chips.chip_costs import CHIPS, MODELS, Attention, ChipSpec, Cost, ModelSpec

LLAMA_7B = ModelSpec(
    name="LLaMA 7B",
    family="llama",
    layers=32,
    dense=6.48e9,
    head=0.13e9,
    attention=Attention(layers=32, heads=32, score=128, value=128, kept=2 * 32 * 128),
)
# Prompt of 512 and 128 generated tokens per second, Q4_0: github.com/ggml-org/llama.cpp, discussion 4167.
PUBLISHED = {
    "M1": (117.96, 14.15),
    "M2": (179.57, 21.91),
    "M3 Max": (759.70, 66.31),
    "M4 Pro": (439.78, 50.74),
}


def chip(name: str) -> ChipSpec:
    return next(spec for spec in CHIPS if spec.name == name)


def model(name: str) -> ModelSpec:
    return next(spec for spec in MODELS if spec.name == name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_and_a_reply_are_as_fast_as_published_measurements(name):
    cost = Cost(chip(name), LLAMA_7B)
    prompt, reply = PUBLISHED[name]
    assert 512 / cost.forward_s(1, 512, 0) == pytest.approx(prompt, rel=0.1)
    assert 1 / cost.forward_s(1, 1, 64) == pytest.approx(reply, rel=0.1)


def test_eight_rows_decode_faster_than_one_and_not_eight_times_as_fast():
    cost = Cost(chip("M3 Max"), model("8B"))
    alone, together = cost.forward_s(1, 1, 2000), cost.forward_s(8, 1, 2000)
    assert alone < together < 8 * alone


def test_a_mixture_reads_a_few_experts_for_one_token_and_nearly_all_for_a_chunk():
    experts = model("30B-A3B").experts
    assert experts is not None
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(256) == pytest.approx(128, rel=0.01)


def test_short_chunks_of_a_dense_model_are_as_fast_as_long_ones_and_of_a_mixture_much_slower():
    def speed(name: str, tokens: int) -> float:
        return tokens / Cost(chip("M3 Max"), model(name)).forward_s(1, tokens, 0)

    assert speed("8B", 64) > 0.9 * speed("8B", 2048)
    assert speed("30B-A3B", 64) < 0.5 * speed("30B-A3B", 2048)


def test_a_chunk_of_a_latent_cache_pays_for_all_tokens_before_it_however_short_it_is():
    cost = Cost(chip("M3 Max"), model("Flash"))
    assert cost.forward_s(1, 32, 50_000) > 10 * cost.forward_s(1, 32, 0)
    assert cost.forward_s(1, 1, 50_000) < 5 * cost.forward_s(1, 1, 0)


def test_weights_that_do_not_fit_leave_less_than_nothing():
    assert Cost(chip("M1"), model("32B")).free_bytes < 0 < Cost(chip("M1"), model("8B")).free_bytes
