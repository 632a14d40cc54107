"""Qwen3 in PyTorch, for training alone: the server runs the same weights through mlx_lm."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

_GAIN = 2.5
_CONSTANT = 0.5
_PAIRS = 8


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    vocabulary: int = 2048
    hidden: int = 128
    layers: int = 5
    heads: int = 4
    head_dim: int = 32
    feed_forward: int = 384
    rope_theta: float = 1e6
    epsilon: float = 1e-6


Past: TypeAlias = list[tuple[Tensor, Tensor]]  # noqa: UP040 - PyTorch may be at home in Python 3.11
"""Keys and values of each layer, (1, heads, tokens, head_dim)."""


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.epsilon)

    def forward(
        self, x: Tensor, turn: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, _ = x.shape
        split = (batch, length, self.shape.heads, self.shape.head_dim)
        v = self.v_proj(x).view(split).transpose(1, 2)
        q = _turned(self.q_norm(self.q_proj(x).view(split).transpose(1, 2)), turn).to(v.dtype)
        k = _turned(self.k_norm(self.k_proj(x).view(split).transpose(1, 2)), turn).to(v.dtype)
        keys, values = k, v
        if past is not None:
            keys = torch.cat([past[0].expand(batch, -1, -1, -1), k], dim=2)
            values = torch.cat([past[1].expand(batch, -1, -1, -1), v], dim=2)
        y = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1)), (k, v)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """With its position in it: half-split pairs, as Hugging Face has them."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)


class Qwen3(nn.Module):
    """The names of its parameters are those of the files of Qwen3 models, without `model.`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.epsilon)
        self._initialise()

    def forward(self, ids: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """The last hidden state of each token, (batch, tokens, hidden), and the new keys and values.

        Args:
            ids: (batch, tokens).
            past: what was computed of the tokens in front, the same for all rows.
        """
        before, length = past[0][0].shape[2] if past else 0, ids.shape[1]
        turn = self._turn(before, length)
        mask = _causal(length, before) if past else None
        x = self.embed_tokens(ids)
        made: Past = []
        for number, layer in enumerate(self.layers):
            y, own = layer.self_attn(layer.input_layernorm(x), turn, past[number] if past else None, mask)
            x = x + y
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            made.append(own)
        return self.norm(x), made

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)

    def _turn(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        half = self.shape.head_dim // 2
        speeds = self.shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(start, start + length, dtype=torch.float32)[:, None] * speeds
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.embed_tokens.weight, std=0.1)
        self._look_back()

    def _look_back(self) -> None:
        """Head j of the first layer begins by looking at the token j + 1 places back.

        Copying needs that, and it is what training finds last. One dimension of the embedding is the same for
        all tokens; the keys' first pairs are made of it, and those of the queries, turned back by j + 1.
        """
        shape = self.shape
        self.embed_tokens.weight[:, 0] = _CONSTANT
        attention: Attention = self.layers[0].self_attn
        half = shape.head_dim // 2
        for head in range(shape.heads):
            rows = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
            attention.q_proj.weight[rows] *= 0.1
            attention.k_proj.weight[rows] *= 0.1
            for pair in range(_PAIRS):
                angle = -(head + 1) * shape.rope_theta ** (-pair / half)
                first, second = rows.start + pair, rows.start + pair + half
                attention.k_proj.weight[first, 0] = 1.0
                attention.q_proj.weight[first, 0] = math.cos(angle)
                attention.q_proj.weight[second, 0] = math.sin(angle)
        attention.q_norm.weight.fill_(_GAIN)
        attention.k_norm.weight.fill_(_GAIN)


def _causal(length: int, before: int) -> Tensor:
    """Additive mask, (length, before + length): each token sees all that came before it, and itself."""
    mask = torch.full((length, before + length), -torch.inf, dtype=torch.bfloat16)
    return torch.triu(mask, diagonal=before + 1)
