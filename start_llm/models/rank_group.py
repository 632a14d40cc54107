"""The ranks of a launch: processes that compute one network together, each with its shard of the weights.

`mlx.launch` starts them and tells each by its environment which one it is. Whatever is called here, all ranks
call in the same order: each call waits for the others.
"""

from __future__ import annotations

import json
import os
import struct
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.base import gather_last_axis

from start_llm.core.errors import ModelError, RanksApart, StartupError
from start_llm.models.architecture import completed
from start_llm.models.layer_costs import comes_out_even, head_counts, text_config

_COORDINATORS = ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP")
"""Variables in which a launch tells where rank 0 is, if it writes no list of addresses."""
_CLOCK = struct.Struct("<d")
_TEXT_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Launch:
    """What `mlx.launch` tells a process.

    Attributes:
        rank: its own number, from 0.
        address: at which the others reach rank 0, without a port.
    """

    rank: int
    address: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch | None:
        """Return what the environment tells; None if this process was not started as one of several.

        Raises:
            StartupError: it does not tell where rank 0 is.
        """
        rank = environment.get("MLX_RANK")
        if rank is None:
            return None
        if path := environment.get("MLX_HOSTFILE"):
            text = Path(path).read_text(encoding="utf-8").strip()
            return cls(int(rank), _host_of(json.loads(text)[0][0])) if text else None
        address = next((environment[name] for name in _COORDINATORS if name in environment), "")
        if not address:
            raise StartupError("MLX_RANK is set, but no variable tells where rank 0 is: use mlx.launch.")
        return cls(int(rank), _host_of(address))


def _host_of(address: str) -> str:
    """Return an address without its port, if it has one."""
    host, _, port = address.rpartition(":")
    return host if host and port.isdecimal() else address


class RankGroup:
    """All ranks, seen from one of them.

    Args:
        group: MLX's.
        address: of rank 0.

    Attributes:
        rank: the own number, from 0.
        size: how many there are.
        address: at which the others reach rank 0, without a port.
    """

    def __init__(self, group: mx.distributed.Group, address: str) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        self.address = address

    @classmethod
    def join(cls, environment: Mapping[str, str] = os.environ) -> RankGroup | None:
        """Wait for the other ranks; None if this process was not started as one of several.

        Raises:
            RanksApart: they cannot be reached.
            StartupError: the launch does not tell where they are.
        """
        launch = Launch.of(environment)
        if launch is None:
            return None
        try:
            return cls(mx.distributed.init(strict=True), launch.address)
        except (RuntimeError, ValueError) as error:
            raise RanksApart(f"Rank {launch.rank} cannot reach the others: {error}") from error

    @property
    def name(self) -> str:
        """The own place in words."""
        return f"rank {self.rank} of {self.size}"

    # ---------------------------------------------------------------------------------------- small values

    def gathered(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in their order. All are of one length."""
        words = array("I", data + bytes(-len(data) % 4))
        mine = mx.array(list(words), dtype=mx.uint32)[None]
        every = mx.distributed.all_gather(mine, group=self._group)
        rows = cast("list[list[int]]", every.tolist())
        return [array("I", row).tobytes()[: len(data)] for row in rows]

    def texts(self, own: str) -> list[str]:
        """Return a text of every rank, in their order; of a long one the beginning."""
        data = own.encode()[:_TEXT_BYTES]
        every = self.gathered(len(data).to_bytes(2, "little") + data.ljust(_TEXT_BYTES))
        return [
            row[2 : 2 + int.from_bytes(row[:2], "little")].decode("utf-8", errors="ignore") for row in every
        ]

    def least(self, own: int) -> int:
        """Return the smallest number of all ranks."""
        numbers = self.gathered(own.to_bytes(16, "little"))
        return min(int.from_bytes(number, "little") for number in numbers)

    def clock(self) -> float:
        """Return seconds on the clock of rank 0: whoever decides by it decides alike on all ranks."""
        return cast("float", _CLOCK.unpack(self.gathered(_CLOCK.pack(time.perf_counter()))[0])[0])

    # --------------------------------------------------------------------------------------- the network

    def shard(self, network: Any, config: Mapping[str, Any]) -> None:
        """Leave of a network the part that this rank computes.

        Args:
            network: its weights need not be in memory yet.

        Raises:
            ModelError: it cannot be divided among so many.
        """
        kind = str(config.get("model_type", "?"))
        divided = _divisible_part(network)
        if divided is None:
            raise ModelError(f"mlx_lm cannot divide models of type {kind!r} among several machines.")
        for heads in head_counts(text_config(completed(config))):
            if not comes_out_even(heads, self.size):
                raise ModelError(
                    f"The {heads} heads of this model cannot be divided among {self.size} ranks."
                )
        try:
            divided.shard(self._group)
        except Exception as error:
            # mlx_lm and MLX may raise anything for parts that do not come out even.
            raise ModelError(
                f"This model of type {kind!r} cannot be divided by {self.size}: {error}"
            ) from error

    def agree(self, logits: mx.array, ids: mx.array) -> mx.array:
        """Return the ids that rank 0 sampled, on every rank, without waiting for them.

        Args:
            logits: of the network. They are submitted first, so that all ranks compute the same operations in
                the same order, however each of them samples.
            ids: that were sampled from them here; those of other ranks than 0 do not matter.
        """
        mx.async_eval(logits)
        return self.from_first(ids)

    def agreeing(self, network: Any) -> Any:
        """Return a network that gives the logits of rank 0 on every rank, to the bit."""
        return _AgreeingNetwork(network, self)

    def from_first(self, own: mx.array) -> mx.array:
        """Return an array of rank 0 on every rank. Only the shape and type of theirs matter."""
        given = own if self.rank == 0 else mx.zeros_like(own)
        return mx.distributed.all_sum(given, group=self._group)

    def summed(self, own: mx.array) -> mx.array:
        """Return the sum of the arrays of all ranks."""
        return mx.distributed.all_sum(own, group=self._group)

    def gathered_last_axis(self, own: mx.array) -> mx.array:
        """Return the arrays of all ranks, joined at their last axis."""
        return gather_last_axis(own, self._group)


def _divisible_part(network: Any) -> Any:
    """Return what mlx_lm can divide of a network: itself, or the text network inside one that has eyes."""
    inner = getattr(network, "language_model", None)
    return next((part for part in (network, inner) if hasattr(part, "shard")), None)


class _AgreeingNetwork:
    """A network whose logits are those of rank 0."""

    def __init__(self, network: Any, group: RankGroup) -> None:
        self._network = network
        self._group = group

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        logits = self._network(tokens, **options)
        return self._group.agree(logits, logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)
