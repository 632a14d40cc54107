"""The memory of the prompt cache: parts of `cache.py`."""

import os
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generation_stream

from benchmarks.cache_engine import (
    CHUNK,
    FOUR_LAYERS,
    MAX_STEPS,
    REPLY_TOKENS,
    SMALL,
    USUAL_FAMILIES,
    CachedEngine,
    Conversation,
    Families,
    Model,
    Size,
    mark,
    marks,
    models,
    prompt,
)
from start_llm.engine.admission import Admission
from start_llm.engine.cost import measure_sequence
from start_llm.engine.start_measurements import measure_work
from tests.cache.conversations import Talkers, talk
from tests.engine.harness import Watched, Wrapped, engine_request
from tests.mlx_memory import active_bytes

_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
DEEP = {"dense": Size(128, 8, _HEADS)}
DEEPER = Size(128, 24, _HEADS)
"""Models whose KV outweighs what a step takes, as in real ones: attention without a fused kernel takes memory
for each head, and one layer at a time is copied when caches grow. Where not all layers have full attention,
one in four has.
"""
SESSIONS = 20
SESSION_TOKENS = 500
TURNS = 10
SMALL_BUDGET_TOKENS = 1_000
SMALL_PAGE = 32
ROOM = 1.1
"""Conversations for which a tight budget has room."""
ROWS, LASTING = 4, 256
"""Rows that join, and the most tokens of their replies."""
REMEMBERED = 6
"""The conversations that `Talkers` may go on with, beside the first, and the requests that it may repeat."""


@marks
def stored(folder: Path, *, family: Families = USUAL_FAMILIES, lengths: Sequence[int] = (8192,)) -> None:
    """Bytes after many sessions on one system prompt, beside KV of distinct tokens and kept states."""
    for model in models(folder, family, FOUR_LAYERS):
        for length in lengths:
            _many_sessions(model, length)


def _many_sessions(model: Model, system_tokens: int) -> None:
    engine, system = CachedEngine(model), prompt(system_tokens)
    for seed in range(1, SESSIONS + 1):
        Conversation(engine, system).ask(prompt(SESSION_TOKENS, seed))
    tokens = system_tokens + SESSIONS * (SESSION_TOKENS + REPLY_TOKENS)
    states = engine.cached.checkpoints + engine.cached.seq_caches if model.layers.has_state else 0
    cost = model.bytes_of()
    held, ideal = engine.cached.stored_bytes, cost.token * tokens + cost.state * states
    size = f"{SESSIONS} sessions of {SESSION_TOKENS} on {system_tokens:,} tokens, {states} states"
    measured = f"{held / ideal:.3f} ({held / 1e6:.1f} of {ideal / 1e6:.1f} MB)"
    mark("stored / ideal", model, size, measured, "<= 1.05")


# ------------------------------------------------------------------------------------------------------- peak


@marks
def peak(folder: Path, *, family: Families = USUAL_FAMILIES, lengths: Sequence[int] = (32_768,)) -> None:
    """Highest MLX memory of a growing conversation, weights left out, over the KV that it ends with.

    Less a chunk's work, which is what the same chunks take beyond their KV in mlx_lm's own caches. Then over
    the budget, if that is 1.1 conversations: of one that goes on from pages, of rows that join and leave a
    batch.
    """
    for name in family:
        for length in lengths:
            _highest_of_a_conversation(next(models(folder, [name], DEEP.get(name, DEEPER))), length)
            _highest_over_a_tight_budget(next(models(folder, [name], DEEPER)), length)


def _highest_of_a_conversation(model: Model, length: int) -> None:
    needed = model.bytes_of().of(length)
    chunks: list[int] = []
    ours, between = _highest(lambda after_step: _grow(model, length, chunks, after_step))
    bare, _ = _highest(lambda _: _compute_bare(model, chunks))
    size = f"{length:,} tokens in {TURNS} turns, chunks up to {max(chunks)}"
    for name, held, limit in (
        ("(peak - a chunk's work) / final KV", ours - max(bare - needed, 0), "<= 1.3"),
        ("peak / final KV, bare mlx_lm, same chunks", bare, ""),
        ("highest between two steps / final KV", between, ""),
    ):
        mark(name, model, size, f"{held / needed:.2f} ({held / 1e6:.0f} MB)", limit)


def _highest(run: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """The most bytes that a run takes at any moment, and the most at the moments that it names."""
    before, named = active_bytes(), [0]
    mx.reset_peak_memory()
    run(lambda: named.append(mx.get_active_memory() - before))
    return mx.get_peak_memory() - before, max(named)


def _grow(model: Model, length: int, chunks: list[int], after_step: Callable[[], None]) -> None:
    """A conversation through the engine; `chunks` gets the lengths of what it computes."""
    engine = CachedEngine(model, network=Wrapped(model.network, lambda shape: chunks.append(shape[-1])))
    engine.after_step = after_step
    conversation = Conversation(engine)
    for seed in range(TURNS):
        conversation.ask(prompt(length // TURNS - REPLY_TOKENS, seed))


def _compute_bare(model: Model, chunks: list[int]) -> None:
    caches = model.layers.fresh()
    for length in chunks:
        model.compute(prompt(length), caches, chunk=length)


def _highest_over_a_tight_budget(model: Model, length: int) -> None:
    """Where the budget holds little more than what runs needs."""
    # MLX frees buffers in another thread, so measurements differ by a tenth.
    measured = [measure_work(model.network, model.layers).cost for _ in range(5)]
    work = max(cost.bytes_of(CHUNK, length) for cost in measured)
    needed = measure_sequence(model.network, model.layers.fresh())
    left = CHUNK * sum(cost.token_bytes for cost in needed.windows)  # which windows hold until the next one
    joined = ROWS * needed.bytes_of(length // ROWS)
    for what, run, held in (
        (f"a conversation of {length:,} goes on from pages", _go_on_from_pages, needed.bytes_of(length)),
        (f"{ROWS} rows of {length // ROWS:,} join, and leave one by one", _join_and_leave, joined),
    ):
        room = int(ROOM * held)
        admission = Admission(room, needed)
        # No time passes, so one step stands between two chunks: no reply ends before the last row comes.
        engine = CachedEngine(model, room, longest_chunk=CHUNK, admission=admission, clock=lambda: 0.0)
        highest, between = _highest(partial(_watched, engine, run, length))
        size = f"{what}, budget {ROOM} of them, {room / 1e6:.0f} MB"
        measured = f"{(highest - work) / room:.2f} (with the chunk {highest / room:.2f})"
        mark("(peak - a chunk's work) / budget", model, size, measured, "<= 1.0")
        between = f"{(between - left) / room:.2f} (with the chunk's end {between / room:.2f})"
        mark("(between two steps - a chunk's end) / budget", model, size, between, "<= 1.0")


def _watched(
    engine: CachedEngine,
    run: Callable[[CachedEngine, int], None],
    length: int,
    after_step: Callable[[], None],
) -> None:
    engine.after_step = after_step
    run(engine, length)


def _go_on_from_pages(engine: CachedEngine, length: int) -> None:
    """Another conversation leaves the first one's way near its end, and takes its caches with it."""
    first = Conversation(engine)
    first.ask(prompt(length // 2 - REPLY_TOKENS))
    branch = (*first.ids[: length * 4 // 9], *prompt(length // 50, 1))
    engine.finish(engine.submit(engine_request(branch, REPLY_TOKENS)), max_steps=MAX_STEPS)
    if not engine.cached.pages:
        raise SystemExit("Nothing lies in pages.")
    before = engine.metrics.prefilled_tokens
    first.ask(prompt(length // 2 - REPLY_TOKENS, 2))
    if engine.metrics.prefilled_tokens - before > length * 2 // 3:
        raise SystemExit("The first conversation did not go on from what was computed.")


def _join_and_leave(engine: CachedEngine, length: int) -> None:
    rows = list[Watched]()
    for seed in range(ROWS):
        rows.append(engine.submit(engine_request(prompt(length // ROWS - LASTING, seed), LASTING)))
        engine.step_until(lambda: engine.metrics.active_sequences == len(rows), MAX_STEPS)
        engine.step(3)
    while rows:
        rows.pop(0).generation.cancel()
        engine.step_until(lambda: engine.metrics.active_sequences == len(rows), MAX_STEPS)


# ----------------------------------------------------------------------------------- random runs, little room


@marks
def budget(folder: Path, *, family: Families = USUAL_FAMILIES, conversations: int = 2000) -> None:
    """MLX memory beside the weights after every step of a random run with little room, over what it may hold.

    That is the budget and the caches of live rows, each row counted once: with rows that take turns, and with
    rows in a batch. Then the resident memory of the process along the run: the median of the end of each
    quarter.

    Args:
        conversations: requests, 40 or more
    """
    for model in models(folder, family, SMALL):
        room = model.bytes_of().of(SMALL_BUDGET_TOKENS)
        for batches, what in ((False, "rows take turns"), (True, "rows share a batch")):
            shares, resident = _random_run(model, room, conversations, batches)
            size = f"budget {room / 1e6:.1f} MB, {what}, {conversations} requests"
            over = sum(share > 1 for share in shares)
            measured = f"{max(shares):.3f}, {over} of {len(shares):,} samples over 1"
            mark("held / (budget + live rows)", model, size, measured, "<= 1.0")
            quarters = ", ".join(f"{held / 1e6:.1f}" for held in resident)
            measured = f"{resident[-1] / resident[0] - 1:+.1%} ({quarters} MB)"
            mark("growth of resident memory", model, size, measured, "< 5 %")


def _random_run(model: Model, room: int, rounds: int, batches: bool) -> tuple[list[float], list[float]]:
    """What is held after each step over what may be, and resident bytes at the ends of the four quarters."""
    engine = CachedEngine(model, room, page_size=SMALL_PAGE, batches=batches)
    before, shares = active_bytes(), list[float]()
    resident: list[list[int]] = [[], [], [], []]

    def sample() -> None:
        mx.synchronize(generation_stream)  # what the next step takes is nothing that is held
        held = mx.get_active_memory() - before
        shares.append(held / (room + engine.live_bytes()))

    engine.after_step = sample
    talkers, done = Talkers(random.Random(7)), 0
    while done < rounds:
        done += len(talk(engine, talkers))
        del talkers.threads[1:-REMEMBERED], talkers.asked[:-REMEMBERED]
        resident[4 * (min(done, rounds) - 1) // rounds].append(_resident_bytes())
    ends = (samples[-max(len(samples) // 5, 1) :] for samples in resident)
    return shares, [statistics.median(samples) for samples in ends]


def _resident_bytes() -> int:
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
