"""One thread owns MLX: it starts, serves, and ends without a trace."""

import queue
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.core.errors import EngineDied, ModelError, Overloaded
from start_llm.core.events import Failed, Finished, Restored
from start_llm.engine.engine import Engine
from start_llm.engine.loop import STOPPING
from start_llm.engine.recovery import Recovery
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import Breakdown, Watched, Wrapped, engine_request

PROMPT = tuple(range(30))


class Gate:
    """Holds every forward pass until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, _: Any) -> None:
        self.reached.set()
        assert self.open.wait(30)


def engine_of(assemble: Any, max_waiting: int = 10, metrics: EngineMetrics | None = None) -> Engine:
    return Engine(assemble, metrics or EngineMetrics(), max_waiting=max_waiting)


def with_network(resources: Any, before: Any) -> Any:
    return lambda: replace(resources, network=Wrapped(resources.network, before))


def test_it_answers_from_a_thread_of_its_own_and_ends(resources):
    threads = []
    engine = engine_of(with_network(resources, lambda _: threads.append(threading.current_thread().name)))
    engine.start()
    watched = Watched(engine.submit(engine_request(PROMPT, 10)))
    assert isinstance(watched.wait(), Finished)
    assert len(watched.tokens) == 10
    assert set(threads) == {"engine"}
    assert engine.stop(10)
    assert not engine.is_alive()


def test_stopping_fails_what_runs_and_what_waits(resources):
    gate = Gate()
    engine = engine_of(with_network(resources, gate))
    engine.start()
    running = Watched(engine.submit(engine_request(PROMPT, 1000)))
    assert gate.reached.wait(30)
    waiting = Watched(engine.submit(engine_request(PROMPT, 5)))
    assert not engine.stop(0.05), "it is still computing"
    gate.open.set()
    assert engine.stop(30)
    assert running.wait() == waiting.wait() == Failed(STOPPING)


def test_who_comes_while_the_thread_ends_is_answered(resources, monkeypatch):
    """It has looked for the last time, and is still there."""
    ending, gone = threading.Event(), threading.Event()

    def linger(_: Recovery) -> None:
        ending.set()
        assert gone.wait(30)

    monkeypatch.setattr(Recovery, "abandon_everything", linger)
    engine = engine_of(lambda: resources)
    engine.start()
    assert not engine.stop(0)
    assert ending.wait(30)
    late = Watched(engine.submit(engine_request(PROMPT)))
    assert late.wait() == Failed(STOPPING)
    gone.set()
    assert engine.stop(10)


def test_nothing_can_be_asked_of_a_stopped_engine(resources):
    engine = engine_of(lambda: resources)
    engine.start()
    assert engine.stop(10)
    with pytest.raises(EngineDied):
        engine.submit(engine_request(PROMPT))
    assert engine.stop(10), "stopping twice is no error"


def test_a_request_too_many_is_refused_while_the_engine_computes(resources):
    gate = Gate()
    engine = engine_of(with_network(resources, gate), max_waiting=2)
    engine.start()
    running = Watched(engine.submit(engine_request(PROMPT, 2)))
    assert gate.reached.wait(30)
    waiting = [Watched(engine.submit(engine_request(PROMPT, 2))) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 requests are waiting already"):
        engine.submit(engine_request(PROMPT, 2))
    gate.open.set()
    for watched in (running, *waiting):
        assert isinstance(watched.wait(), Finished)
    assert isinstance(Watched(engine.submit(engine_request(PROMPT, 2))).wait(), Finished)
    assert engine.stop(10)


def test_requests_that_were_taken_in_still_count_as_waiting(resources):
    """Also before the end of the step that took them in: a step lasts up to 300 ms."""
    turnstile, passes = threading.Semaphore(0), queue.SimpleQueue[Any]()

    def before(shape: Any) -> None:
        passes.put(shape)
        assert turnstile.acquire(timeout=30)

    engine = engine_of(with_network(resources, before), max_waiting=2)
    engine.start()
    everyone = [Watched(engine.submit(engine_request(range(300), 2)))]
    assert passes.get(timeout=30) == (1, 256)
    everyone += [Watched(engine.submit(engine_request(PROMPT, 2))) for _ in range(2)]
    turnstile.release()
    assert passes.get(timeout=30) == (1, 43), "the second step, which has emptied the inbox"
    with pytest.raises(Overloaded):
        engine.submit(engine_request(PROMPT, 2))
    turnstile.release(1000)
    assert all(isinstance(watched.wait(), Finished) for watched in everyone)
    assert engine.stop(10)


# -------------------------------------------------------------------------------------------------- questions


def test_what_is_known_is_reported_while_others_are_computed(resources):
    engine = engine_of(lambda: resources)
    engine.start()
    running = Watched(engine.submit(engine_request(PROMPT, 3000)))
    assert engine.peek(engine_request(PROMPT)) == Restored(0, "off")
    assert running.look() is not None
    assert running.ending is None
    running.generation.cancel()
    assert engine.stop(10)
    with pytest.raises(EngineDied, match="cannot tell"):
        engine.peek(engine_request(PROMPT))


def test_a_question_that_fails_hurts_nobody_else(resources, monkeypatch):
    def fails(*_: object) -> Restored:
        raise Breakdown

    metrics = EngineMetrics()
    opaque = PromptCache(Layers(resources.network))
    monkeypatch.setattr(opaque.opener, "peek", fails)
    engine = engine_of(lambda: replace(resources, cache=opaque), metrics=metrics)
    engine.start()
    running = Watched(engine.submit(engine_request(PROMPT, 20)))
    with pytest.raises(EngineDied, match="cannot tell"):
        engine.peek(engine_request(PROMPT))
    assert isinstance(running.wait(), Finished)
    assert metrics.failures == 1
    assert engine.stop(10)


# ---------------------------------------------------------------------------------------------- start and end


def test_a_model_that_cannot_be_loaded_is_reported_to_who_starts(resources):
    def assemble() -> Any:
        raise ModelError("no such model")

    engine = engine_of(assemble)
    with pytest.raises(ModelError, match="no such model"):
        engine.start()
    assert not engine.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_load_that_dies_of_something_unforeseen_is_reported_too():
    def assemble() -> Any:
        raise ZeroDivisionError

    engine = engine_of(assemble)
    with pytest.raises(ModelError, match="Loading failed"):
        engine.start()
    assert not engine.is_alive()


class Catastrophe(BaseException):
    """More than an Exception: what the loop does not survive."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_dies_leaves_nobody_waiting(resources):
    gate = Gate()

    def die(shape: Any) -> None:
        gate(shape)
        raise Catastrophe

    engine = engine_of(with_network(resources, die))
    engine.start()
    running = Watched(engine.submit(engine_request(PROMPT)))
    assert gate.reached.wait(30)
    waiting = Watched(engine.submit(engine_request(PROMPT)))
    gate.open.set()
    assert isinstance(running.wait(), Failed)
    assert isinstance(waiting.wait(), Failed)
    assert engine.stop(10)
    with pytest.raises(EngineDied):
        engine.submit(engine_request(PROMPT))


# ----------------------------------------------------------------------------------------- threads and arrays


def on_another_thread(action: Any) -> Any:
    """Return the result of `action`, or the exception that it raises."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result.append(error)
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


def test_an_array_that_was_not_evaluated_belongs_to_the_thread_that_made_it():
    """Why nothing but evaluated arrays may leave the engine thread."""
    lazy = on_another_thread(lambda: mx.ones(3) + 1)
    with pytest.raises(RuntimeError, match="no Stream"):
        mx.eval(lazy)


def test_an_evaluated_array_can_be_read_anywhere():
    def make() -> mx.array:
        array = mx.ones(3) + 1
        mx.eval(array)
        return array

    assert on_another_thread(make).tolist() == [2, 2, 2]


def test_a_model_loaded_on_one_thread_runs_on_another(resources):
    def first_logit() -> Any:
        return resources.network(mx.array([[1, 2, 3]]))[0, -1, 0].item()

    assert on_another_thread(first_logit) == pytest.approx(first_logit(), abs=1e-4)


# ------------------------------------------------------------------------------------- processes of their own


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)


LIVES = """
import sys
from pathlib import Path
import start_llm.engine.engine as engines
from start_llm.core.errors import ModelError
from start_llm.core.events import Finished
from start_llm.models.loader import load
from start_llm.telemetry.metrics import EngineMetrics
from tests.engine.harness import Watched, engine_request, uncached_resources

def assemble():
    model = load(Path(sys.argv[1]))
    if sys.argv[2] == "refuses":
        raise ModelError("refused on purpose")
    tokenizer = model.tokenizer
    return uncached_resources(model.network, tokenizer.token_bytes, tokenizer.eos_token_ids, 4, True)

engine = engines.Engine(assemble, EngineMetrics(), max_waiting=9)
try:
    engine.start()
except ModelError as error:
    print(error)
    sys.exit()
replies = [Watched(engine.submit(engine_request(range(n, n + 30), 20))) for n in range(3)]
if sys.argv[2] == "answers":
    print([type(reply.wait()) is Finished for reply in replies])
print(engine.stop(20))
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "printed"),
    [
        ("answers", "[True, True, True]\nTrue\n"),
        ("breaks off", "True\n"),
        ("refuses", "refused on purpose\n"),
    ],
)
def test_a_process_with_an_engine_ends_cleanly(tiny_model, way, printed):
    """`terminate called` is what MLX says if streams of a thread outlive it (lesson 4); not every time."""
    folder = str(tiny_model("qwen3", hidden=128, layers=2))
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda _: run(LIVES, folder, way), range(2)):
            assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


LIMITS = """
import resource
import sys
from pathlib import Path

wanted, hard = int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard if 0 <= hard < wanted else wanted, hard))
before = resource.getrlimit(resource.RLIMIT_NOFILE)
from start_llm.app import App
from start_llm.models.loader import load
load(Path(sys.argv[1]))
after = resource.getrlimit(resource.RLIMIT_NOFILE)
print(after[0] >= before[0], after[1] == before[1])
"""


@pytest.mark.parametrize("limit", [256, 9000])
@pytest.mark.long
def test_loading_a_model_never_lowers_the_limit_on_open_files(tiny_model, limit):
    """mlx_lm sets it to 2048 when it is imported (lesson 2)."""
    assert run(LIMITS, str(tiny_model("qwen3", hidden=128, layers=2)), str(limit)).stdout == "True True\n"
