"""Build the parts of the server, connect them, start them and stop them (the composition root)."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from start_llm import __version__
from start_llm.audit.calls import unread_call
from start_llm.audit.subject import AuditedModel
from start_llm.cache.buffers import KVShape
from start_llm.cache.disk_index import TRANSCRIPTS
from start_llm.cache.disk_tier import DiskAccess, DiskTier
from start_llm.cache.kinds import label_of
from start_llm.cache.layers import Layers
from start_llm.cache.no_reuse import NoReuse
from start_llm.cache.prompt_cache import PromptCache
from start_llm.config.paths import DEMO_MODEL, ROOT, from_root
from start_llm.config.settings import Settings
from start_llm.core.database import Database, DatabaseMetrics
from start_llm.core.disk_thread import DiskThread
from start_llm.core.errors import PortError
from start_llm.core.family import Family
from start_llm.engine.admission import Admission, shortage
from start_llm.engine.cost import measure_sequence
from start_llm.engine.engine import Engine
from start_llm.engine.resources import EngineResources
from start_llm.engine.self_test import BatchVerdict, check_batching
from start_llm.engine.work import measure_work
from start_llm.launch.clients import CLIENTS
from start_llm.launch.server_info import own_url
from start_llm.models.device import this_device, wire_memory
from start_llm.models.download import resolve
from start_llm.models.footprint import Footprint, measure
from start_llm.models.identity import digest_of, identity, transcripts_identity
from start_llm.models.loader import LoadedModel, load
from start_llm.prompt.adapt import needed
from start_llm.prompt.audit import described
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.base import ModelFacts
from start_llm.protocols.notices import Notices
from start_llm.protocols.responses.store import ResponseStore
from start_llm.protocols.tenants import Tenants
from start_llm.proxy.launcher import Proxy, claim_port
from start_llm.server.drain import RequestDrain
from start_llm.server.handler import Handler
from start_llm.server.listener import Listener, ServerContext
from start_llm.server.served_models import ServedModel, ServedModels
from start_llm.server.status import HealthLimits, ModelCard, Status
from start_llm.service import Service
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics, EngineMetrics, RequestMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.transcripts.turn import Transcripts
from start_llm.wiring import (
    access_policy,
    admission,
    cache_limits,
    disk_limits,
    known_digests,
    make_seal,
    make_trace,
    memory_budget,
    model_family,
    model_name,
    model_traits,
    no_table,
    page_size,
    prompt_policy,
    proxy_config,
    response_store,
    server_limits,
    time_limits,
    transcripts,
    work_reserve,
)

LOGS = ROOT / "logs"
_STOP_S = 5.0  # the longest prefill chunk that is tried takes 4 s
_LAST_LINES_S = 0.5
_LEAST_FLUSH_S = 1.0
"""Seconds for writing to the disk, if running requests took all of DRAIN_SECONDS."""


@dataclass(frozen=True, slots=True)
class EngineStartup:
    """A model that the engine thread has loaded."""

    model: LoadedModel
    footprint: Footprint
    admission: Admission
    verdict: BatchVerdict
    identity: bytes


class App:
    """One server process.

    1. bind the ports          so that a busy port is found before the model is loaded
    2. find the model          in a folder, or download it with progress
    3. load it                 on the engine thread, which owns it from then on
    4. open                    accept requests
    5. start the proxy         in a process of its own; its watcher prints when it is ready
    6. close                   refuse new requests, wait for running ones, then stop everything
    """

    def __init__(self, settings: Settings, terminal: Terminal) -> None:
        self._settings = settings
        self._terminal = terminal
        self._engine_metrics = EngineMetrics()
        self._requests = RequestMetrics()
        self._cache_metrics = CacheMetrics()
        self._disk_metrics = DiskMetrics()
        self._disk_thread = DiskThread(self._note_disk_error)
        self._disk_tier: DiskTier | None = None
        self._database: Database | None = None
        self._trace = make_trace(settings, self._cache_metrics, terminal.say)
        self._engine: Engine | None = None
        self._proxy: Proxy | None = None
        self._proxy_key = f"proxy-{secrets.token_urlsafe(24)}"
        self._access_policy = access_policy(settings, self._proxy_key)
        self._drain = RequestDrain()
        self._proxy_port = claim_port(settings.proxy_port, LOGS, terminal.say) if settings.proxy else None
        self._listener = self._listen()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def url(self) -> str:
        return own_url(self._settings.mlx_host, self.port)

    def start(self) -> None:
        """Carry out steps 2 to 5.

        Raises:
            StartupError: a step failed. Everything that was started is stopped again.
        """
        try:
            folder = resolve(model_name(self._settings))
            self._terminal.say(f"start_llm {__version__}: loading {folder.name} ...")
            self._engine, ready = self._load(folder)
            card = self._open(folder.name, self._engine, ready)
            self._start_proxy(card)
        except BaseException:
            self.close()
            raise

    def close(self) -> bool:
        """Carry out step 6. False if the engine is still computing; the caller may then exit the process."""
        patience_s = self._settings.drain_s
        end = time.monotonic() + patience_s
        self._drain.begin(patience_s)
        if running := self._drain.inside:
            self._terminal.say(
                f"Waiting up to {patience_s:g} s for {running} running requests. Ctrl-C again ends at once."
            )
        self._drain.wait(patience_s)
        self._listener.stop_accepting()
        self._listener.hang_up()
        if self._proxy:
            self._proxy.stop()
        flush_s = max(end - time.monotonic(), _LEAST_FLUSH_S)
        has_stopped = self._engine.stop(_STOP_S, flush_s) if self._engine else True
        self._drain.wait(_LAST_LINES_S)
        if self._database:
            self._database.close()
        self._disk_thread.close(_STOP_S)
        if self._disk_tier:
            self._disk_tier.close()
        if self._proxy_port:
            self._proxy_port.release()
        return has_stopped

    def abandon(self) -> None:
        """Kill the proxy and release its lock, without waiting, because this process exits at once."""
        if self._proxy:
            self._proxy.abandon()
        if self._proxy_port:
            self._proxy_port.release()

    def _listen(self) -> Listener:
        settings = self._settings
        try:
            return Listener(settings.mlx_host, settings.mlx_port, Handler, server_limits(settings))
        except PortError:
            if self._proxy_port:
                self._proxy_port.release()
            raise

    def _load(self, folder: Path) -> tuple[Engine, EngineStartup]:
        """Start an engine, and return it with the model that its thread has loaded."""
        loaded: list[EngineStartup] = []

        def assemble() -> EngineResources:
            model = load(folder)
            wire_memory()
            footprint = measure(model, label_of)
            layers = Layers(model.network, room=self._settings.initial_blocks * page_size(self._settings))
            probe = layers.fresh()
            row = measure_sequence(model.network, probe)
            work = measure_work(model.network, layers)
            reserve = work_reserve(self._settings, work.cost)
            admitted = admission(self._settings, footprint.weights_bytes, row, reserve)
            verdict = check_batching(model.network, layers.fresh, self._settings.batch)
            weights = known_digests(self._settings).get(folder, partial(digest_of, model))
            loaded.append(EngineStartup(model, footprint, admitted, verdict, identity(model, weights)))
            return EngineResources(
                cache=self._prompt_cache(loaded[0], layers, probe),
                time_limits=time_limits(self._settings),
                admission=admitted,
                measured=work.chunks,
                longest_chunk=partial(work.cost.longest, reserve),
                shortage=partial(shortage, memory_budget(self._settings), this_device().lacking_bytes),
                network=model.network,
                token_bytes=model.tokenizer.token_bytes,
                eos_token_ids=model.tokenizer.eos_token_ids,
                max_sequences=self._settings.batch,
                batches=verdict.batches,
            )

        engine = Engine(assemble, self._engine_metrics, max_waiting=self._settings.max_waiting)
        engine.start()
        if self._disk_tier:
            self._disk_tier.notify = engine.note_disk
        return engine, loaded[0]

    def _prompt_cache(self, ready: EngineStartup, layers: Layers, probe: list[Any]) -> PromptCache | NoReuse:
        """Build the prompt cache, or `NoReuse`. Runs on the engine thread.

        Args:
            probe: caches that hold some tokens.
        """
        if layers.unknown:
            kinds = ", ".join(layers.unknown)
            self._terminal.say(
                f"This model keeps its state in {kinds}, which cannot be reused: no prompt cache."
            )
        if layers.unknown or not self._settings.prompt_cache:
            return NoReuse(layers, self._cache_metrics)
        limits = cache_limits(self._settings, ready.footprint, ready.admission.usable_bytes)
        self._cache_metrics.budget_bytes = limits.budget_bytes
        cache = PromptCache(
            layers,
            limits=limits,
            page_size=page_size(self._settings),
            metrics=self._cache_metrics,
            identity=ready.identity,
        )
        if self._settings.ssd_folder is not None:
            name = transcripts_identity(ready.model, ready.identity).hex()
            self._attach_disk(cache, from_root(self._settings.ssd_folder), KVShape.of(layers, probe), name)
        return cache

    def _attach_disk(self, cache: PromptCache, folder: Path, shape: KVShape, name: str) -> None:
        """Give the prompt cache a disk tier in this folder, unless another server has it.

        Args:
            name: of the file with what is known of conversations.
        """
        limits = disk_limits(self._settings)
        tier = DiskTier(folder, limits, self._disk_thread, self._disk_metrics, self._terminal.say)
        if tier.start():
            self._disk_thread.start()
            self._disk_tier = tier
            tier.database_name = name
            path = folder / TRANSCRIPTS / f"{name}.db"
            self._database = Database(path, self._disk_thread, self._terminal.say)
            cache.attach_disk(
                DiskAccess(tier, shape, this_device().shares_arrays, self._settings.ssd_write_after_s)
            )

    def _note_disk_error(self, error: Exception) -> None:
        self._disk_metrics.errors += 1
        self._terminal.say(f"The disk thread failed: {type(error).__name__}: {error}")

    def _open(self, name: str, engine: Engine, ready: EngineStartup) -> ModelCard:
        tokenizer = ready.model.tokenizer
        family = model_family(self._settings, ready.model.config, tokenizer)
        table = self._database.table if self._database else no_table
        known = transcripts(self._settings, tokenizer, table)
        preparer = Preparer(
            tokenizer, family, policy=prompt_policy(self._settings), restore_reasoning=known.restore_reasoning
        )
        traits = model_traits(self._settings, ready.model, ready.footprint, family, ready.admission)
        service = Service(
            engine=engine,
            tokenizer=tokenizer,
            preparer=preparer,
            transcripts=known,
            traits=traits,
            reports=Reports(self._requests, self._terminal, self._trace),
        )
        card = ModelCard(
            id=name,
            context_window=min(traits.context_window, ready.admission.longest),
            usable_bytes=ready.admission.usable_bytes,
            budget_bytes=memory_budget(self._settings),
            reasons=family.reasoning is not None,
            weights_bytes=ready.footprint.weights_bytes,
            model_type=ready.footprint.model_type,
        )
        responses = response_store(self._settings, table)
        status = self._status(card, engine, ready, known, responses)
        facts = ModelFacts(name, traits.vocabulary, tokenizer.token_bytes)
        tenants = Tenants(self._proxy_key, apart=self._settings.isolates_tenants)
        context = ServerContext(
            models=ServedModels(ServedModel(service, facts)),
            status=status,
            seal=make_seal(self._settings, self._terminal.say),
            tenants=tenants,
            responses=responses,
            notices=Notices(self._terminal.say),
            access_policy=self._access_policy,
            drain=self._drain,
        )
        self._listener.open(context)
        self._introduce(card, ready, family, preparer)
        return card

    def _status(
        self,
        card: ModelCard,
        engine: Engine,
        ready: EngineStartup,
        known: Transcripts,
        responses: ResponseStore,
    ) -> Status:
        return Status(
            card=card,
            batch=self._settings.batch,
            unbatched_reason=ready.verdict.reason,
            requests=self._requests,
            engine=self._engine_metrics,
            cache=self._cache_metrics,
            disk=self._disk_metrics,
            database=self._database.metrics if self._database else DatabaseMetrics(),
            transcripts=known.metrics,
            responses=responses,
            limits=HealthLimits(chunk_s=self._settings.chunk_s, stall_s=self._settings.stall_s),
            engine_is_alive=engine.is_alive,
            drain=self._drain,
        )

    def _start_proxy(self, card: ModelCard) -> None:
        if self._settings.proxy:
            self._proxy = Proxy(
                proxy_config(self._settings, self.url, card.id, card.context_window, self._proxy_key),
                say=self._terminal.say,
                patience_s=self._settings.proxy_wait_s,
                logs=LOGS,
            )
            self._proxy.start()

    def _introduce(self, card: ModelCard, ready: EngineStartup, family: Family, preparer: Preparer) -> None:
        footprint = ready.footprint
        layers = ", ".join(f"{count} {kind}" for kind, count in footprint.layers.items())
        self._terminal.summary(
            [
                ("model", card.id),
                ("family", f"{family.name} ({card.model_type})"),
                ("template", "; ".join([described(preparer.facts), *needed(preparer.facts)])),
                ("layers", layers),
                ("memory", f"weights {_size(footprint.weights_bytes)} of {_size(card.budget_bytes)}"),
                ("cache", _cache_told(self._cache_metrics)),
                ("disk", _disk_told(self._disk_tier)),
                ("context", f"{card.context_window:,} tokens"),
                ("batch", _batching_told(self._settings.batch, ready.verdict)),
                ("trace", str(self._trace or "off")),
                ("address", f"{self.url}/v1"),
            ]
        )
        if card.id == DEMO_MODEL.name:
            self._terminal.say(
                "\n  This is the demo model: it says what it is, says a word after you, calls a tool that "
                "you name,\n  and passes on its result. Choose a real one with --model."
            )
        if told := unread_call(AuditedModel(ready.model.tokenizer, family, preparer)):
            self._terminal.say(
                f"\n  No reader knows how this model writes calls; an agent gets them as text: {told!r}"
            )
        for title, lines in paste_lines(self.url, card.id, asks_key=bool(self._settings.keys)):
            self._terminal.paste(title, lines)
        self._terminal.say("\n  Ctrl-C ends the server.\n")


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _cache_told(metrics: CacheMetrics) -> str:
    return f"up to {_size(metrics.budget_bytes)}" if metrics.budget_bytes else "off"


def _disk_told(tier: DiskTier | None) -> str:
    return str(tier.folder) if tier else "off"


def _batching_told(batch: int, verdict: BatchVerdict) -> str:
    return f"{batch} at once" if verdict.batches else f"one after another: {verdict.reason}"


def paste_lines(url: str, model: str, *, asks_key: bool) -> list[tuple[str, list[str]]]:
    """Return lines that a user can paste, by purpose. They name the variable of an API key, not the key."""
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    body = shlex.quote(json.dumps(chat, ensure_ascii=False))
    key = '"$MLX_API_KEY"' if asks_key else "local"
    shown = ' -H "Authorization: Bearer $MLX_API_KEY"' if asks_key else ""
    return [
        (
            "Try it:",
            [f"curl -N {url}/v1/chat/completions{shown} -H 'Content-Type: application/json' -d {body}"],
        ),
        (
            "For clients that speak OpenAI's protocol:",
            [f"export OPENAI_BASE_URL={url}/v1", f"export OPENAI_API_KEY={key}", f"# model: {model}"],
        ),
        (
            f"For {', '.join(CLIENTS)}, in the folder to work in:",
            [
                shlex.join(
                    [str(ROOT / "scripts" / "start_llm"), "launch", "--base-url", url, next(iter(CLIENTS))]
                )
            ],
        ),
    ]
