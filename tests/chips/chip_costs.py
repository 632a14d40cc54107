"""How long a forward pass takes on a chip: a cost model, and the chips and models that it knows.

A pass over `tokens` new tokens of each of `rows` sequences, `after` tokens of which are in the cache, lasts

    max(weights read, matrix products) + attention + latent + state + launches

- *weights read*: all of a dense model; of a mixture, the experts that so many tokens touch.
- *matrix products*: 2 FLOPs for each active parameter and token; the output head's only where a token is
  sampled, for mlx_lm leaves the logits of a chunk lazy. A product of few rows costs a whole tile, but
  no more than a few vectors: kernels for single rows exist (`_padded`). Of a mixture, each expert has a
  product of its own, so its tiles fill much later.
- *attention*: reads the keys and values of all rows, padding included, or multiplies them, whichever takes
  longer.
- *latent*: a model with latent attention (MLA) keeps one small vector for each token. A chunk of a prompt
  decompresses all of them, again for each chunk, and writes its positional scores as a mask
  [heads, tokens, after + tokens]. A single token needs neither.
- *state*: linear attention reads and writes its state once in each pass.

Everything is in bytes, FLOPs and seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GB = 1e9
T = 1e12
BANDWIDTH_SHARE = 0.8
"""Of the peak bandwidth, for weights and caches. An estimate; it gives the decode speed of the published
measurements in `tests/chips/test_chip_costs.py` within a fifth."""
ATTENTION_SHARE = 0.5
"""Of the speed of matrix products, for attention's: an estimate."""
TILE = 32
"""Rows of a matrix product's tile in MLX's quantised kernels."""
VECTOR_COST = 4
"""A product of a single row costs as much as so many rows of a full tile: an estimate."""
WEIGHT_BYTES = 4.5 / 8
"""Of a parameter in 4 bits, with a scale and a bias for every 64."""
CACHE_BYTES = 2
"""Of a number in the cache: 16 bits."""
WORK_BYTES = 2 * GB
"""Set aside for what a chunk computes."""


@dataclass(frozen=True, kw_only=True)
class ChipSpec:
    """A machine with one accelerator.

    Attributes:
        memory: bytes; `usable` the share of them that the system gives to the accelerator.
        bandwidth: peak bytes per second.
        flops: effective FLOPs per second in the prefill of a 4-bit model.
        launch_s: seconds that a layer costs even if it computes nothing.
        source: where `bandwidth` and `flops` are from.
    """

    name: str
    memory: float
    usable: float
    bandwidth: float
    flops: float
    launch_s: float
    source: str

    @property
    def read_s(self) -> float:
        """Seconds for one byte."""
        return 1 / (self.bandwidth * BANDWIDTH_SHARE)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The routed experts of a mixture.

    Attributes:
        parameters: of all of them, in all layers.
        count, chosen: in a layer, and for a token.
    """

    parameters: float
    count: int
    chosen: int

    def touched(self, tokens: int) -> float:
        """Experts of a layer that so many tokens are routed to, if each one is equally likely."""
        return self.count * (1 - (1 - self.chosen / self.count) ** tokens)

    def products(self, tokens: int) -> float:
        """Rows of all their products in a layer, tiles filled up."""
        touched = self.touched(tokens)
        return touched * _padded(tokens * self.chosen / touched)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The layers that keep something for every token.

    Attributes:
        score, value: dimensions of a head's keys and values, as they are multiplied.
        kept: numbers that a layer keeps for each token.
    """

    layers: int
    heads: int
    score: int
    value: int
    kept: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the cache for each token."""
        return self.layers * self.kept * CACHE_BYTES

    def flops(self, pairs: float) -> float:
        """Of so many pairs of a query and a key."""
        return 2 * self.layers * self.heads * (self.score + self.value) * pairs


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention, as `mlx_lm.models.glm4_moe_lite` computes it: dimensions of a head."""

    layers: int
    heads: int
    rank: int
    rope: int
    nope: int
    value: int

    def decompress_flops(self, tokens: float) -> float:
        return 2 * self.layers * self.heads * self.rank * (self.nope + self.value) * tokens

    def decompressed_bytes(self, tokens: float) -> float:
        """Keys and values, written and read."""
        return 2 * self.layers * self.heads * (self.nope + self.value) * CACHE_BYTES * tokens

    def mask_bytes(self, scores: float) -> float:
        """Positional scores: written, masked (read and written) and read."""
        return 4 * self.layers * self.heads * CACHE_BYTES * scores

    @property
    def absorbed(self) -> Attention:
        """The attention of a single token, which is multiplied with the latents themselves."""
        kept = self.rank + self.rope
        return Attention(layers=self.layers, heads=self.heads, score=kept, value=self.rank, kept=kept)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A 4-bit model.

    Attributes:
        layers: all of them.
        dense: parameters that every token multiplies, experts and head aside.
        head: parameters that make logits; as many embed tokens.
        attention: the layers that keep every token; `latent` if they do so compressed.
        state_bytes: of the layers that keep a state instead, for one sequence.
        family: the `model_type` whose shape it has.
    """

    name: str
    family: str
    layers: int
    dense: float
    head: float
    attention: Attention
    experts: Experts | None = None
    latent: Latent | None = None
    state_bytes: float = 0

    @property
    def parameters(self) -> float:
        return self.dense + 2 * self.head + (self.experts.parameters if self.experts else 0)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * WEIGHT_BYTES

    def sequence_bytes(self, tokens: int) -> float:
        """Of the caches of one sequence."""
        return self.attention.token_bytes * tokens + self.state_bytes


@dataclass(frozen=True)
class Cost:
    """Seconds of one model on one chip."""

    chip: ChipSpec
    model: ModelSpec

    def forward_s(self, rows: int, tokens: int, after: int) -> float:
        """A forward pass.

        Args:
            tokens: new ones of each row.
            after: tokens of each row in the cache, padding included.
        """
        dense = self.model.dense + (self.model.head if tokens == 1 else 0)
        products = max(self._read_s(dense, rows * tokens), self._product_s(dense, rows * tokens))
        attention = self._attention_s(rows, tokens, after) + self._latent_s(rows, tokens, after)
        state = 2 * rows * self.model.state_bytes * self.chip.read_s
        return products + attention + state + self.model.layers * self.chip.launch_s

    def copy_s(self, nbytes: float) -> float:
        """Read so many bytes and write them elsewhere."""
        return 2 * nbytes * self.chip.read_s

    @property
    def free_bytes(self) -> float:
        """For caches: what weights and work leave of the chip's memory; negative if they do not fit."""
        return self.chip.memory * self.chip.usable - self.model.weight_bytes - WORK_BYTES

    def _read_s(self, dense: float, tokens: int) -> float:
        experts = self.model.experts
        read = experts.parameters * experts.touched(tokens) / experts.count if experts else 0
        return (dense + read) * WEIGHT_BYTES * self.chip.read_s

    def _product_s(self, dense: float, tokens: int) -> float:
        experts = self.model.experts
        routed = experts.parameters / experts.count * experts.products(tokens) if experts else 0
        return 2 * (dense * _padded(tokens) + routed) / self.chip.flops

    def _attention_s(self, rows: int, tokens: int, after: int) -> float:
        latent = self.model.latent
        attention = latent.absorbed if latent and tokens == 1 else self.model.attention
        pairs = rows * tokens * (after + (tokens + 1) / 2)
        multiply_s = attention.flops(pairs) / (self.chip.flops * ATTENTION_SHARE)
        read_s = rows * (after + tokens) * self.model.attention.token_bytes * self.chip.read_s
        return max(multiply_s, read_s)

    def _latent_s(self, rows: int, tokens: int, after: int) -> float:
        latent = self.model.latent
        if latent is None or tokens == 1:
            return 0
        length = rows * (after + tokens)
        moved = latent.decompressed_bytes(length) + latent.mask_bytes(length * tokens)
        return latent.decompress_flops(length) / self.chip.flops + moved * self.chip.read_s


def _padded(rows: float) -> float:
    """Rows that a product of so many costs."""
    return min(math.ceil(rows / TILE) * TILE, VECTOR_COST * rows)


def _apple(name: str, *, memory: float, bandwidth: float, flops: float, source: str) -> ChipSpec:
    """Metal recommends two thirds of a small memory for the GPU and three quarters of a large one."""
    usable = 2 / 3 if memory <= 32 * GB else 3 / 4
    return ChipSpec(
        name=name,
        memory=memory,
        usable=usable,
        bandwidth=bandwidth,
        flops=flops,
        launch_s=80e-6,  # an estimate: some twenty kernels of 4 microseconds
        source=source,
    )


# Bandwidth and memory: the makers' specifications, largest configuration. FLOPs of M1 to M4 Pro: 2 x 6.74e9 x
# the prompt speed of LLaMA 7B Q4_0 in llama.cpp (github.com/ggml-org/llama.cpp, discussion 4167: 117.96,
# 179.57, 759.70, 439.78 tokens per second). M5 Max: an estimate, four times what Apple has published for the
# M5 with a quarter of its cores (machinelearning.apple.com, "Exploring LLMs with MLX and the Neural
# Accelerators in the M5 GPU": less than 10 s until the first token after 4,096 of a 14B 4-bit model). H100:
# an estimate, a fifth of its dense bfloat16 peak of 989 TFLOPs.
CHIPS = (
    _apple("M1", memory=16 * GB, bandwidth=68.25 * GB, flops=1.6 * T, source="llama.cpp 4167"),
    _apple("M2", memory=24 * GB, bandwidth=100 * GB, flops=2.4 * T, source="llama.cpp 4167"),
    _apple("M3 Max", memory=128 * GB, bandwidth=400 * GB, flops=10.2 * T, source="llama.cpp 4167"),
    _apple("M4 Pro", memory=64 * GB, bandwidth=273 * GB, flops=5.9 * T, source="llama.cpp 4167"),
    _apple("M5 Max", memory=128 * GB, bandwidth=614 * GB, flops=45 * T, source="estimate, from Apple's M5"),
    ChipSpec(
        name="H100",
        memory=80 * GB,
        usable=0.95,
        bandwidth=3350 * GB,
        flops=200 * T,
        launch_s=40e-6,
        source="estimate",
    ),
)

_FLASH = Latent(layers=47, heads=20, rank=512, rope=64, nope=192, value=256)

# Shapes: each model's config.json.
MODELS = (
    ModelSpec(
        name="8B",
        family="qwen3",
        layers=36,
        dense=6.95e9,
        head=0.62e9,
        attention=Attention(layers=36, heads=32, score=128, value=128, kept=2 * 8 * 128),
    ),
    ModelSpec(
        name="32B",
        family="qwen3",
        layers=64,
        dense=31.2e9,
        head=0.78e9,
        attention=Attention(layers=64, heads=64, score=128, value=128, kept=2 * 8 * 128),
    ),
    ModelSpec(
        name="30B-A3B",
        family="qwen3_moe",
        layers=48,
        dense=0.9e9,
        head=0.31e9,
        attention=Attention(layers=48, heads=32, score=128, value=128, kept=2 * 4 * 128),
        experts=Experts(parameters=29.0e9, count=128, chosen=8),
    ),
    ModelSpec(
        name="Flash",
        family="glm4_moe_lite",
        layers=47,
        dense=1.5e9,
        head=0.32e9,
        attention=Attention(layers=47, heads=20, score=192 + 64, value=256, kept=512 + 64),
        experts=Experts(parameters=27.8e9, count=64, chosen=4),
        latent=_FLASH,
    ),
    ModelSpec(
        name="hybrid 27B",
        family="qwen3_5",
        layers=64,
        dense=24.5e9,
        head=1.27e9,
        attention=Attention(layers=16, heads=24, score=256, value=256, kept=2 * 4 * 256),
        state_bytes=48 * (48 * 128 * 128 * 4 + 3 * 10_240 * 2),
    ),
)
