"""A stretch of trouble for one application, and what has to be true afterwards."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from start_llm.cache.layers import Layers
from start_llm.core.events import Failed
from start_llm.engine.cost import measure_sequence
from start_llm.engine.draft_index import INDEX_TOKEN_BYTES
from start_llm.engine.earlier_texts import EARLIER_BYTES
from start_llm.engine.start_measurements import measure_work
from start_llm.models.footprint import weights_bytes
from start_llm.models.loader import LoadedModel, load
from start_llm.wiring.memory_plan import work_reserve
from tests.cache.conversations import says_too
from tests.cache.integrity import check_cache
from tests.chaos.faults import ON_PURPOSE, PLACES, Faults, Record, emptied, on_engine_thread
from tests.chaos.rude import Rude
from tests.chaos.state import Held, resident_bytes
from tests.chaos.talk import Account, Endpoints, Heard, Talker
from tests.flat_settings import settings_of
from tests.server.client import ask
from tests.serving import Server, serving
from tests.ties import Tally, greedy_reference

LIMIT_S = 3.0
"""For who says nothing, or reads nothing."""
_POOLED_S = "1"
"""For which the proxy keeps a connection: less than the server does, as always."""
POISON = "<|vision_start|>"
_COMMON = {"batch": 3, "preempt_after_s": 0.3, "max_waiting": 40, "stall_s": 30.0, "responses_kept_s": 5.0}
_LIMITS = {"http_idle_s": LIMIT_S, "header_s": LIMIT_S, "body_s": LIMIT_S, "write_s": LIMIT_S}
_QUIET_S = 60.0
_MARK = re.compile(r"\[t\d+-\d+\]")


@dataclass(frozen=True)
class Trouble:
    """How an application is set up for a stretch.

    Attributes:
        settings: beside the common ones.
        room_tokens: what MEMORY_BUDGET leaves for rows, if that is to be little.
        slowness_s: see `Faults`.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    room_tokens: int | None = None
    slowness_s: float = 0.002


TROUBLES = (
    Trouble("plenty of memory"),
    Trouble("a small cache", {"cache_max_bytes": 3 * 2**20}),
    Trouble("short deadlines", {"deadline_s": 0.7}, slowness_s=0.01),
    Trouble("little memory", {"batch": 6}, room_tokens=4000),
    Trouble("a short queue", {"batch": 2, "max_waiting": 3, "max_connections": 60}, slowness_s=0.01),
    Trouble("no cache", {"cache_is_on": False}),
)


@dataclass
class Outcome:
    """The result of a stretch. `problems` has a sentence for each thing that must not be."""

    name: str
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])
    fired: Counter[str] = field(default_factory=Counter[str])
    stats: dict[str, Any] = field(default_factory=dict[str, Any])
    tally: Tally = field(default_factory=Tally)
    compared: int = 0
    heard: int = 0
    active: tuple[int, int] = (0, 0)
    resident: int = 0
    kills: int = 0
    problems: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class Crowd:
    """The clients of a stretch.

    Attributes:
        every_s: seconds between two faults, about.
        kill_s: seconds between two deaths of the proxy; 0: there is no proxy.
        least: replies that clients have to get before it may end, however slow the machine is.
        sampled: replies that are compared with the truth.
    """

    talkers: int = 5
    rude: int = 6
    every_s: float = 1.0
    kill_s: float = 45.0
    least: int = 10
    sampled: int = 60


def play(
    folder: Path, trouble: Trouble, crowd: Crowd, seconds: float, rng: random.Random, scratch: Path
) -> Outcome:
    """A stretch, from start to end of an application.

    Args:
        scratch: folder for all temporary files; logs go beside it.
    """
    model = load(folder)
    poison = model.tokenizer.encode(POISON, as_document=False)[0]
    outcome, faults, account = Outcome(trouble.name), Faults(poison, trouble.slowness_s), Account()
    scratch.mkdir(exist_ok=True)
    with (
        patch.dict(os.environ, TMPDIR=str(scratch), AIOHTTP_KEEPALIVE_TIMEOUT=_POOLED_S),
        patch("tempfile.tempdir", str(scratch)),
    ):
        before = Held.now()
        settings = _COMMON | _LIMITS | trouble.settings | memory_for(model, trouble)
        settings |= {"log_root": str(scratch.parent)}
        if crowd.kill_s:
            settings |= {"proxy_is_on": True, "proxy_port": _free_port()}
        with faults.planted(), serving(folder, **settings) as server:
            _Stretch(server, faults, account, crowd, rng, outcome).run(seconds)
        outcome.problems += before.differences(_settled(before))
    _compare(model, faults, account, crowd, rng, outcome)
    outcome.counts, outcome.fired = account.counts, faults.fired
    outcome.problems += account.problems
    faults.records.clear()
    faults.cache = None
    outcome.resident = resident_bytes()
    return outcome


def memory_for(model: LoadedModel, trouble: Trouble) -> dict[str, int]:
    if trouble.room_tokens is None:
        return {}
    layers = Layers(model.network)
    kept = weights_bytes(model) + EARLIER_BYTES + INDEX_TOKEN_BYTES * trouble.room_tokens
    kept += measure_sequence(model.network, layers.fresh()).bytes_of(trouble.room_tokens)
    work = measure_work(model.network, layers).cost
    memory = 0
    for _ in range(8):  # what is kept free for computing is a share of the whole
        memory = int((kept + work_reserve(settings_of(memory=memory), work)) / 0.95)
    return {"memory": memory}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settled(before: Held) -> Held:
    """Return the resources once all threads had a moment to end."""
    deadline = time.monotonic() + 10
    while before.differences(now := Held.now()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return now


def _until(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _nobody_is_connected() -> bool:
    return not any("process_request" in thread.name for thread in threading.enumerate())


class _Stretch:
    """One application, from its first request to its last."""

    def __init__(
        self,
        server: Server,
        faults: Faults,
        account: Account,
        crowd: Crowd,
        rng: random.Random,
        outcome: Outcome,
    ) -> None:
        self._server = server
        self._faults = faults
        self._account = account
        self._crowd = crowd
        self._rng = rng
        self._outcome = outcome
        self._engine: Any = server.app.runtime.engine
        self._proxy: Any = server.proxy
        self._kills = 0
        self._is_dying = False

    def run(self, seconds: float) -> None:
        if not self._proxy_is_ready():
            self._outcome.problems.append("the proxy never came up")
            return
        self._warm_up()
        threads, descriptors, active = self._quiet()
        began = time.monotonic()
        self._trouble(seconds)
        self._outcome.seconds = time.monotonic() - began
        self._faults.clear()
        self._outcome.stats = self._server.get("/stats")
        if not _until(self._is_free, _QUIET_S):
            self._outcome.problems.append(f"not free: {self._server.get('/stats')}")
        self._kill_proxy()
        if not self._proxy_is_ready():
            self._outcome.problems.append("the proxy never came back")
        now = self._quiet((threads, descriptors))
        for name, first, last in zip(("threads", "descriptors"), (threads, descriptors), now, strict=False):
            if first != last:
                self._outcome.problems.append(f"{name}: {first - last} have gone, {last - first} are new")
        self._outcome.active = (active, now[2])
        if abs(now[2] - active) > 0.02 * active:
            self._outcome.problems.append(f"MLX held {active:,} bytes, and {now[2]:,} after")
        self._outcome.kills = self._kills

    def _warm_up(self) -> None:
        """So that everything that is made once is there."""
        for path in ("/health", "/stats"):
            self._server.get(path)
        self._server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2})

    def _quiet(self, expected: tuple[Any, Any] | None = None) -> tuple[Any, Any, int]:
        """Threads and descriptors once nobody is connected but the proxy, and MLX's bytes with no cache."""

        def now() -> tuple[Any, Any]:
            held = Held.now()
            return Counter(re.sub("[0-9]+", "", name) for name in held.threads), Counter(held.descriptors)

        if expected:
            _until(lambda: now() == expected, 15)
        else:
            _until(_nobody_is_connected, LIMIT_S + 10)
        if not self._engine.is_alive():
            self._outcome.problems.append("the engine thread has ended")
            return *now(), 0
        active = 0
        if getattr(self._faults.cache, "supports_reuse", False):
            try:
                on_engine_thread(self._engine, partial(check_cache, self._faults.cache))
            except AssertionError as error:
                self._outcome.problems.append(f"integrity: {error!r}")
        active = on_engine_thread(self._engine, partial(emptied, self._faults.cache))
        return *now(), active

    def _is_free(self) -> bool:
        stats = self._server.get("/stats")
        engine = stats["engine"]
        return not (
            engine["prefill"]
            or engine["waiting"]
            or stats["batch"]["active_rows"]
            or stats["requests"]["in_flight"]
        )

    # ------------------------------------------------------------------------------------------- the trouble

    def _trouble(self, seconds: float) -> None:
        done = threading.Event()
        endpoints = Endpoints(
            self._server.port, self._proxy._config.port if self._proxy else 0, self._proxy_is_up
        )
        seeds = [random.Random(self._rng.random()) for _ in range(self._crowd.talkers + self._crowd.rude)]
        clients = [
            *(
                Talker(endpoints, self._account, seeds.pop(), f"t{number}").run
                for number in range(self._crowd.talkers)
            ),
            *(
                Rude(endpoints, self._account, seeds.pop(), poison=self._faults.poison, limit_s=LIMIT_S).run
                for _ in range(self._crowd.rude)
            ),
            self._look_in,
        ]
        threads = [threading.Thread(target=client, args=(done,), daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        self._break_things(time.monotonic() + seconds)
        done.set()
        for thread in threads:
            thread.join(150)
        if any(thread.is_alive() for thread in threads):
            self._outcome.problems.append("a client never came to an end")

    def _break_things(self, until: float) -> None:
        next_kill = time.monotonic() + self._crowd.kill_s
        while (now := time.monotonic()) < until or self._is_missing_replies(now - until):
            time.sleep(self._rng.uniform(0.2, 2) * self._crowd.every_s)
            self._faults.plant(self._rng.choice(PLACES))
            if self._proxy and now > next_kill and self._proxy.is_ready:
                self._kill_proxy()
                next_kill = time.monotonic() + self._crowd.kill_s

    def _is_missing_replies(self, overtime_s: float) -> bool:
        return len(self._account.heard) < self._crowd.least and overtime_s < _QUIET_S

    def _look_in(self, done: threading.Event) -> None:
        while not done.wait(0.5):
            began = time.monotonic()
            try:
                reply = ask(self._server.port, "GET", "/health")
            except OSError as error:
                self._account.complain(f"/health: {error!r}")
                continue
            if reply.status == 503 and "retry-after" in reply.headers:
                self._account.count("no room to look in")
            elif reply.status != 200 or reply.json["status"] != "ok":
                self._account.complain(f"/health: {reply.status} {reply.body!r}")
            self._account.count(
                "/health within 50 ms" if time.monotonic() - began < 0.05 else "/health later"
            )

    # --------------------------------------------------------------------------------------------- the proxy

    def _proxy_is_up(self) -> tuple[bool, int]:
        return bool(self._proxy and self._proxy.is_ready and not self._is_dying), self._kills

    def _proxy_is_ready(self) -> bool:
        return not self._proxy or _until(lambda: self._proxy.is_ready, 150)

    def _kill_proxy(self) -> None:
        if not self._proxy:
            return
        self._is_dying = True
        pid, self._kills = self._proxy.pid, self._kills + 1
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _until(lambda: not self._proxy.is_ready, 10)
        self._is_dying = False


# ------------------------------------------------------------------------------------------------ the truth


def _compare(
    model: LoadedModel, faults: Faults, account: Account, crowd: Crowd, rng: random.Random, outcome: Outcome
) -> None:
    """Failures have a planted reason, clients got what the engine wrote, and that is what is true."""
    records = faults.records
    failed = [entry for entry in records if isinstance(entry.ending, Failed)]
    outcome.problems += [
        f"failed: {entry.ending}"
        for entry in failed
        if isinstance(entry.ending, Failed) and ON_PURPOSE not in entry.ending.message
    ]
    innocent = [entry for entry in failed if not faults.is_poisoned(entry)]
    if len(innocent) > faults.fired.total():
        outcome.problems.append(f"{faults.fired.total()} faults, and {len(innocent)} requests failed of them")
    written = _by_mark(model, records)
    outcome.problems += _misheard(model, account.heard, written)
    outcome.problems += [
        f"{mark} got a failure, and did not fail"
        for mark in account.failed
        if not any(isinstance(entry.ending, Failed) for entry in written.get(mark, []))
    ]
    outcome.heard = len(account.heard)
    greedy = [entry for entry in records if entry.is_greedy and entry.tokens]
    for record in rng.sample(greedy, min(crowd.sampled, len(greedy))):
        outcome.compared += 1
        if wrong := _difference(model, record, outcome.tally):
            outcome.problems.append(f"not the truth: {wrong}")
    if not outcome.tally.has_rare_ties:
        outcome.problems.append(f"{outcome.tally.ties} ties in {outcome.tally.tokens} tokens")


def _difference(model: LoadedModel, record: Record, tally: Tally) -> str | None:
    prompt, reply = record.engine_request.prompt.ids, record.tokens
    ids = (*prompt, *reply)
    reference = greedy_reference(model.network, prompt, len(reply))
    return tally.difference(
        reply,
        reference,
        lambda place: says_too(model.network, ids[: len(prompt) + place], reply[place]),
    )


def _by_mark(model: LoadedModel, records: Sequence[Record]) -> dict[str, list[Record]]:
    """The requests by the mark in their last question."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        marks = _MARK.findall(_text(model, record.engine_request.prompt.ids[-80:]))
        grouped.setdefault(marks[-1] if marks else "", []).append(record)
    return grouped


def _misheard(
    model: LoadedModel, all_heard: Sequence[Heard], written: Mapping[str, Sequence[Record]]
) -> list[str]:
    """Replies that no record of their question has."""
    return [
        f"{heard} was not written: {[(entry.ending, entry.tokens) for entry in written.get(heard.mark, [])]}"
        for heard in all_heard
        if not any(_is_of(model, heard, record) for record in written.get(heard.mark, []))
    ]


def _is_of(model: LoadedModel, heard: Heard, record: Record) -> bool:
    if heard.tokens is not None and heard.tokens != tuple(record.tokens):
        return False
    return heard.text.strip() == _text(model, record.tokens).strip()


def _text(model: LoadedModel, tokens: Sequence[int]) -> str:
    ends = model.tokenizer.eos_token_ids
    raw = b"".join(model.tokenizer.token_bytes(token) for token in tokens if token not in ends)
    return raw.decode(errors="replace")
