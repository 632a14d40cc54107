"""What a launch tells a process, and which networks can be divided."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from start_llm.core.errors import ModelError, RanksApart, StartupError
from start_llm.models.rank_group import Launch, RankGroup


def group(size: int) -> RankGroup:
    """One of so many ranks, which are not there."""
    return RankGroup(cast("Any", SimpleNamespace(rank=lambda: 0, size=lambda: size)), "127.0.0.1")


class Divisible:
    def __init__(self, error: Exception | None = None) -> None:
        self.groups: list[object] = []
        self._error = error

    def shard(self, among: object) -> None:
        self.groups.append(among)
        if self._error:
            raise self._error


def test_a_process_that_nobody_launched_is_no_rank():
    assert Launch.of({}) is None
    assert RankGroup.join({}) is None


def test_ranks_that_do_not_answer_are_no_wrong_launch(tmp_path: Path, monkeypatch):
    def init(*, strict: bool) -> None:
        raise RuntimeError("[ring] Couldn't connect")

    (tmp_path / "hosts").write_text('[["10.0.0.1:1"], ["10.0.0.2:1"]]')
    monkeypatch.setattr("mlx.core.distributed.init", init)
    with pytest.raises(RanksApart, match="Rank 1 cannot reach the others"):
        RankGroup.join({"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path / "hosts")})


def test_a_launch_of_a_single_process_is_none(tmp_path: Path):
    (tmp_path / "hosts").write_text("\n")
    assert RankGroup.join({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}) is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ('[["10.0.0.1:32323", "10.0.1.1:32324"], ["10.0.0.2:32325"]]', "10.0.0.1"),
        ('[["fd00::1:32323"], ["fd00::2:32324"]]', "fd00::1"),
    ],
)
def test_a_list_of_addresses_says_where_rank_0_is(tmp_path: Path, text: str, address: str):
    (tmp_path / "hosts").write_text(text)
    assert Launch.of({"MLX_RANK": "1", "MLX_HOSTFILE": str(tmp_path / "hosts")}) == Launch(1, address)


@pytest.mark.parametrize("name", ["MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"])
def test_a_coordinator_says_where_rank_0_is(name: str):
    assert Launch.of({"MLX_RANK": "1", name: "10.0.0.1:12345"}) == Launch(1, "10.0.0.1")
    assert Launch.of({"MLX_RANK": "1", name: "10.0.0.1"}) == Launch(1, "10.0.0.1")


def test_a_launch_that_does_not_say_where_rank_0_is_cannot_be_joined():
    with pytest.raises(StartupError, match=r"use mlx\.launch"):
        Launch.of({"MLX_RANK": "1"})


def test_a_network_is_divided_by_its_own_method():
    network = Divisible()
    group(2).shard(network, {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2})
    assert len(network.groups) == 1


def test_a_type_that_mlx_lm_does_not_divide_is_named():
    with pytest.raises(ModelError, match="'gemma3_text'"):
        group(2).shard(object(), {"model_type": "gemma3_text"})


@pytest.mark.parametrize(
    "heads",
    [
        {"num_attention_heads": 6},
        {"num_attention_heads": 8, "num_key_value_heads": 6},
        {"text_config": {"num_attention_heads": 8, "linear_num_value_heads": 6}},
    ],
)
def test_heads_that_do_not_come_out_even_are_named(heads: dict[str, Any]):
    """mlx_lm would divide 6 heads of 64 numbers by 4 without a word, into heads of 96."""
    network = Divisible()
    with pytest.raises(ModelError, match="The 6 heads of this model cannot be divided among 4 ranks"):
        group(4).shard(network, {"model_type": "qwen3", **heads})
    assert not network.groups


def test_few_heads_of_keys_are_left_to_the_network_which_may_repeat_them():
    network = Divisible()
    group(4).shard(network, {"model_type": "qwen3_5", "num_attention_heads": 8, "num_key_value_heads": 2})
    assert network.groups


def test_what_a_network_cannot_divide_is_named():
    with pytest.raises(ModelError, match="cannot be divided by 2: too narrow"):
        group(2).shard(Divisible(ValueError("too narrow")), {"model_type": "qwen3"})
