"""A server put together from its parts, with a network that can be made to fail."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from start_llm.app import Ready
from start_llm.cache.kinds import words_of
from start_llm.configured import engine_config, model_family, model_traits
from start_llm.engine.admission import Admission
from start_llm.engine.engine import Engine
from start_llm.engine.machinery import Machinery
from start_llm.engine.self_test import BatchVerdict
from start_llm.models.footprint import measure
from start_llm.models.loader import load
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.base import ModelFacts
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.protocols.tenants import Tenants
from start_llm.server.handler import Handler
from start_llm.server.listener import Listener, ServerLimits, Site
from start_llm.server.status import HealthLimits, ModelCard, Status
from start_llm.service import Service
from start_llm.settings import Settings
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics, RequestMetrics
from start_llm.telemetry.terminal import Terminal
from tests.transcripts.fakes import transcripts


class BreakableNetwork:
    """The network of a model, and RuntimeError from it while it is broken."""

    def __init__(self, network: Any) -> None:
        self._network = network
        self.is_broken = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.is_broken:
            raise RuntimeError("out of order")
        return self._network(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


@dataclass(frozen=True)
class BreakableServer:
    port: int
    network: BreakableNetwork
    engine: Engine


@contextmanager
def breakable(folder: Path, *, proxy_key: str = "") -> Generator[BreakableServer]:
    settings = Settings(model_path=str(folder))
    loaded: list[tuple[Ready, BreakableNetwork]] = []

    def assemble() -> Machinery:
        model = load(folder)
        network = BreakableNetwork(model.network)
        loaded.append(
            (Ready(model, measure(model, words_of), Admission(), BatchVerdict(batches=True)), network)
        )
        tokenizer = model.tokenizer
        return Machinery(
            network,
            tokenizer.token_bytes,
            tokenizer.end_tokens,
            most_rows=4,
            batches=True,
            longest_chunk=lambda _: 64,
        )

    metrics = EngineMetrics()
    engine = Engine(engine_config(settings), assemble, metrics)
    engine.start()
    ready, network = loaded[0]
    listener = Listener("127.0.0.1", 0, Handler, ServerLimits())
    site = _site(settings, engine, metrics, ready)
    listener.open(replace(site, tenants=Tenants(proxy_key)))
    try:
        yield BreakableServer(listener.port, network, engine)
    finally:
        listener.stop_accepting()
        listener.hang_up()
        assert engine.stop(5), "the engine thread did not end"


def _site(settings: Settings, engine: Engine, metrics: EngineMetrics, ready: Ready) -> Site:
    tokenizer = ready.model.tokenizer
    family = model_family(settings, ready.model.config, tokenizer)
    traits = model_traits(settings, ready.model, ready.footprint, family, ready.admission)
    requests = RequestMetrics()
    known = transcripts(tokenizer.token_bytes, partial(tokenizer.encode, as_document=False))
    card = ModelCard(
        id="breakable",
        context_window=traits.context_window,
        reasons=family.thought is not None,
        weights_bytes=ready.footprint.weights_bytes,
        budget_bytes=ready.admission.usable_bytes,
        usable_bytes=ready.admission.usable_bytes,
        model_type=ready.footprint.model_type,
    )
    return Site(
        service=Service(
            engine=engine,
            tokenizer=tokenizer,
            preparer=Preparer(tokenizer, family, heal=known.heal),
            transcripts=known,
            traits=traits,
            reports=Reports(requests, Terminal(io.StringIO())),
        ),
        status=Status(
            card=card,
            batch=4,
            turns_because="",
            requests=requests,
            engine=metrics,
            cache=CacheMetrics(),
            transcripts=known.metrics,
            responses=ResponseStore(),
            limits=HealthLimits(chunk_s=0.2, stall_s=60),
            engine_is_alive=engine.is_alive,
        ),
        model=ModelFacts(card.id, traits.vocabulary, tokenizer.token_bytes),
        seal=Seal(bytes(KEY_BYTES)),
    )
