"""Loads a model on the engine thread: measures it, tries it, and builds what its engine runs on."""

import json
import time
from concurrent.futures import Future
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
from start_llm.core.model_card import KVAtRest, ModelCard
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission, shortage
from start_llm.engine.cost import measure_sequence
from start_llm.engine.draft_gain import DraftGain
from start_llm.engine.draft_index import INDEX_TOKEN_BYTES
from start_llm.engine.earlier_texts import EARLIER_BYTES
from start_llm.engine.embedding import LONGEST_TEXT, Embedder
from start_llm.engine.engine import Engine
from start_llm.engine.engine_thread import EngineThread
from start_llm.engine.followers import Followers, as_sampled
from start_llm.engine.pace import Pace
from start_llm.engine.pass_times import measure_passes
from start_llm.engine.resources import EngineResources
from start_llm.engine.self_test import BatchVerdict, check_batching
from start_llm.engine.start_measurements import (
    PrefillProfile,
    TowerMemoryCost,
    measure_tower,
    measure_work,
)
from start_llm.engine.step_plan import PlanClock
from start_llm.hosting.disk_storage import DiskStorage
from start_llm.hosting.model_memory import MemoryNeeds
from start_llm.models.adapter_loader import Adapters
from start_llm.models.device import keep_kernels, this_device, wire_memory
from start_llm.models.footprint import context_window, layer_counts, model_type, weights_bytes
from start_llm.models.identity import digest_of, identity
from start_llm.models.known_digests import KnownDigests, WeightFiles, weight_files_of
from start_llm.models.loader import LoadedModel, load
from start_llm.models.pooling import pooling_in
from start_llm.models.rank_group import RankGroup
from start_llm.models.vision import Vision
from start_llm.telemetry.metrics import CacheMetrics, EngineMetrics
from start_llm.telemetry.terminal import Terminal, announced_if_slow
from start_llm.wiring.from_settings import known_digests, model_family
from start_llm.wiring.kv_bits import quantize_pages
from start_llm.wiring.memory_plan import (
    ImageMemory,
    admission,
    cache_limits,
    estimated_work,
    float32_bytes,
    image_memory,
    memory_budget,
    work_reserve,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartup:
    """A model that the engine thread has loaded.

    Attributes:
        needs: without adapters.
    """

    model: LoadedModel
    card: ModelCard
    needs: MemoryNeeds
    identity: bytes
    adapters: Adapters
    embedder: Embedder | None
    engine_metrics: EngineMetrics
    cache_metrics: CacheMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderParts:
    """What a loader needs of the parts that models share.

    Attributes:
        thread: computes for all of them.
        ranks: that compute the model together with this process; None: it computes alone.
        followers: those of them that do what this one decides.
    """

    settings: Settings
    terminal: Terminal
    thread: EngineThread
    disk: DiskStorage
    ranks: RankGroup | None = None
    followers: Followers = field(default_factory=Followers)


class EngineLoader:
    """Loads a model on the engine thread, and measures it.

    Args:
        settings: with the memory that this model may use.
        least_computing: bytes that stay free for computing in any case, because another model needs them.
    """

    def __init__(
        self, shared: LoaderParts, settings: Settings, name: str, folder: Path, least_computing: int
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._name = name
        self._folder = folder
        self._ranks = shared.ranks
        self._clock = shared.ranks.clock if shared.ranks else time.perf_counter
        self._least_computing = least_computing
        self._engine_metrics, self._cache_metrics = EngineMetrics(), CacheMetrics()
        self._startup: Future[EngineStartup] = Future()

    def start(self) -> tuple[Engine, EngineStartup]:
        """Load the model. Its engine takes requests from then on.

        Raises:
            StartLLMError: the model cannot be served.
        """
        most, thread = self._settings.engine.max_waiting, self._shared.thread
        engine = Engine(self.assemble, self._engine_metrics, max_waiting=most, thread=thread)
        engine.start()
        return engine, self._startup.result()

    def assemble(self) -> EngineResources:
        """Load and measure the model on this thread, and return what its engine runs on.

        Raises:
            StartLLMError: the model cannot be served.
        """
        settings, files = self._settings, weight_files_of(self._folder)
        model = self._load()
        layers = Layers(model.network, room=settings.cache.initial_blocks * settings.cache.page_size)
        profile, cost, probe = self._measured(model, layers)
        for line in quantize_pages(settings, self._folder, model.config, layers, probe):
            self._say(line)
        adapters, images = Adapters(model.network), self._image_memory(model.vision)
        embedder = self._embedder(model, adapters)
        vector_bytes = cost.bytes_of(LONGEST_TEXT) if embedder else 0
        computing = max(work_reserve(settings, profile.cost), images.tower_bytes, vector_bytes)
        gain = self._gain(model, layers, profile.pace)
        drafts = EARLIER_BYTES if gain else 0
        kept_free = max(computing, self._least_computing) + images.kept_bytes + drafts
        running = replace(cost, token_bytes=cost.token_bytes + INDEX_TOKEN_BYTES) if gain else cost
        admitted = admission(settings, weights_bytes(model), running, kept_free)
        verdict = self._batching(model, layers, profile.pace)
        card = self._card(model, admitted, verdict, layers.kv_at_rest(probe))
        startup = EngineStartup(
            model=model,
            card=card,
            needs=MemoryNeeds(
                kept_bytes=card.weights_bytes + images.kept_bytes + drafts,
                window_bytes=cost.bytes_of(card.context_window),
                computing_bytes=computing,
            ),
            identity=self._identity(model, files),
            adapters=adapters,
            embedder=embedder,
            engine_metrics=self._engine_metrics,
            cache_metrics=self._cache_metrics,
        )
        self._startup.set_result(startup)
        clock = PlanClock()
        cache = self._prompt_cache(startup, layers, probe, clock)
        resources = self._resources(startup, admitted, profile, cache, clock, gain)
        return replace(resources, batches_prefill=verdict.prefills, image_bytes=images.kept_bytes)

    def _card(
        self, model: LoadedModel, admitted: Admission, verdict: BatchVerdict, kv: KVAtRest
    ) -> ModelCard:
        settings = self._settings
        return ModelCard(
            id=self._name,
            model_type=model_type(model.config),
            family=model_family(settings, model.config, model.tokenizer),
            vocabulary=model.vocabulary,
            own_window=min(
                settings.engine.max_kv_size, context_window(model.config) or settings.engine.max_kv_size
            ),
            memory_window=admitted.longest,
            weights_bytes=weights_bytes(model),
            budget_bytes=memory_budget(settings),
            usable_bytes=admitted.usable_bytes,
            layers=layer_counts(model.network, label_of),
            kv=kv,
            sees=model.vision is not None,
            unbatched_reason=verdict.reason,
        )

    def _resources(
        self,
        startup: EngineStartup,
        admitted: Admission,
        profile: PrefillProfile,
        cache: PromptCache,
        clock: PlanClock,
        gain: DraftGain | None,
    ) -> EngineResources:
        settings, model = self._settings, startup.model
        budget_bytes = memory_budget(self._shared.settings)
        return EngineResources(
            cache=cache,
            clock=clock,
            time_limits=settings.engine,
            admission=admitted,
            measured=profile.chunks,
            longest_chunk=partial(profile.cost.longest, work_reserve(settings, profile.cost)),
            shortage=partial(shortage, budget_bytes, this_device().lacking_bytes),
            network=model.network,
            token_bytes=model.tokenizer.token_bytes,
            eos_token_ids=model.tokenizer.eos_token_ids,
            max_sequences=settings.engine.batch,
            batches=not startup.card.unbatched_reason,
            vision=model.vision,
            mount=startup.adapters.mount,
            gain=gain,
            agree=self._ranks.agree if self._ranks else as_sampled,
            followers=self._shared.followers,
        )

    def _load(self) -> LoadedModel:
        # Whether weights are converted must not depend on what other models take.
        most = float32_bytes(self._shared.settings)
        self._keep_kernels()
        model = load(
            self._folder,
            image_max_tokens=self._settings.images.max_tokens,
            most_float32_bytes=most,
            ranks=self._ranks,
        )
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
            profile = measure_work(model.network, layers, self._clock, estimated=estimated)
            probe = layers.fresh()
            sequence_cost = measure_sequence(model.network, probe, profile.pace)
        self._say(profile.notice)
        return profile, sequence_cost, probe

    def _batching(self, model: LoadedModel, layers: Layers, pace: Pace) -> BatchVerdict:
        shifts = model.vision is not None and model.vision.moves_positions
        network = self._ranks.agreeing(model.network) if self._ranks else model.network
        with self._announced_if_slow("Trying several sequences at once ..."):
            return check_batching(
                network, layers.fresh, self._settings.engine.batch, shifts=shifts, pace=pace
            )

    def _gain(self, model: LoadedModel, layers: Layers, pace: Pace) -> DraftGain | None:
        if self._settings.engine.speculation == "off":
            return None
        times = measure_passes(model.network, layers.fresh(), pace, self._clock)
        return DraftGain(times, self._engine_metrics.drafts) if times else None

    def _embedder(self, model: LoadedModel, adapters: Adapters) -> Embedder | None:
        pooling = None if self._ranks else pooling_in(self._folder, model.config)
        return Embedder(model.network, pooling, adapters.mount) if pooling else None

    def _identity(self, model: LoadedModel, files: WeightFiles) -> bytes:
        if self._ranks:
            return self._identity_of_shard(model, files, self._ranks)
        return identity(model, self._digest(model, files, known_digests(self._settings, self._say)))

    def _digest(
        self, model: LoadedModel, files: WeightFiles, digests: KnownDigests, shard: str = ""
    ) -> bytes:
        compute, in_float32 = partial(digest_of, model), model.precision.is_converted
        with self._announced_if_slow("Reading the weights once for their digest ..."):
            return digests.get(self._folder, files, compute, in_float32=in_float32, shard=shard)

    def _identity_of_shard(self, model: LoadedModel, files: WeightFiles, ranks: RankGroup) -> bytes:
        """Return the identity of a shard. Its KV depends on the weights of all ranks, whose results each of
        them computes with, and it is of use to this rank alone.

        Raises:
            ModelError: the ranks have loaded different models.
        """
        whole = identity(model, json.dumps([[name, size] for name, size, *_ in files]).encode())
        for rank, other in enumerate(ranks.gathered(whole)):
            if other != whole:
                raise ModelError(
                    f"What {ranks.name} has in {self._folder} is not the model of rank {rank}, or it has "
                    "other versions of mlx and mlx-lm. All machines need the same files and libraries."
                )
        digests = known_digests(self._settings, self._say, ranks.rank)
        own = self._digest(model, files, digests, f" as {ranks.name}")
        return identity(model, b"".join((*ranks.gathered(own), ranks.name.encode())))

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
        tower = measure_tower(vision) if vision.runs_tower else TowerMemoryCost()
        memory = image_memory(self._settings, wanted, tower)
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
            limits = cache_limits(self._settings, ready.card.weights_bytes, ready.card.usable_bytes)
            self._cache_metrics.budget_bytes = limits.budget_bytes
        cache = PromptCache(
            layers,
            limits=limits,
            page_size=self._settings.cache.page_size,
            metrics=self._cache_metrics,
            identity=ready.identity,
            clock=clock,
        )
        if limits and self._has_disk_everywhere():
            shape, is_shared = KVShape.of(layers, probe), self._ranks is not None
            self._shared.disk.attach(cache, shape, self._shared.followers, is_shared=is_shared)
        return cache

    def _has_disk_everywhere(self) -> bool:
        """Return whether all ranks can keep pages on a disk: what one of them lacks is lost to all."""
        is_on = self._shared.disk.is_on
        if self._ranks is None or self._ranks.least(int(is_on)):
            return is_on
        if is_on:
            self._say("Prompts are not kept on the disk: another machine has no disk tier.")
        return False
