"""A server put together from its parts, with a network that can be made to fail."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from start_llm.access.backend_secret import BackendSecret
from start_llm.access.request_tenant import Tenants
from start_llm.config.server_variables import HttpSettings
from start_llm.config.settings import Settings
from start_llm.core.limits import TimeLimits
from start_llm.core.model_card import ModelCard
from start_llm.engine.engine import Engine
from start_llm.engine.resources import EngineResources
from start_llm.hosting.model_adapters import ModelAdapters
from start_llm.models.adapter_loader import Adapters
from start_llm.models.footprint import context_window
from start_llm.models.loader import LoadedModel, load
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.server.handler import Handler
from start_llm.server.library_pages import LibraryPages
from start_llm.server.listener import Listener, ServerContext
from start_llm.server.served_models import ListedModel, ServedModel
from start_llm.server.status import Status
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.serving.service import Service
from start_llm.storage.database import DatabaseMetrics
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import CacheMetrics, DiskMetrics, EngineMetrics, RequestMetrics
from start_llm.telemetry.terminal import Terminal
from start_llm.wiring.from_settings import model_family, reply_defaults
from tests.engine.harness import uncached_resources
from tests.flat_settings import settings_of
from tests.transcripts.fakes import transcripts


class OneModel:
    """`ServedModels` with a single one, which is always loaded."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.started_at = 0

    @property
    def default(self) -> ServedModel:
        return self._model

    @contextmanager
    def lease(self, name: object, patience_s: float = 0) -> Generator[ServedModel]:
        yield self.default

    def peek(self, name: object) -> ServedModel:
        return self.default

    def lease_if_loaded(self, name: object) -> AbstractContextManager[ServedModel]:
        return self.lease(name)

    def answering(self, name: object) -> str:
        return self.default.status.card.id

    @property
    def status(self) -> Status:
        return self.default.status

    def stuck_reason(self) -> str:
        return self.default.status.stuck_reason()

    def knows(self, name: str) -> bool:
        return name == self.default.status.card.id

    def loading_progress(self, name: str) -> str:
        raise NotImplementedError

    def listed(self) -> list[ListedModel]:
        status = self.default.status
        return [ListedModel(id=status.card.id, state="loaded", card=status.card, status=status)]

    def load(self, name: str) -> None:
        pass

    def unload(self, name: str) -> None:
        raise NotImplementedError

    spare_bytes = 0

    def divide_memory(self) -> None:
        raise NotImplementedError


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
def breakable(folder: Path, *, secret: BackendSecret | None = None) -> Generator[BreakableServer]:
    settings = settings_of(model_path=str(folder))
    loaded: list[tuple[LoadedModel, BreakableNetwork]] = []

    def assemble() -> EngineResources:
        model = load(folder)
        network = BreakableNetwork(model.network)
        loaded.append((model, network))
        tokenizer = model.tokenizer
        return uncached_resources(
            network,
            tokenizer.token_bytes,
            tokenizer.eos_token_ids,
            max_sequences=4,
            batches=True,
            longest_chunk=lambda _: 64,
        )

    metrics = EngineMetrics()
    engine = Engine(assemble, metrics, max_waiting=settings.engine.max_waiting)
    engine.start()
    model, network = loaded[0]
    listener = Listener("127.0.0.1", 0, Handler, HttpSettings())
    context = _context(settings, engine, metrics, model)
    listener.open(replace(context, tenants=Tenants(secret)))
    try:
        yield BreakableServer(listener.port, network, engine)
    finally:
        listener.stop_accepting()
        listener.connections.close_all()
        assert engine.stop(5), "the engine thread did not end"


def _context(settings: Settings, engine: Engine, metrics: EngineMetrics, model: LoadedModel) -> ServerContext:
    tokenizer = model.tokenizer
    family = model_family(settings, model.config, tokenizer)
    requests = RequestMetrics()
    known = transcripts(tokenizer.token_bytes, partial(tokenizer.encode, as_document=False))
    preparer = Preparer(tokenizer, family, restore_reasoning=known.restore_reasoning)
    own_window = context_window(model.config) or settings.engine.max_kv_size
    card = ModelCard(id="breakable", family=family, vocabulary=model.vocabulary, own_window=own_window)
    service = Service(
        engine=engine,
        requests=RequestPreparer(preparer, tokenizer, card),
        transcripts=known,
        reports=Reports(requests, Terminal(io.StringIO())),
        defaults=reply_defaults(settings, model.sampling),
    )
    nothing: Any = None
    status = Status(
        card=card,
        engine=metrics,
        cache=CacheMetrics(),
        transcripts=known.metrics,
        database=DatabaseMetrics(),
        batch=4,
        requests=requests,
        disk=DiskMetrics(),
        responses=ResponseStore(),
        limits=TimeLimits(chunk_s=0.2, stall_s=60),
        engine_is_alive=engine.is_alive,
    )
    adapters = ModelAdapters(engine, Adapters(model.network), {})
    models = OneModel(
        ServedModel(card, tokenizer.token_bytes, service=service, status=status, adapters=adapters)
    )
    return ServerContext(
        models=models,
        library=LibraryPages(nothing, nothing, models),
        seal=Seal(bytes(KEY_BYTES)),
    )
