"""What two executors that have done the same have in common."""

from start_llm.engine.executor import StepExecutor
from start_llm.engine.followers import ExecutorState


def state_of(executor: StepExecutor) -> ExecutorState:
    """Return what an executor has."""
    running = executor.running
    return ExecutorState(
        running=len(running),
        tokens=sum(len(sequence.tokens) for sequence in running),
        computed=sum(prefill.done for prefill in executor.prefills),
        free_bytes=executor.cache.free_bytes,
        image_bytes=executor.image_bytes,
    )
