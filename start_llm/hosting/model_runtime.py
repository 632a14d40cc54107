"""Load a model, and build everything that exists once for each loaded model."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from start_llm.cache.buffers import KVShape
from start_llm.cache.kinds import label_of
from start_llm.cache.layers import Layers
from start_llm.cache.prompt_cache import PromptCache
from start_llm.config.paths import kernels_folder
from start_llm.config.settings import Settings
from start_llm.core.errors import ModelError
from start_llm.core.family import Family
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission, shortage
from start_llm.engine.cost import measure_sequence
from start_llm.engine.embedding import LONGEST_TEXT, Embedder
from start_llm.engine.engine import Engine
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.resources import EngineResources
from start_llm.engine.self_test import BatchVerdict, check_batching
from start_llm.engine.step_plan import PlanClock
from start_llm.engine.work import PrefillProfile, measure_tower, measure_work
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_adapters import AdapterFolders, ModelAdapters
from start_llm.library.folders import shape_in
from start_llm.models.adapter_loader import Adapters
from start_llm.models.device import keep_kernels, this_device, wire_memory
from start_llm.models.footprint import Footprint, measure
from start_llm.models.identity import digest_of, identity, transcripts_identity
from start_llm.models.known_digests import WeightFiles, weight_files_of
from start_llm.models.loader import LoadedModel, load
from start_llm.models.pooling import pooling_in
from start_llm.models.tokenizer import Tokenizer
from start_llm.models.vision import Vision
from start_llm.prompt.prepare import Preparer
from start_llm.protocols.base import ModelFacts
from start_llm.protocols.responses.response_store import ResponseStore
from start_llm.server.drain import RequestDrain
from start_llm.server.served_models import ServedModel
from start_llm.server.status import ModelCard, Status
from start_llm.serving.service import ModelTraits, Service
from start_llm.storage.database import Database, DatabaseMetrics
from start_llm.telemetry.account import Reports
from start_llm.telemetry.activity import Activity
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics, KVAtRest, ModelMetrics, RequestMetrics
from start_llm.telemetry.prometheus import ServerMetrics
from start_llm.telemetry.terminal import Terminal, announced_if_slow
from start_llm.telemetry.trace import Trace
from start_llm.wiring.from_settings import (
    image_door,
    known_digests,
    make_preparer,
    model_family,
    model_traits,
    no_table,
    transcripts,
)
from start_llm.wiring.kv_bits import quantize_pages
from start_llm.wiring.memory_plan import (
    ImageMemory,
    admission,
    cache_budget,
    cache_limits,
    estimated_work,
    float32_bytes,
    image_memory,
    memory_budget,
    own_machine,
    work_reserve,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What the models of a server share.

    Attributes:
        thread: computes for all of them.
        responses: the kept responses.
        adapters: the folders of the mounted adapters, by the model.
    """

    settings: Settings
    terminal: Terminal
    thread: EngineThread
    disk: DiskStorage
    requests: RequestMetrics
    prometheus: ServerMetrics
    trace: Trace | None
    responses: ResponseStore
    drain: RequestDrain
    activity: Activity
    adapters: defaultdict[str, AdapterFolders] = field(default_factory=lambda: defaultdict(dict))


_STOP_S = 5.0  # the longest prefill chunk that is tried takes 4 s


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """The memory without which a prompt of a model's whole context window would have no room.

    Attributes:
        kept_bytes: weights, adapters and images.
        window_bytes: KV of such a prompt.
        computing_bytes: for one step. Models compute in turns, so the largest need is that of all together.
    """

    kept_bytes: int
    window_bytes: int
    computing_bytes: int


def together(needs: Sequence[MemoryNeeds]) -> int:
    """Return the bytes that several models need beside each other."""
    computing = max((one.computing_bytes for one in needs), default=0)
    return computing + sum(one.kept_bytes + one.window_bytes for one in needs)


@dataclass(frozen=True, slots=True)
class EngineStartup:
    """A model that the engine thread has loaded.

    Attributes:
        computing_bytes: memory that stays free for computing.
        image_bytes: memory for images that are kept as the vision tower has seen them.
    """

    model: LoadedModel
    footprint: Footprint
    admission: Admission
    verdict: BatchVerdict
    identity: bytes
    kv: KVAtRest
    adapters: Adapters
    embedder: Embedder | None = None
    computing_bytes: int = 0
    image_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine with its model."""

    engine: Engine
    startup: EngineStartup
    metrics: EngineMetrics
    cache_metrics: CacheMetrics


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


class EngineLoader:
    """Loads a model on the engine thread, and measures it.

    Args:
        settings: with the memory that this model may use.
        least_computing: bytes that stay free for computing in any case, because another model needs them.
    """

    def __init__(self, shared: SharedParts, settings: Settings, folder: Path, least_computing: int) -> None:
        self._shared = shared
        self._settings = settings
        self._folder = folder
        self._least_computing = least_computing
        self._cache_metrics = CacheMetrics()
        self._loaded: list[EngineStartup] = []

    def start(self) -> LoadedEngine:
        """Load the model. Its engine takes requests from then on.

        Raises:
            StartLLMError: the model cannot be served.
        """
        metrics, most, thread = EngineMetrics(), self._settings.engine.max_waiting, self._shared.thread
        engine = Engine(self._assemble, metrics, max_waiting=most, thread=thread)
        engine.start()
        self._shared.disk.add_listener(engine.note_disk)
        return LoadedEngine(engine, self._loaded[0], metrics, self._cache_metrics)

    def _assemble(self) -> EngineResources:
        settings, files = self._settings, weight_files_of(self._folder)
        model = self._load()
        layers = Layers(model.network, room=settings.cache.initial_blocks * settings.cache.page_size)
        profile, row, probe = self._measured(model, layers)
        for line in quantize_pages(settings, self._folder, model.config, layers, probe):
            self._say(line)
        reserve = work_reserve(settings, profile.cost)
        images = self._image_memory(model.vision)
        footprint = measure(model, label_of)
        pooling = pooling_in(self._folder, model.config)
        computing = max(reserve, images.tower_bytes, row.bytes_of(LONGEST_TEXT) if pooling else 0)
        kept_free = max(computing, self._least_computing) + images.kept_bytes
        admitted = admission(settings, footprint.weights_bytes, row, kept_free)
        shifts = model.vision is not None and model.vision.moves_positions
        with self._announced_if_slow("Trying several sequences at once ..."):
            verdict = check_batching(
                model.network, layers.fresh, settings.engine.batch, shifts=shifts, pace=profile.pace
            )
        known = self._identity(model, files)
        kv = layers.kv_at_rest(probe)
        adapters = Adapters(model.network)
        self._loaded.append(
            EngineStartup(
                model=model,
                footprint=footprint,
                admission=admitted,
                verdict=verdict,
                identity=known,
                kv=kv,
                adapters=adapters,
                embedder=Embedder(model.network, pooling, adapters.mount) if pooling else None,
                computing_bytes=computing,
                image_bytes=images.kept_bytes,
            )
        )
        budget_bytes = memory_budget(self._shared.settings)
        clock = PlanClock()
        return EngineResources(
            cache=self._prompt_cache(self._loaded[0], layers, probe, clock),
            clock=clock,
            time_limits=settings.engine,
            admission=admitted,
            measured=profile.chunks,
            longest_chunk=partial(profile.cost.longest, reserve),
            shortage=partial(shortage, budget_bytes, this_device().lacking_bytes),
            network=model.network,
            token_bytes=model.tokenizer.token_bytes,
            eos_token_ids=model.tokenizer.eos_token_ids,
            max_sequences=settings.engine.batch,
            batches=verdict.batches,
            vision=model.vision,
            image_bytes=images.kept_bytes,
            mount=adapters.mount,
        )

    def _load(self) -> LoadedModel:
        # Whether weights are converted must not depend on what other models take.
        most = float32_bytes(self._shared.settings)
        self._keep_kernels()
        model = load(self._folder, image_max_tokens=self._settings.images.max_tokens, most_float32_bytes=most)
        wire_memory()
        self._say(model.precision.notice(this_device(), most))
        return model

    def _keep_kernels(self) -> None:
        try:
            keep_kernels(kernels_folder(self._shared.settings.server.state_root))
        except OSError as error:
            self._say(f"Kernels are compiled anew at each start: {error}")

    def _measured(self, model: LoadedModel, layers: Layers) -> tuple[PrefillProfile, SequenceCost, list[Any]]:
        """Return the cost of prefill and of a sequence, and caches that hold some tokens."""
        with self._announced_if_slow("Measuring what computing takes ..."):
            estimated = estimated_work(self._settings, model.config)
            profile = measure_work(model.network, layers, estimated=estimated)
            probe = layers.fresh()
            sequence_cost = measure_sequence(model.network, probe, profile.pace)
        self._say(profile.notice)
        return profile, sequence_cost, probe

    def _identity(self, model: LoadedModel, files: WeightFiles) -> bytes:
        digests, in_float32 = known_digests(self._settings, self._say), model.precision.is_converted
        with self._announced_if_slow("Reading the weights once for their digest ..."):
            weights = digests.get(self._folder, files, partial(digest_of, model), in_float32=in_float32)
        return identity(model, weights)

    def _say(self, sentence: str) -> None:
        if sentence:
            self._shared.terminal.say(sentence)

    def _announced_if_slow(self, step: str) -> AbstractContextManager[None]:
        return announced_if_slow(self._shared.terminal.say, step)

    def _image_memory(self, vision: Vision | None) -> ImageMemory:
        """Measure what reading images takes, and limit their tokens to what memory allows."""
        if vision is None:
            return ImageMemory()
        wanted = vision.processor.max_tokens
        memory = image_memory(self._settings, wanted, measure_tower(vision))
        if memory.max_tokens < wanted:
            vision.processor.max_tokens = memory.max_tokens
            self._say(f"Images have at most {memory.max_tokens:,} tokens: memory allows no more.")
        return memory

    def _prompt_cache(
        self, ready: EngineStartup, layers: Layers, probe: list[Any], clock: PlanClock
    ) -> PromptCache:
        """Build the prompt cache. It keeps nothing if it is turned off, or if the layers cannot be stored.

        Args:
            probe: caches that hold some tokens.
        """
        limits = None
        if layers.unknown:
            kinds = ", ".join(layers.unknown)
            self._say(f"This model keeps its state in {kinds}, which cannot be reused: no prompt cache.")
        elif self._settings.cache.is_on:
            limits = cache_limits(self._settings, ready.footprint, ready.admission.usable_bytes)
            self._cache_metrics.budget_bytes = limits.budget_bytes
        cache = PromptCache(
            layers,
            limits=limits,
            page_size=self._settings.cache.page_size,
            metrics=self._cache_metrics,
            identity=ready.identity,
            clock=clock,
        )
        if limits:
            self._shared.disk.attach(cache, KVShape.of(layers, probe))
        return cache


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
    share = memory_budget(shared.settings) - taken
    settings = replace(shared.settings, engine=replace(shared.settings.engine, memory=share))
    loaded = EngineLoader(shared, settings, folder, least_computing).start()
    ready = loaded.startup
    if ready.model.tokenizer.decoding_warning:
        shared.terminal.say(ready.model.tokenizer.decoding_warning)
    database = shared.disk.conversations(transcripts_identity(ready.model, ready.identity).hex())
    try:
        return _runtime(shared, settings, name, loaded, database)
    except BaseException:
        if database:
            database.close()
        shared.disk.remove_listener(loaded.engine.note_disk)
        loaded.engine.stop(_STOP_S)
        raise


def _runtime(
    shared: SharedParts, settings: Settings, name: str, loaded: LoadedEngine, database: Database | None
) -> ModelRuntime:
    ready, tokenizer = loaded.startup, loaded.startup.model.tokenizer
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
            shows_images=settings.log.shows_images,
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


def estimated_needs(name: str, folder: Path, settings: Settings) -> MemoryNeeds:
    """Return the memory that a model will need, from its files; more than there is if they do not tell."""
    try:
        shape = shape_in(name, folder).on(own_machine(settings))
    except ModelError:
        return MemoryNeeds(kept_bytes=sys.maxsize, window_bytes=0, computing_bytes=0)
    longest, budget = min(shape.window, settings.engine.max_kv_size), memory_budget(settings)
    is_fused = own_machine(settings).fuses_attention
    return MemoryNeeds(
        kept_bytes=shape.weights.total + shape.image_bytes(budget),
        window_bytes=shape.cost.bytes_of(longest),
        computing_bytes=shape.computing_bytes(budget, is_fused=is_fused),
    )


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
        batch=settings.engine.batch,
        unbatched_reason=ready.verdict.reason,
        requests=shared.requests,
        engine=metrics.engine,
        cache=metrics.cache,
        disk=shared.disk.metrics,
        database=metrics.database,
        transcripts=metrics.transcripts,
        responses=shared.responses,
        kv=ready.kv,
        limits=settings.engine,
        engine_is_alive=loaded.engine.is_alive,
        image_input_bytes=lambda: vision.processor.input_bytes if vision else 0,
        drain=shared.drain,
    )
