"""Divide the engine's time between prefill and the replies that are decoding."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from start_llm.core.limits import DECODE_SHARE
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.pacing import Chunk, ChunkPacer
from start_llm.engine.prefill import Prefill
from start_llm.engine.resources import EngineResources
from start_llm.telemetry.metrics import EngineMetrics


@owned_by(ENGINE)
class EngineTime:
    """Measures prefill and decode steps, and decides from that when to prefill and how much."""

    def __init__(self, resources: EngineResources, metrics: EngineMetrics) -> None:
        self._chunk_s = resources.time_limits.chunk_s
        self._longest_chunk = resources.longest_chunk
        self._metrics = metrics
        self._clock = resources.clock.real
        self._pacer = ChunkPacer(self._chunk_s)
        self._share = TimeShare(resources.time_limits.decode_share)
        self._last_step: float | None = None
        self._steps, self._decoded_s = 0, 0.0
        self._prefilled_s, self._stalls = 0.0, False
        for chunk in resources.measured:
            self._pacer.record(chunk)

    @property
    def speed(self) -> float:
        """The predicted prefill speed in tokens per second."""
        return self._pacer.speed

    def may_prefill(self, *, is_decoding: bool) -> bool:
        """Return whether a prefill chunk may be computed now.

        Args:
            is_decoding: replies are running, which pause meanwhile.
        """
        return not is_decoding or self._share.may_prefill

    def begin_prefill(self, *, is_decoding: bool) -> None:
        """Note that a step begins to prefill.

        Args:
            is_decoding: replies are running, which pause meanwhile: decoding is owed time for it.
        """
        self._prefilled_s, self._stalls = 0.0, is_decoding

    @contextmanager
    def prefilling(self, *, is_shared: bool = False) -> Generator[None]:
        """Count the block as prefill time of this step.

        Args:
            is_shared: several short prompts share the pass. Then replies are owed nothing but the step that
                follows: there are never more prompts than places, and it gives a token to all that decode.
        """
        began = self._clock()
        yield
        seconds = self._clock() - began
        self._prefilled_s += seconds
        if self._stalls and not is_shared:
            self._share.note_prefill(seconds)

    def fits(self, tokens: int, before: int) -> bool:
        """Return whether so many tokens, after others, still fit into a chunk's time in this step."""
        left_s = self._chunk_s - self._prefilled_s
        return (
            left_s > 0 and tokens <= self._longest_chunk(before) and self._pacer.fits(tokens, before, left_s)
        )

    def saves_time(self, lengths: Sequence[int], before: int) -> bool:
        """Return whether prompts that have so many tokens left are worth one pass in place of several."""
        return self._pacer.saves_time(lengths, before)

    @contextmanager
    def decoding(self) -> Generator[None]:
        """Count the block as decode time."""
        began = self._clock()
        yield
        seconds = self._clock() - began
        self._decoded_s += seconds
        self._share.note_decode(seconds)

    def chunk_length(self, prefill: Prefill, *, is_decoding: bool) -> int:
        """Return the length of a prompt's next chunk, in tokens. A chunk of an image is paced like text."""
        before = prefill.done
        share_s = self._share.prefill_s(self._take_step_s())
        paced = self._pacer.length(before, stalls=is_decoding, share_s=share_s)
        return prefill.chunk_length(min(paced, self._longest_chunk(before)))

    def compute_chunk(self, prefill: Prefill, tokens: int) -> int:
        """Compute the next chunk of a prompt, record its time and return its length.

        The time of a chunk of an image is not recorded: it would distort the estimate for text.
        """
        before, began, is_text = prefill.done, self._clock(), prefill.image is None
        computed = prefill.step(tokens)
        if is_text:
            self._pacer.record(Chunk(computed, before, self._clock() - began))
        self._metrics.prefilled_tokens += computed
        return computed

    def compute_chunks(self, prefills: Sequence[Prefill]) -> list[int]:
        """Compute the next chunks of several prompts in one pass, and return their lengths, in tokens.

        Their time is not recorded: it would distort the estimate for one long chunk.
        """
        computed = prefills[0].step_with(prefills[1:])
        self._metrics.prefilled_tokens += sum(computed)
        return computed

    def _take_step_s(self) -> float:
        """Return the mean seconds of a decode step since the last chunk, and reset the count."""
        seconds = self._decoded_s / self._steps if self._steps else 0.0
        self._steps, self._decoded_s = 0, 0.0
        return seconds

    def note_step(self, *, is_decoding: bool) -> None:
        """Record a step of the loop.

        Args:
            is_decoding: replies that do not pause are left after it. How long they had waited is measured.
        """
        self._steps += is_decoding
        now = self._clock() if is_decoding else None
        if now is not None and self._last_step is not None:
            self._metrics.note_stall(now - self._last_step)
        self._last_step = now

    def end_turn(self) -> None:
        """Record that the loop does not go on at once: no pause is measured."""
        self._last_step = None

    def rest(self) -> None:
        """Record that the engine is idle: no pause is measured, and no decode time is owed."""
        self.end_turn()
        self._share.reset_owed()


@owned_by(ENGINE)
class TimeShare:
    """Divides the engine's time between prefill and decode while replies are running.

    Prefill time makes decoding be owed time in proportion, before prefill may continue. A decode step that
    takes more than what is owed is credited to prefill.

    Args:
        decode_share: share of the time for decoding, above 0 and below 1.
    """

    def __init__(self, decode_share: float = DECODE_SHARE) -> None:
        self._for_each_second = decode_share / (1 - decode_share)
        self._owed_s = 0.0

    @property
    def may_prefill(self) -> bool:
        return self._owed_s <= 0

    def prefill_s(self, decode_s: float) -> float:
        """Return the seconds of prefill that go with `decode_s` seconds of decoding."""
        return decode_s / self._for_each_second

    def note_prefill(self, seconds: float) -> None:
        self._owed_s += seconds * self._for_each_second

    def note_decode(self, seconds: float) -> None:
        if self._owed_s > 0:
            self._owed_s -= seconds

    def reset_owed(self) -> None:
        """Reset what is owed, because no reply is running."""
        self._owed_s = 0.0
