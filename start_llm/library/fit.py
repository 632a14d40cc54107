"""Judges whether a model fits a machine, and how fast it would be.

It needs the config and the size of the weights; nothing is loaded. The figures of memory are arithmetic that
tests compare with loaded models. Speeds are an estimate: a token reads the active weights and its cache once,
and Apple's chips reach a share of their memory's bandwidth; a prompt is read at a share of the GPU's peak.
The shares are from figures that others have published for 4-bit models:

- decode, dense, 0.67: Qwen3 4B on M3 Pro 44.6 tok/s, 0.67 of 150 GB/s (mlx-lm PR 1569); a 9B of 5.1 GB on M4
  Pro 43.4 tok/s, 0.81, and on M3 Ultra 101 tok/s, 0.63 (Rapid-MLX 567)
- decode, experts, 0.35: Qwen3.6 35B-A3B on M2 Max 79.8 tok/s (Rapid-MLX PR 1065), Qwen3.5 35B-A3B on M5 Max
  133 tok/s (Mac-MLX 24), both 0.34 to 0.37: many small operations for few bytes
- prefill 0.55: Qwen3 30B-A3B 1,732 and gpt-oss 20B 1,589 tok/s on M4 Max (mlx-lm PR 406), Qwen3 4B 615 tok/s
  on M3 Pro. Attention's share grows with the context and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from start_llm.core.errors import ModelError
from start_llm.core.model_listing import Fit, FitReport, Machine
from start_llm.core.sequence_cost import SequenceCost
from start_llm.models.architecture import completed, is_divisible
from start_llm.models.footprint import context_window
from start_llm.models.image_costs import TowerCost, kept_image_bytes, tower_cost
from start_llm.models.layer_costs import (
    LayerGroup,
    head_counts,
    layer_groups,
    number_bytes,
    sequence_cost,
    text_config,
    with_number_bytes,
)
from start_llm.models.machines import MACHINES, gib
from start_llm.models.weight_files import WeightBytes, bits_per_weight, in_float32, routed_experts, sees

TYPICAL_CONTEXT = 8192
SKU_CONTEXT = 32_768
AGENT_CONTEXT = 32_768
"""Tokens that a coding agent needs: its instructions and tools alone take up to 20,000."""
_CHUNK = 2048
"""Tokens of the longest piece of a prompt that is computed at once (`engine.pacing.LONGEST_CHUNK`)."""
_HEADROOM = 0.05
"""Share of the budget for what is not counted, as in `wiring.memory_plan.usable_share`."""
_DENSE, _SPARSE, _PREFILL = 0.67, 0.35, 0.55
_NO_WINDOW = 131_072
"""Window of a model whose config states none."""


@dataclass(frozen=True)
class ModelShape:
    """A model's figures, whatever the machine.

    Attributes:
        window: longest sequence that it was made for.
        transient_bytes: activations of the longest piece of a prompt.
        bits: of one weight, with scales.
        experts_share: share of the routed experts that a token reads; 1 for a dense model.
        tower: of a model whose images are served.
        in_float32: the same once the weights are converted to float32; None if they are already.
        whole_bytes: of the weights that stay whole on each of several machines: embeddings and head.
        heads: numbers that have to come out even among several machines; empty if it cannot be divided.
    """

    name: str
    groups: Sequence[LayerGroup]
    weights: WeightBytes
    window: int
    transient_bytes: int
    bits: float
    experts_share: float
    tower: TowerCost | None = None
    in_float32: ModelShape | None = None
    whole_bytes: int = 0
    heads: tuple[int, ...] = ()

    def on(self, machine: Machine) -> ModelShape:
        """Return the figures of the model as this machine loads it: its weights may be converted to float32.

        As when it is loaded, the tower does not count for that.
        """
        converted = self.in_float32
        if converted and converted.weights.total - converted.weights.tower <= machine.float32_bytes:
            return converted
        return self

    @cached_property
    def cost(self) -> SequenceCost:
        return sequence_cost(self.groups)

    @property
    def active_bytes(self) -> int:
        """Bytes of weights that one token reads."""
        return self.weights.read_for_a_token(self.experts_share)

    def image_bytes(self, budget: int) -> int:
        """Return the memory for images that are kept as the tower has seen them."""
        return kept_image_bytes(budget) if self.tower else 0

    def computing_bytes(self, budget: int, *, is_fused: bool) -> int:
        """Return the memory for one step: a piece of a prompt, or an image in the tower.

        Args:
            is_fused: whether attention is computed without the scores of all pairs.
        """
        tower = self.tower.within(budget, is_fused=is_fused) if self.tower else 0
        return max(self.transient_bytes, tower)

    @property
    def active_parameters(self) -> float:
        return self.active_bytes * 8 / self.bits


def shape_of(name: str, config: Mapping[str, Any], weights: WeightBytes) -> ModelShape:
    """Return the figures of a model.

    Raises:
        ModelError: what its layers keep is not known, or the config has wrong values.
    """
    try:
        return _shape_of(name, with_number_bytes(completed(config), weights.number_bytes), weights)
    except (AttributeError, ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json has a value that it cannot have: {error}.") from error


def _shape_of(name: str, whole: Mapping[str, Any], weights: WeightBytes) -> ModelShape:
    experts, converted = routed_experts(whole), weights.in_float32
    shape = ModelShape(
        name=name,
        groups=layer_groups(whole),
        weights=weights,
        window=context_window(whole) or _NO_WINDOW,
        transient_bytes=_transient(text_config(whole)),
        bits=bits_per_weight(whole),
        experts_share=experts.share if experts else 1.0,
        tower=tower_cost(whole) if sees(whole) else None,
        in_float32=_shape_of(name, in_float32(whole), converted) if converted else None,
        whole_bytes=_whole_bytes(whole),
        heads=head_counts(text_config(whole)) if is_divisible(whole) else (),
    )
    if min(shape.cost.bytes_of(1), shape.active_bytes - 1, shape.bits, shape.transient_bytes) < 0:
        raise ValueError("it makes weights, cache or computing negative")
    return shape


def _whole_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of the embeddings, and of the head that reads the result, unless both are one."""
    text = text_config(config)
    is_tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings")))
    numbers = int(text.get("vocab_size") or 0) * int(text.get("hidden_size") or 0)
    return int(numbers * (1 if is_tied else 2) * bits_per_weight(config) / 8)


def _transient(text: Mapping[str, Any]) -> int:
    """Return the bytes of activations of the longest piece of a prompt."""
    return _CHUNK * activation_bytes(text, number_bytes(text))


def activation_bytes(text: Mapping[str, Any], each: int) -> int:
    """Return the bytes of activations of a token.

    Counted twice, as input and output of an operation are there at the same time: the residual stream four
    times, queries, keys and values, and the widest part of the layer three times.

    Args:
        text: config of the text model; see `layer_costs.text_config`.
        each: bytes of a number.
    """
    hidden = int(text.get("hidden_size") or 0)
    experts = routed_experts(text)
    width = int(text.get("intermediate_size") or 4 * hidden)
    if experts:
        width = max(width, experts.active * int(text.get("moe_intermediate_size") or width))
    heads = int(text.get("num_attention_heads") or 1)
    attention = 3 * heads * int(text.get("head_dim") or hidden // heads)
    return 2 * each * (4 * hidden + attention + 3 * width)


def report(shape: ModelShape, machine: Machine, context: int = TYPICAL_CONTEXT) -> FitReport:
    """Judge a model on a machine, for sequences of `context` tokens."""
    shape = shape.on(machine)
    usable = int(machine.usable_bytes * (1 - _HEADROOM))
    images = shape.image_bytes(machine.usable_bytes)
    computing = shape.computing_bytes(machine.usable_bytes, is_fused=machine.fuses_attention)
    left = usable - shape.weights.total - computing - images
    longest = min(shape.cost.tokens_in(max(left, 0)), shape.window) if left >= shape.cost.state_bytes else 0
    typical = min(context, shape.window)
    kv_bytes = shape.cost.bytes_of(typical)
    read = shape.active_bytes + kv_bytes
    return FitReport(
        fits=longest >= typical,
        context_tokens=longest,
        typical_context_tokens=typical,
        weights_bytes=shape.weights.total,
        kv_bytes=kv_bytes,
        transient_bytes=computing,
        image_bytes=images,
        usable_bytes=usable,
        read_bytes=read,
        decode_tps=_decode_tps(shape, machine, read),
        prefill_tps=_prefill_tps(shape, machine),
        verdict=_verdict(shape, shape.weights.total + computing + images, usable, longest),
    )


def _decode_tps(shape: ModelShape, machine: Machine, read_bytes: int) -> float | None:
    if machine.bandwidth_gbs is None:
        return None
    share = _DENSE if shape.experts_share == 1.0 else _SPARSE
    return round(machine.bandwidth_gbs * 1e9 / read_bytes * share, 1)


def _prefill_tps(shape: ModelShape, machine: Machine) -> float | None:
    if machine.tflops is None:
        return None
    return round(machine.tflops * 1e12 / (2 * shape.active_parameters) * _PREFILL, 1)


def _verdict(shape: ModelShape, needed: int, usable: int, longest: int) -> str:
    if needed > usable:
        return f"does not fit: weights and computing need {gib(needed)} of {gib(usable)}"
    if longest < min(AGENT_CONTEXT, shape.window):
        return f"fits, but only {longest:,} tokens; a coding agent needs {AGENT_CONTEXT:,}"
    if longest < shape.window:
        return f"fits, with {longest:,} of its {shape.window:,} tokens"
    return f"fits, with all of its {shape.window:,} tokens"


def beside(shapes: Sequence[ModelShape], machine: Machine, longest: int) -> str:
    """Say whether models stay loaded beside each other: if each has room for a prompt of its whole window.

    Args:
        longest: tokens that a prompt has at most, whatever the window.
    """
    shapes = [shape.on(machine) for shape in shapes]
    reports = [report(shape, machine) for shape in shapes]
    prompts = sum(shape.cost.bytes_of(min(shape.window, longest)) for shape in shapes)
    kept = sum(fit_report.weights_bytes + fit_report.image_bytes for fit_report in reports)
    computing, usable = max(fit_report.transient_bytes for fit_report in reports), reports[0].usable_bytes
    outcome = "they stay loaded" if kept + prompts + computing <= usable else "they take each other's place"
    return (
        f"Beside each other {outcome}: {gib(kept)} of weights and images, {gib(prompts)} for a prompt of the "
        f"whole window of each and {gib(computing)} for computing, of {gib(usable)}."
    )


def fit(shape: ModelShape, machine: Machine) -> Fit:
    """Judge a model on this machine and on all of the table."""
    fit_report = report(shape, machine)
    context = min(SKU_CONTEXT, shape.window)
    return Fit(
        model=shape.name,
        machine=machine,
        report=fit_report,
        arithmetic=arithmetic(shape, machine, fit_report),
        sku_context=context,
        skus=[(other, report(shape, other, context)) for other in MACHINES],
    )


# ------------------------------------------------------------------------------------------------- in words


def arithmetic(shape: ModelShape, machine: Machine, fit_report: FitReport) -> list[str]:
    """Return lines that show how a report's figures come about."""
    tokens, stored = fit_report.typical_context_tokens, shape
    usable = gib(fit_report.usable_bytes)
    shape = shape.on(machine)
    lines = [f"weights    {gib(shape.weights.total)}, {shape.bits:g} bits each with their scales"]
    if shape is not stored:
        lines.append(
            f"           converted from {gib(stored.weights.total)}, {stored.bits:g} bits each: a CPU is "
            "faster in float32 (CPU_DEQUANTIZE)"
        )
    if shape.experts_share < 1:
        experts = gib(shape.weights.experts)
        lines.append(
            f"           {experts} of them experts, of which a token reads {shape.experts_share:.1%}"
        )
    if shape.weights.tower:
        lines.append(
            f"           {gib(shape.weights.tower)} of them the vision tower, which text does not read"
        )
    lines += [f"layers     {group.count} x {group.kind}: {group.formula}" for group in shape.groups]
    lines += [
        f"cache      {shape.cost.token_bytes:,} bytes a token, {_fixed(shape.cost):,} bytes at most besides",
        f"           {tokens:,} tokens: {gib(fit_report.kv_bytes)}",
        f"computing  {gib(fit_report.transient_bytes)} for {_CHUNK:,} tokens of a prompt at once",
        *_image_lines(shape, fit_report),
        f"together   {gib(fit_report.total_bytes)} of {usable} that models may use here",
        f"window     {fit_report.context_tokens:,} tokens fit; the model was made for {shape.window:,}",
    ]
    return lines + _speed_lines(shape, machine, fit_report)


def _image_lines(shape: ModelShape, fit_report: FitReport) -> list[str]:
    if shape.tower is None:
        return []
    return [
        "           or for an image in the vision tower, whichever takes more",
        f"images     {gib(fit_report.image_bytes)} for those that are kept as the tower has seen them",
    ]


def _fixed(cost: SequenceCost) -> int:
    """Return the bytes of a long sequence that do not grow: windows and states."""
    return cost.state_bytes + sum(window.token_bytes * window.tokens for window in cost.windows)


def _speed_lines(shape: ModelShape, machine: Machine, fit_report: FitReport) -> list[str]:
    if fit_report.decode_tps is None or fit_report.prefill_tps is None:
        return [f"speed      not known: nothing is known of the memory of {machine.chip}"]
    share = _DENSE if shape.experts_share == 1.0 else _SPARSE
    read = f"({gib(shape.active_bytes)} weights + {gib(fit_report.kv_bytes)} cache)"
    decode = f"{machine.bandwidth_gbs:g} GB/s / {read} x {share:g} = about {fit_report.decode_tps:,.0f}"
    weights = f"(2 x {shape.active_parameters / 1e9:.2f} billion weights)"
    prefill = f"{machine.tflops:.1f} TFLOPS / {weights} x {_PREFILL:g} = about {fit_report.prefill_tps:,.0f}"
    return [f"decode     {decode} tokens a second", f"prefill    {prefill} tokens a second"]
