"""Whose time it is: that of prompts, or of the replies that run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from start_llm.engine.machinery import Machinery
from start_llm.engine.pacing import DECODE_SHARE, Chunk, ChunkPacer
from start_llm.engine.prefill import Prefill
from start_llm.telemetry.metrics import EngineMetrics


class EngineTime:
    """Measures what the engine thread does, and decides what it does next from that.

    Owned by the engine thread.

    Args:
        clock: seconds.
    """

    def __init__(self, machinery: Machinery, metrics: EngineMetrics, clock: Callable[[], float]) -> None:
        self._chunk_s = machinery.pace.chunk_s
        self._longest_chunk = machinery.longest_chunk
        self._metrics = metrics
        self._clock = clock
        self._pacer = ChunkPacer(self._chunk_s)
        self._share = TimeShare(machinery.pace.decode_share)
        self._last_step: float | None = None
        self._steps, self._decoded_s = 0, 0.0
        for chunk in machinery.measured:
            self._pacer.record(chunk)

    @property
    def speed(self) -> float:
        """Tokens of a prompt that are computed in a second, as far as is known."""
        return self._pacer.speed

    def is_prefills_turn(self, *, replies: bool) -> bool:
        """Whether a chunk may be computed now.

        Args:
            replies: some run, and would stand still meanwhile.
        """
        return not replies or self._share.is_prefills_turn

    @contextmanager
    def prefilling(self, *, replies: bool) -> Generator[Callable[[Prefill | None], bool]]:
        """Count the time of the block. Gives a way to ask whether a whole prompt still fits into it."""
        began = self._clock()
        yield lambda prefill: self._fits(prefill, self._chunk_s - (self._clock() - began))
        if replies:
            self._share.note_prefill(self._clock() - began)

    @contextmanager
    def decoding(self) -> Generator[None]:
        """Count the time of the block."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        self._decoded_s += seconds
        self._share.note_decode(seconds)

    def compute_chunk(self, prefill: Prefill, *, replies: bool) -> int:
        """Compute the next chunk of a prompt, as long as it may be, and learn from it. Returns its length."""
        before, began = prefill.done, self._clock()
        paced = self._pacer.length(before, stalls=replies, share_s=self._share.prefill_s(self._take_step_s()))
        computed = prefill.step(min(paced, self._longest_chunk(before)))
        self._pacer.record(Chunk(computed, before, self._clock() - began))
        self._metrics.prefilled_tokens += computed
        return computed

    def _take_step_s(self) -> float:
        """Mean seconds of a step of all replies since the last chunk; counting begins anew."""
        seconds = self._decoded_s / self._steps if self._steps else 0.0
        self._steps, self._decoded_s = 0, 0.0
        return seconds

    def note_step(self, *, replies: bool) -> None:
        """All that run have had a step: tell for how long they had stood still."""
        self._steps += 1
        now = self._clock() if replies else None
        if now is not None and self._last_step is not None:
            self._metrics.note_stall(now - self._last_step)
        self._last_step = now

    def rest(self) -> None:
        """There is nothing to do: nobody waits, and nobody is owed anything."""
        self._last_step = None
        self._share.forgive()

    def _fits(self, prefill: Prefill | None, left_s: float) -> bool:
        return prefill is None or (left_s > 0 and self._pacer.fits(prefill.remaining, prefill.done, left_s))


class TimeShare:
    """Divides the engine's time while replies run and a prompt is computed.

    What prefill takes, decoding is owed in proportion, before prefill may go on. What a last step takes
    beyond that counts for the next time.

    Args:
        decode_share: part of the time that decoding gets, above 0 and below 1.
    """

    def __init__(self, decode_share: float = DECODE_SHARE) -> None:
        self._for_each_second = decode_share / (1 - decode_share)
        self._owed_s = 0.0

    @property
    def is_prefills_turn(self) -> bool:
        return self._owed_s <= 0

    def prefill_s(self, decode_s: float) -> float:
        """Seconds of prefill beside so many of decoding."""
        return decode_s / self._for_each_second

    def note_prefill(self, seconds: float) -> None:
        self._owed_s += seconds * self._for_each_second

    def note_decode(self, seconds: float) -> None:
        if self._owed_s > 0:
            self._owed_s -= seconds

    def forgive(self) -> None:
        """No reply runs."""
        self._owed_s = 0.0
