"""Read what next requests will begin with, while the engine has nothing to do.

The conversation is prepared as its client will send it, with two different next messages. The tokens that
both prompts begin with are the work: a reply that was computed behind a message that is gone by then, a turn
whose reasoning the next prompt leaves out, what closes the reply and opens the next message. They are read by
a prewarm that is given up for whatever arrives (`engine.schedule`), in free memory only.

After a start, the beginnings of the agents that were used last are read in the same way: what the disk has of
them comes into memory, and what it has not is computed. Then comes what only the disk has of the
conversations that came back most; no more than the end of these is computed.
"""

from __future__ import annotations

import queue
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from start_llm.core.chat import ChatRequest, Message
from start_llm.core.common_beginning import common_length
from start_llm.core.engine_request import EngineRequest
from start_llm.core.errors import EngineDied, RequestError
from start_llm.core.events import Event, Failed, Finished, Prefilling, Restored
from start_llm.core.images import FIRST_IMAGE_TOKEN
from start_llm.core.prompt import ModelTokens
from start_llm.core.sampling import Sampling
from start_llm.core.standard_error import print_traceback
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.telemetry.metrics import IdleMetrics
from start_llm.transcripts.beginnings import Beginning
from start_llm.transcripts.transcript_store import Variant
from start_llm.transcripts.transcripts import Transcripts
from start_llm.transcripts.turn import Turn

_SETTLES_S = 0.25
"""Seconds after a reply before its conversation is looked at: agents often go on at once."""
_POLL_S = 0.1
_LEAST_TOKENS = 16
_MOST_WAITING, _MOST_EXPECTED = 8, 256
_JUDGED, _LEAST_USED = 16, 0.5
"""Works by which it is judged whether they pay, and the share of their tokens that has to be used."""
_MOST_BEGINNINGS = 4
_MOST_RETURNING, _RETURNING_WITHIN_S = 4, 86_400.0
_LEAST_DEPTH = 3
"""Index of the last message of a conversation that has come back: it has a question, its reply and another
question at least.
"""
_REQUESTS_TO_USE_IT = 16
"""Requests of a tenant by which a beginning has to be used that was read for it."""
_ANY_TOKEN, _MOST_UNKNOWN = 0, 512
"""What ends a prompt that is only read, and the tokens at an end of which it is not known whether the disk
has them: files with less than a page are looked at when they are read.
"""
_TRIED_ANYWAY = 8
"""While works do not pay, one of so many is done, to find out whether they pay again."""
_ENDINGS = ("0", "a")
"""Texts of the next message: they differ from the first token on."""


class IdleEngine(Protocol):
    """The engine, as idle work needs it."""

    def submit(self, request: EngineRequest) -> IdleGeneration: ...

    def peek(self, request: EngineRequest) -> Restored: ...


class IdleGeneration(Protocol):
    @property
    def cancelled(self) -> bool: ...

    def take(self, timeout_s: float) -> list[Event]: ...


type Session = tuple[bytes, str]
"""The tenant and the name of a session."""


@dataclass(slots=True)
class _Reply:
    """A reply, and the request that it answers, without messages that the next one will not have."""

    request: ChatRequest
    message: Message
    session: str = ""

    def next_requests(self) -> Iterator[ChatRequest]:
        """Yield the next request of the conversation, with two texts that have nothing in common."""
        for text in _ENDINGS:
            calls = self.message.tool_calls
            ends = [Message(role="tool", content=text, tool_call_id=call.id) for call in calls]
            following = ends or [Message(role="user", content=text)]
            messages = (*self.request.messages, self.message, *following)
            yield replace(self.request, messages=messages, compared_with=None)


@dataclass(slots=True)
class _Work:
    """Tokens that were read before anybody asked for them.

    Attributes:
        ids: of the prompt from its beginning.
        start: those from here on were computed, or came from the disk.
        requests: how many have not used it, where it is not for a certain one.
    """

    ids: array[int]
    start: int
    requests: int = 0

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.start

    def used_by(self, ids: Sequence[int], restored: int) -> int:
        """Return how many of its tokens are among those that were restored for a prompt."""
        return max(min(common_length(self.ids, array("I", ids)), restored) - self.start, 0)


class ReadAhead:
    """Plans idle work and has it done, on a thread of its own. Safe to use from any thread.

    Args:
        may_work: returns whether the engine has nothing to do, and the machine may be kept busy: see
            `IDLE_WORK`.
    """

    def __init__(
        self,
        engine: IdleEngine,
        requests: RequestPreparer,
        transcripts: Transcripts,
        metrics: IdleMetrics,
        may_work: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._transcripts = transcripts
        self._metrics = metrics
        self._may_work = may_work
        self._replies: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._waiting: deque[_Reply] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.Lock()
        self._expected: OrderedDict[Session, _Work] = OrderedDict()
        self._beginnings = deque(transcripts.beginnings.latest()[:_MOST_BEGINNINGS])
        returning = transcripts.store.returning(_MOST_RETURNING, _RETURNING_WITHIN_S)
        self._returning = deque(variant for variant in returning if variant.depth >= _LEAST_DEPTH)
        self._tenants = {beginning.tenant for beginning in transcripts.beginnings.latest()}
        self._read_for: dict[bytes, list[_Work]] = {}
        self._judged: deque[tuple[int, int]] = deque(maxlen=_JUDGED)
        self._passed_over = 0
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin with what was used last before the start, if anything is known of it."""
        if self._beginnings or self._returning:
            self._start_thread()

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None and not self._is_closing.is_set():
                self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the thread. What it has submitted is the engine's."""
        self._is_closing.set()
        self._replies.put(None)
        with self._lock:
            thread = self._thread
        if thread:
            thread.join()

    def note_reply(self, request: ChatRequest, reply: Message) -> None:
        """Take a reply into account that its client has received.

        Args:
            request: without messages that the next one will not have.
            reply: as the client will send it back.
        """
        if self._is_closing.is_set() or request.is_background or request.continues_reply or request.images:
            return
        self._replies.put(_Reply(request, reply))
        self._start_thread()

    def note_restored(self, session: Session, ids: Sequence[int], restored: int) -> int:
        """Take into account what a request has found in the cache.

        Args:
            ids: of its prompt.
            restored: tokens of it.

        Returns:
            How many of these were read ahead, and are used for the first time.
        """
        used_first = 0
        with self._lock:
            if work := self._expected.pop(session, None):
                used_first += self._judge(work.used_by(ids, restored), work)
            waiting = self._read_for.get(session[0], [])
            for work in list(waiting):
                work.requests += 1
                used = work.used_by(ids, restored)
                if used or work.requests == _REQUESTS_TO_USE_IT:
                    waiting.remove(work)
                    used_first += self._judge(used, work)
        return min(used_first, restored)

    def _judge(self, used: int, work: _Work) -> int:
        """Note how many tokens of a work were used, and return them."""
        self._metrics.used_tokens += used
        self._judged.append((used, work.tokens))
        self._metrics.is_paused = not self._pays
        return used

    @property
    def _pays(self) -> bool:
        """True if enough of what was read was used, as far as that is known."""
        used, read = (sum(column) for column in zip((0, 0), *self._judged, strict=True))
        return len(self._judged) < _JUDGED or used >= _LEAST_USED * read

    def _run(self) -> None:
        try:
            while todo := self._next():
                if self._is_worth_trying():
                    _attempt(todo)
        finally:
            self._is_closing.set()  # nobody receives replies any more

    def _next(self) -> Callable[[], None] | None:
        """Return what to do once the engine has nothing to do: read behind the newest reply, or what was used
        before the start. None at the end.
        """
        wait_s = _SETTLES_S
        has_work = self._waiting or self._beginnings or self._returning
        if not has_work and not self._is_closing.is_set():  # what `close` has put may be received already
            self._receive()
        while not self._is_closing.wait(wait_s):
            while not self._replies.empty():
                self._receive()
            if self._may_work():
                if self._waiting:
                    return partial(self._read, self._waiting.pop())
                if self._beginnings:
                    return partial(self._read_beginning, self._beginnings.popleft())
                if self._returning:
                    return partial(self._read_returning, self._returning.popleft())
            wait_s = _POLL_S
        return None

    def _receive(self) -> None:
        if reply := self._replies.get():
            self._waiting.append(reply)

    def _is_worth_trying(self) -> bool:
        with self._lock:
            if self._pays:
                return True
            self._passed_over = (self._passed_over + 1) % _TRIED_ANYWAY
            return self._passed_over == 0

    def _read(self, reply: _Reply) -> None:
        """Have the beginning of the next request read, if enough of it is new.

        Raises:
            RequestError: it cannot be prepared, or the engine's queue is full.
            EngineDied: the engine does not answer.
        """
        request = self._planned(reply)
        if request is None:
            return
        missing = len(request.prompt) - 1 - self._engine.peek(request).tokens
        if missing < _LEAST_TOKENS or not self._may_work():
            return
        self._expect((request.salt, reply.session), self._follow(request))

    def _expect(self, session: Session, work: _Work | None) -> None:
        """Expect the next request of a session to use what was read, if anything was."""
        if work is None:
            return
        with self._lock:
            self._expected[session] = work
            self._expected.move_to_end(session)
            if len(self._expected) > _MOST_EXPECTED:
                self._judge(0, self._expected.popitem(last=False)[1])

    def _read_beginning(self, beginning: Beginning) -> None:
        """Have the beginning of an agent's conversations read, from the disk if that has it.

        Raises:
            RequestError: the engine's queue is full.
            EngineDied: the engine does not answer.
        """
        if len(beginning.ids) >= self._requests.model.context_window:
            return
        work = self._follow(replace(beginning.request(), is_idle_work=True))
        if work:
            with self._lock:
                self._read_for.setdefault(beginning.tenant, []).append(work)

    def _planned(self, reply: _Reply) -> EngineRequest | None:
        """Return a request for what the next request will begin with, whatever its new message is.

        None if the session has no name by which its next request is known, or if nothing is certain.
        """
        first, second = map(self._requests.prepare, reply.next_requests())
        reply.session = first.session
        turns = [
            Turn.begin(self._transcripts, prepared.prompt, self._requests.model.context_window)
            for prepared in (first, second)
        ]
        ids, others = (turn.tokens.ids for turn in turns)
        end = common_length(ids, others)
        if not first.session or not 0 < end < len(ids):
            return None
        return EngineRequest(
            prompt=ModelTokens(ids[: end + 1]),  # the last token is left to the next request
            max_tokens=0,
            sampling=Sampling(),
            boundaries=tuple(position for position in turns[0].resume_positions if position <= end),
            salt=first.request.tenant,
            adapters=first.adapters,
            is_idle_work=True,
        )

    def _read_returning(self, end: Variant) -> None:
        """Have what only the disk has of a conversation brought into memory. Nothing is computed but the end.

        Raises:
            RequestError: the engine's queue is full.
            EngineDied: the engine does not answer.
        """
        ids = (*end.tokens(), _ANY_TOKEN)
        if len(ids) >= self._requests.model.context_window or max(ids) >= FIRST_IMAGE_TOKEN:
            return
        if end.tenant not in self._tenants:  # those of adapters have no beginnings, and need their adapter
            return
        whole = EngineRequest(prompt=ModelTokens(ids), max_tokens=0, sampling=Sampling(), salt=end.tenant)
        known = self._engine.peek(whole).stored
        if known >= len(ids) // 2:
            is_nearly_whole = len(ids) - known <= _MOST_UNKNOWN
            prompt = ModelTokens(ids if is_nearly_whole else ids[: known + 1])
            work = self._follow(replace(whole, prompt=prompt, is_idle_work=True))
            self._expect((end.tenant, end.session), work)

    def _follow(self, request: EngineRequest) -> _Work | None:
        """Submit a request, and return what of it was read until it ended or was given up, if anything."""
        generation = self._engine.submit(request)
        start = done = from_disk = 0
        has_ended = False
        while not (has_ended or self._is_closing.is_set()):
            is_given_up = generation.cancelled
            for event in generation.take(_POLL_S):
                match event:
                    case Restored():
                        done, from_disk = event.tokens, event.disk_tokens
                        start = done - from_disk
                    case Prefilling():
                        done = event.done
                    case _:
                        has_ended |= is_given_up or isinstance(event, Finished | Failed)
        if done == start:
            return None
        with self._lock:
            self._metrics.works += 1
            self._metrics.restored_tokens += from_disk
            self._metrics.read_tokens += done - start - from_disk
        return _Work(array("I", request.prompt.ids[:done]), start)


def _attempt(work: Callable[[], None]) -> None:
    """Do a work. Whatever it raises, the next one is done all the same."""
    try:
        work()
    except (RequestError, EngineDied):
        pass  # a next request would be refused too
    except Exception:  # noqa: BLE001 - whatever it is, idle work must not end with it
        print_traceback()
