"""Arrays that the cache keeps can be read on any thread, and keep nothing else alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from start_llm.cache.layers import Layers, materialize
from tests.mlx_memory import active_bytes

LENGTH = 40
SLACK = 20_000
"""mlx keeps a buffer that is no more than 16 KiB too large."""


class Network:
    """One that only has caches."""

    def make_cache(self) -> list[Any]:
        return [KVCache(), RotatingKVCache(24), ArraysCache(1)]


def fed(length: int = LENGTH, width: int = 64) -> list[Any]:
    """Caches whose plain leaf and whose window hold 0, 1, 2 ...; the recurrent one has the last of these."""
    caches = Network().make_cache()
    for leaf in caches[:2]:
        for start in range(0, length, 8):
            places = mx.arange(start, start + 8, dtype=mx.float32)[None, None, :, None]
            leaf.update_and_fetch(*[mx.broadcast_to(places, (1, 1, 8, width))] * 2)
            mx.eval(leaf.state)
    caches[2][0] = mx.full((1, 1, width), length - 1)
    mx.eval(caches[2].state)
    return caches


def on_a_thread(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, made on a thread with a stream of its own that has ended since."""
    made: list[Any] = []

    def run() -> None:
        made.append(work())
        mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return made[0]


def first_numbers(array: mx.array) -> list[float]:
    """One for each place; fails if the array is still to be computed on another thread's stream."""
    return np.array(array)[0, ..., 0].flatten().tolist()


# ---------------------------------------------------------------------------------------------------- threads


def test_a_cut_is_computed_where_it_was_made():
    cut = on_a_thread(lambda: Layers(Network()).cut(fed(), 5, 9))
    assert first_numbers(cut.leaves[0][0]) == [5, 6, 7, 8]


def test_a_state_is_computed_where_it_was_made():
    state = on_a_thread(lambda: Layers(Network()).state(fed()))
    (window, _), (recurrent, _) = state.leaves
    assert first_numbers(window[0]) == list(range(LENGTH - 24, LENGTH))
    assert first_numbers(recurrent[0]) == [LENGTH - 1]


def test_what_is_kept_of_caches_that_were_given_up_is_computed_where_it_was_done():
    def work() -> Any:
        pieces = Layers(Network()).give_up(fed())
        pieces.keep(0, 2, 5)
        return pieces

    pieces = on_a_thread(work)
    ((_, values),) = pieces.part(2, 5).take(0)
    assert first_numbers(values) == [2, 3, 4]


def test_assembled_caches_are_computed_where_it_was_done():
    def work() -> list[Any]:
        layers, caches = Layers(Network()), fed()
        return layers.assemble([layers.view(caches, 0, LENGTH)], layers.state(caches), LENGTH)

    plain, window, recurrent = on_a_thread(work)
    assert first_numbers(plain.keys)[:LENGTH] == list(range(LENGTH))
    assert first_numbers(window.values) == list(range(LENGTH - 24, LENGTH))
    assert first_numbers(recurrent[0]) == [LENGTH - 1]


def test_settled_caches_are_computed_where_it_was_done():
    def work() -> list[Any]:
        caches = fed()
        caches[2][0] = caches[2][0] + 1
        materialize(caches)
        return caches

    assert first_numbers(on_a_thread(work)[2][0]) == [LENGTH]


# ----------------------------------------------------------------------------------------------------- memory


def test_caches_that_came_out_of_a_batch_keep_nothing_of_it():
    before = active_bytes()
    batch = mx.zeros((4, 1000, 64)) + 1
    caches = Network().make_cache()
    caches[2][0] = batch[:1]
    mx.eval(batch, caches[2].state)
    layers = Layers(Network())
    materialize(caches)
    del batch
    assert active_bytes() - before < layers.nbytes(caches) + SLACK


@pytest.mark.parametrize("are_views", [False, True])
@pytest.mark.sample(2)
def test_settled_caches_are_never_there_twice(are_views):
    others = active_bytes()
    caches = [KVCache() for _ in range(8)]
    for cache in caches:
        cache.keys, cache.values = mx.zeros((1, 2, 4096, 64)) + 1, mx.zeros((1, 2, 4096, 64)) + 2
        cache.offset = 4096
    mx.eval([cache.state for cache in caches])
    if are_views:
        for cache in caches:
            cache.keys, cache.values = (cast("mx.array", array)[..., :2048, :] for array in cache.state[:2])
            cache.offset = 2048
    before = active_bytes()
    mx.reset_peak_memory()
    materialize(caches)
    assert mx.get_peak_memory() - before <= (before - others) / 8
    assert Layers(Network()).nbytes(caches) == pytest.approx(active_bytes() - others, abs=SLACK)


@pytest.mark.thorough
def test_what_is_kept_of_caches_that_were_given_up_keeps_nothing_else_of_them():
    before = active_bytes()
    caches, layers = fed(800, width=512), Layers(Network())
    caches[1:] = Network().make_cache()[1:]
    pieces = layers.give_up(caches)
    assert active_bytes() - before == pytest.approx(pieces.nbytes, abs=SLACK)
    pieces.keep(0, 64, 256)
    assert pieces.nbytes == pieces.bytes_of(64, 256)
    assert active_bytes() - before < pieces.nbytes + SLACK


# -------------------------------------------------------------------------------------------------- positions


def test_what_is_assembled_goes_on_where_it_ends():
    layers, caches = Layers(Network()), fed()
    copy = layers.assemble([layers.cut(caches, 0, LENGTH)], layers.state(caches), LENGTH)
    assert [copy[0].offset, copy[1].offset] == [LENGTH, LENGTH]
    seen, _ = copy[0].update_and_fetch(*[mx.full((1, 1, 1, 64), 99)] * 2)
    assert first_numbers(seen) == [*range(LENGTH), 99]


def test_what_is_trimmed_goes_on_where_it_was_cut_off():
    layers, caches = Layers(Network()), fed()
    layers.trim(caches, 7)
    seen, _ = caches[0].update_and_fetch(*[mx.full((1, 1, 1, 64), 99)] * 2)
    assert first_numbers(seen) == [*range(7), 99]


def test_a_window_that_has_turned_round_goes_on_in_order():
    layers, caches = Layers(Network()), fed()
    for token in range(LENGTH, LENGTH + 5):
        caches[1].update_and_fetch(*[mx.full((1, 1, 1, 64), token)] * 2)
    state = layers.state(caches)
    copy = layers.fresh()
    layers.set_state(copy, state)
    assert layers.cut(copy[1:], 0, 10).nbytes == 0, "a window cannot be cut"
    seen, _ = copy[1].update_and_fetch(*[mx.full((1, 1, 3, 64), 99)] * 2)
    assert first_numbers(seen)[-26:] == [*range(LENGTH + 5 - 23, LENGTH + 5), 99, 99, 99]


def test_two_restores_of_one_state_do_not_write_into_each_other():
    layers, caches = Layers(Network()), fed()
    state = layers.state(caches)
    first, second = layers.fresh(), layers.fresh()
    for copy in (first, second):
        layers.set_state(copy, state)
    for _ in range(24):
        first[1].update_and_fetch(*[mx.full((1, 1, 1, 64), 99)] * 2)
    first[2][0] = mx.zeros((1, 1, 64))
    assert first_numbers(second[1].keys) == list(range(LENGTH - 24, LENGTH))
    assert first_numbers(second[2][0]) == [LENGTH - 1]


def test_a_state_does_not_go_on_with_the_caches_that_it_was_taken_of():
    layers, caches = Layers(Network()), fed()
    state = layers.state(caches)
    caches[1].update_and_fetch(*[mx.full((1, 1, 1, 64), 99)] * 2)
    caches[2][0] = mx.zeros((1, 1, 64))
    (window, _), (recurrent, _) = state.leaves
    assert first_numbers(window[0]) == list(range(LENGTH - 24, LENGTH))
    assert first_numbers(recurrent[0]) == [LENGTH - 1]
