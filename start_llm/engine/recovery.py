"""What becomes of the sequences of a step that failed: they fail too, or are tried once more."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.thread_owners import ENGINE, owned_by
from start_llm.engine.batch import BatchGroup
from start_llm.engine.failures import Failures
from start_llm.engine.running import RunningSequences
from start_llm.engine.schedule import Schedule
from start_llm.engine.sequence import EngineSequence
from start_llm.engine.step_plan import ComputeChunks, PrefillPart, StartRequest
from start_llm.telemetry.metrics import EngineMetrics


@owned_by(ENGINE)
class Recovery:
    """Discards the caches of the sequences whose step failed, since nobody knows what they hold.

    A lone sequence fails. The sequences of a batch are retried one by one, so that only the faulty one fails;
    of the others, those whose guide is ahead of their tokens, and those that were retried before.

    Attributes:
        failures: the requests that have failed.
    """

    def __init__(
        self, running: RunningSequences, cache: PromptCache, schedule: Schedule, metrics: EngineMetrics
    ) -> None:
        self._running = running
        self._cache = cache
        self._schedule = schedule
        self.failures = Failures(metrics, self.abandon_everything)

    def blaming(self, sequence: EngineSequence) -> AbstractContextManager[None]:
        """If the block raises, this sequence alone fails."""
        return self.failures.on_failure(partial(self.abandon_sequences, [sequence]))

    def _fail(self, sequences: Sequence[EngineSequence]) -> None:
        """Fail these sequences and discard their caches, each of them even if another one raises."""
        self.failures.add(sequence.generation for sequence in sequences)
        with ExitStack() as discards:
            for sequence in sequences:
                discards.callback(self._cache.discard, sequence.seq_cache)

    def abandon_everything(self) -> None:
        """Fail every request, waiting ones too. What running ones computed is lost."""
        for sequence in self._schedule.preempted:
            sequence.seq_cache.is_paused = False
        self.failures.add(self._schedule.take_all())
        sequences = [*self._running.decoder.abandon(), *self._running.take_prefills()]
        self._running.note_batched_bytes()
        try:
            self._fail(sequences)
        finally:
            self._abandon_starting()

    def abandon_sequences(self, sequences: Sequence[EngineSequence]) -> None:
        """Fail sequences, and take them out. The others of a batch are retried if taking these out of it has
        stopped half-way.
        """
        self._fail(sequences)
        self._running.take_prefills([sequence.number for sequence in sequences])
        broken = [group for group in self._running.decoder.groups if group.is_broken]
        for group in broken:
            others = [member for member in self._running.decoder.drop(group) if member not in sequences]
            self._retry_alone(others, are_innocent=True)
        if not broken:
            for sequence in sequences:
                self._running.decoder.remove(sequence)
        self._running.note_batched_bytes()

    def retry_joining(self) -> None:
        """Retry the sequences that failed to join a batch, and those of that batch, each alone."""
        self._retry_alone(self._running.decoder.drop_joining())

    def retry_group(self, group: BatchGroup) -> None:
        """Retry the sequences of a batch whose step failed, each alone."""
        self._retry_alone(self._running.decoder.drop(group))

    def retry_decoding(self) -> None:
        """Retry, outside batches, each sequence that is being decoded: which one is at fault is not known."""
        self._retry_alone(self._running.decoder.abandon())

    def _retry_alone(self, sequences: list[EngineSequence], *, are_innocent: bool = False) -> None:
        """Discard the caches of a failed batch, and retry its sequences outside batches, so that only the
        faulty one fails again.

        Those fail now whose guide is ahead of their tokens, those that were retried before, and one that was
        alone, unless it is innocent.
        """
        self._fail(sequences)
        self._running.note_batched_bytes()
        for sequence in sequences:
            is_suspect = sequence.excluded_from_batches or (len(sequences) == 1 and not are_innocent)
            if sequence.can_resume and not is_suspect:
                sequence.excluded_from_batches = True
                self._schedule.requeue(sequence)
                self.failures.take_back(sequence.generation)

    def _abandon_starting(self) -> None:
        running = self._running
        if running.starting is not None:
            self.failures.add([running.starting])
            running.starting = None
        if running.starting_cache is not None:
            self._cache.discard(running.starting_cache)
            running.starting_cache = None

    def abandon_prefill(self, part: PrefillPart) -> None:
        """Fail the prompt of a part. Prompts that shared a pass are retried, each alone."""
        match part:
            case StartRequest():
                self._abandon_starting()
            case ComputeChunks():
                self._retry_alone(self._running.take_prefills(part.numbers))
            case _:
                self._fail(self._running.take_prefills([part.number]))
