"""Make vectors of texts with the network of an embedding model. Runs on the engine thread."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from start_llm.cache.layers import Layers
from start_llm.core.adapters import BASE_MODEL, AdapterStack
from start_llm.core.errors import ModelError
from start_llm.models.pooling import Pooling

LONGEST_TEXT = 8192
"""Tokens of a text. The KV of one text has to have room beside running replies and the prompt cache."""
_CHUNK = 512
"""Tokens that are computed at once."""


class Embedder:
    """Computes the hidden states of a text, without the layer that predicts tokens, and pools them.

    Args:
        network: of mlx_lm; `network.model(tokens[1, n], cache=...)` returns hidden states [1, n, hidden].
        mount: makes the network compute under adapters. Vectors are the base model's.

    Attributes:
        width: numbers of a vector.

    Raises:
        ModelError: the network does not give its hidden states.
    """

    def __init__(self, network: Any, pooling: Pooling, mount: Callable[[AdapterStack], None]) -> None:
        self._layers = Layers(network)
        self._pooling = pooling
        self._mount = mount
        self._backbone: Any = getattr(network, "model", None)
        try:
            states = cast("mx.array", self._backbone(mx.array([[0]]), cache=self._layers.fresh()))
            mx.eval(states)
            _, _, self.width = states.shape
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"This network does not give the hidden states of a text: {error}.") from error

    def embed(self, ids: Sequence[int]) -> list[float]:
        """Return the vector [width] of a text of at least one token."""
        self._mount(BASE_MODEL)
        caches, total = self._layers.fresh(), mx.zeros(self.width)
        states = mx.zeros((1, self.width))
        for start in range(0, len(ids), _CHUNK):
            chunk = mx.array([ids[start : start + _CHUNK]])
            states = self._backbone(chunk, cache=caches)[0].astype(mx.float32)
            total = total + states.sum(axis=0)
            mx.eval(total, states, [cache.state for cache in caches])
        vector = states[-1] if self._pooling.mode == "lasttoken" else total / len(ids)
        if self._pooling.normalizes:
            vector = vector / mx.maximum(mx.linalg.norm(vector), 1e-12)
        return cast("list[float]", vector.tolist())
