"""A loaded model with everything that exists once for each loaded model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from start_llm.config.settings import Settings
from start_llm.core.family import Family
from start_llm.engine.embedding import LONGEST_TEXT, Embedder
from start_llm.engine.engine import Engine
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_adapters import ModelAdapters
from start_llm.hosting.model_loading import EngineLoader, EngineStartup, LoadedEngine
from start_llm.hosting.model_memory import MemoryNeeds
from start_llm.hosting.shared_parts import SharedParts
from start_llm.models.identity import transcripts_identity
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.base import ModelFacts
from start_llm.server.served_models import ServedModel
from start_llm.server.status import HealthLimits, ModelCard, Status
from start_llm.serving.service import ModelTraits, Service
from start_llm.storage.database import Database, DatabaseMetrics
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import ModelMetrics
from start_llm.telemetry.trace import Trace
from start_llm.wiring.from_settings import (
    image_door,
    make_preparer,
    model_family,
    model_traits,
    no_table,
    transcripts,
)
from start_llm.wiring.memory_plan import (
    cache_budget,
    memory_budget,
)

_STOP_S = 5.0  # the longest prefill chunk that is tried takes 4 s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRuntime:
    """A loaded model, and what answers requests with it.

    Attributes:
        startup: the model itself, and what its trials have shown.
    """

    settings: Settings
    card: ModelCard
    engine: Engine
    startup: EngineStartup
    family: Family
    preparer: Preparer
    served: ServedModel
    metrics: ModelMetrics
    trace: Trace | None
    disk: DiskStorage
    database: Database | None

    @property
    def needs(self) -> MemoryNeeds:
        ready = self.startup
        return MemoryNeeds(
            kept_bytes=ready.footprint.weights_bytes + ready.adapters.nbytes + ready.image_bytes,
            window_bytes=ready.admission.cost.bytes_of(self.card.context_window),
            computing_bytes=ready.computing_bytes,
        )

    def share_memory(self, nbytes: int) -> None:
        """Give the model this much memory for prompts that run and for its prompt cache."""
        wanted = cache_budget(self.settings, self.startup.footprint)
        self.engine.share_memory(nbytes, min(nbytes, wanted))

    def stop(self, timeout_s: float, flush_s: float) -> bool:
        """Fail what runs, write what is to be kept, and end. False if the engine is still computing.

        Args:
            flush_s: seconds for writing pages to the disk.
        """
        has_stopped = self.engine.stop(timeout_s, flush_s)
        self.disk.remove_listener(self.engine.note_disk)
        return has_stopped

    def close_database(self) -> None:
        """Write what is known of conversations. Only once no request is left that could add to it."""
        if self.database:
            self.database.close()


def start_model(
    shared: SharedParts, name: str, folder: Path, others: Sequence[MemoryNeeds] = ()
) -> ModelRuntime:
    """Load a model, and build what answers requests with it.

    Args:
        others: what the other loaded models need.

    Raises:
        StartLLMError: the model cannot be served.
    """
    taken = sum(one.kept_bytes for one in others)
    least_computing = max((one.computing_bytes for one in others), default=0)
    settings = replace(shared.settings, memory=memory_budget(shared.settings) - taken)
    with ExitStack() as opened:
        loaded = EngineLoader(shared, settings, folder, least_computing).start()
        opened.callback(loaded.engine.stop, _STOP_S)
        shared.disk.add_listener(loaded.engine.note_disk)
        opened.callback(shared.disk.remove_listener, loaded.engine.note_disk)
        runtime = _runtime(shared, settings, name, loaded, opened)
        opened.pop_all()
        return runtime


def _runtime(
    shared: SharedParts, settings: Settings, name: str, loaded: LoadedEngine, opened: ExitStack
) -> ModelRuntime:
    ready, tokenizer = loaded.startup, loaded.startup.model.tokenizer
    if tokenizer.decoding_warning:
        shared.terminal.say(tokenizer.decoding_warning)
    database = shared.disk.conversations(transcripts_identity(ready.model, ready.identity).hex())
    if database:
        opened.callback(database.close)
    family = model_family(settings, ready.model.config, tokenizer)
    known = transcripts(settings, tokenizer, family, database.table if database else no_table)
    preparer = make_preparer(settings, ready.model, family, known)
    traits = replace(
        model_traits(settings, ready.model, ready.footprint, family, ready.admission), adapters=ready.adapters
    )
    card = _card(name, ready, traits, memory_budget(settings))
    trace = shared.trace.of(loaded.cache_metrics) if shared.trace else None
    service = Service(
        engine=loaded.engine,
        tokenizer=tokenizer,
        preparer=preparer,
        transcripts=known,
        traits=traits,
        reports=Reports(
            shared.requests,
            shared.terminal,
            trace,
            shared.prometheus.observer(name),
            shows_images=settings.shows_images,
            activity=shared.activity,
        ),
    )
    adapters = ModelAdapters(loaded.engine, ready.adapters, shared.adapters[name])
    adapters.mount_again(shared.terminal.say)
    images = image_door(settings) if card.sees else None
    facts = ModelFacts(name, traits.vocabulary, tokenizer.token_bytes, images)
    rows = database.metrics if database else DatabaseMetrics()
    weights = ready.footprint.weights_bytes
    metrics = ModelMetrics(loaded.metrics, loaded.cache_metrics, known.metrics, rows, weights)
    return ModelRuntime(
        settings=settings,
        card=card,
        engine=loaded.engine,
        startup=ready,
        family=family,
        preparer=preparer,
        served=ServedModel(
            service, facts, _status(shared, card, loaded, metrics), adapters, _embedder(loaded, tokenizer)
        ),
        metrics=metrics,
        trace=trace,
        disk=shared.disk,
        database=database,
    )


@dataclass(frozen=True, slots=True)
class EngineEmbedder:
    """An embedder whose work is done on the engine thread, between two steps of replies."""

    engine: Engine
    embedder: Embedder
    tokenizer: Tokenizer

    longest: int = LONGEST_TEXT

    @property
    def width(self) -> int:
        return self.embedder.width

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that its tokenizer puts around one."""
        return self.tokenizer.encode(text, as_document=True)

    def fewest_tokens(self, text: str) -> int:
        return self.tokenizer.fewest_tokens(text)

    def embed(self, ids: Sequence[int]) -> list[float]:
        return self.engine.run("make a vector", self.embedder.embed, ids)


def _embedder(loaded: LoadedEngine, tokenizer: Tokenizer) -> EngineEmbedder | None:
    found = loaded.startup.embedder
    return EngineEmbedder(loaded.engine, found, tokenizer) if found else None


def _card(name: str, ready: EngineStartup, traits: ModelTraits, budget_bytes: int) -> ModelCard:
    return ModelCard(
        id=name,
        context_window=min(traits.context_window, ready.admission.longest),
        usable_bytes=ready.admission.usable_bytes,
        budget_bytes=budget_bytes,
        reasons=traits.family.reasoning is not None,
        sees=ready.model.vision is not None,
        weights_bytes=ready.footprint.weights_bytes,
        model_type=ready.footprint.model_type,
    )


def _status(shared: SharedParts, card: ModelCard, loaded: LoadedEngine, metrics: ModelMetrics) -> Status:
    settings, ready, vision = shared.settings, loaded.startup, loaded.startup.model.vision
    return Status(
        card=card,
        batch=settings.batch,
        unbatched_reason=ready.verdict.reason,
        requests=shared.requests,
        engine=metrics.engine,
        cache=metrics.cache,
        disk=shared.disk.metrics,
        database=metrics.database,
        transcripts=metrics.transcripts,
        responses=shared.responses,
        kv=ready.kv,
        limits=HealthLimits(chunk_s=settings.chunk_s, stall_s=settings.stall_s),
        engine_is_alive=loaded.engine.is_alive,
        image_input_bytes=lambda: vision.processor.input_bytes if vision else 0,
        drain=shared.drain,
    )
