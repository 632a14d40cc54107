"""Translate the settings into the arguments of each part."""

from __future__ import annotations

import math
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from start_llm.cache.disk_folder import DiskLimits
from start_llm.cache.eviction import EvictionLimits
from start_llm.config.paths import DEMO_MODEL, from_root
from start_llm.config.settings import Settings
from start_llm.core.access_policy import AccessPolicy, is_loopback
from start_llm.core.backend_secret import BackendSecret
from start_llm.core.chat import Json, KeptReasoning
from start_llm.core.cross_origin import AllowedOrigins
from start_llm.core.database import DatabaseTable
from start_llm.core.errors import ModelError, SettingsError
from start_llm.core.family import Family
from start_llm.core.sampling import SamplingChoice
from start_llm.core.sequence_cost import SequenceCost
from start_llm.engine.admission import Admission
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.engine.resources import TimeLimits
from start_llm.engine.work import PrefillMemoryCost, TowerMemoryCost
from start_llm.formats import registry
from start_llm.images.checking import ImageChecker, ImageLimits
from start_llm.images.door import ImageDoor
from start_llm.images.fetching import ImageFetcher
from start_llm.models.architecture import completed
from start_llm.models.device import this_device
from start_llm.models.download import name_of, resolve
from start_llm.models.downloads import Downloads
from start_llm.models.fit import activation_bytes
from start_llm.models.float32 import most_float32_bytes
from start_llm.models.footprint import Footprint
from start_llm.models.hub import Hub
from start_llm.models.image_costs import COMPUTING_SHARE, kept_image_bytes
from start_llm.models.known_digests import KnownDigests
from start_llm.models.layer_costs import text_config
from start_llm.models.library import Library, Place, models_in, places
from start_llm.models.loader import LoadedModel
from start_llm.models.machines import Machine, this_machine
from start_llm.models.model_dir import chosen_model
from start_llm.models.shelf import Shelf
from start_llm.models.tokenizer import Tokenizer
from start_llm.models.well_known import DEFAULT_APPLE_MODEL
from start_llm.prompt.canonical import canonical_reply
from start_llm.prompt.client_marks import ClientMarks, tokens_of_client_text
from start_llm.prompt.prepare import Preparer, PromptPolicy
from start_llm.prompt.samples import rendered_samples
from start_llm.prompt.shorten import is_shortened
from start_llm.protocols.responses.store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.protocols.seal_key import kept_key
from start_llm.proxy.config import ProxyConfig
from start_llm.server.listener import ServerLimits
from start_llm.service import MemoryWindow, ModelTraits
from start_llm.telemetry.metrics import CacheMetrics, TranscriptMetrics
from start_llm.telemetry.trace import Trace, start_trace
from start_llm.transcripts.guard import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore
from start_llm.transcripts.recent import RecentConversations
from start_llm.transcripts.store import TranscriptLimits, TranscriptStore
from start_llm.transcripts.turn import Transcripts

_MAX_TRANSCRIPT_BYTES = 128 * 2**20
_MAX_REASONING_BYTES = 32 * 2**20
_SMALLEST_PAGE = 256
_LONG_CONTEXT = 65_536
_SINGLE = 4
"""Bytes of a float32 number."""
_HEADROOM = 0.05
"""Share of the memory budget for what is not counted: allocators, sockets, texts."""


type TableMaker = Callable[[str], DatabaseTable | None]
"""Returns the table of this name in which a store outlives the server; None if none does."""


def no_table(_: str) -> None:
    """Let a store end with the server."""


def kept_reasoning(settings: Settings) -> KeptReasoning:
    """Return which earlier reasoning stays in the prompt.

    With CACHE_DRIFT_POLICY=exact, "true" becomes "template": the prompt then shows only what a fresh
    rendering shows.
    """
    is_exact = settings.drift == "exact" and settings.kept_reasoning == "true"
    return "template" if is_exact else settings.kept_reasoning


def make_trace(settings: Settings, cache: CacheMetrics, say: Callable[[str], None]) -> Trace | None:
    """Return the trace of requests; None if it is off."""
    root = from_root(settings.log_root)
    return start_trace(root, cache, say, with_prompts=settings.traces_prompts) if settings.traces else None


def make_seal(settings: Settings, say: Callable[[str], None]) -> Seal:
    """Return the seal for reasoning that clients send back.

    Its key is kept in a file, so that sealed reasoning opens after a restart. If the file cannot be used, the
    user is told, and the key is for this process alone.
    """
    path = from_root(settings.state_root) / "seal.key"
    try:
        return Seal(kept_key(path))
    except OSError as error:
        say(f"The key of sealed reasoning cannot be kept ({error}). This one is for this process alone.")
        return Seal(secrets.token_bytes(KEY_BYTES))


def known_digests(settings: Settings, say: Callable[[str], None]) -> KnownDigests:
    return KnownDigests(from_root(settings.state_root) / "weights.json", say)


def response_store(settings: Settings, table: TableMaker) -> ResponseStore:
    return ResponseStore(settings.response_bytes, settings.response_kept_s, table=table("responses"))


def image_door(settings: Settings) -> ImageDoor:
    """Return what takes in the images of requests."""
    limits = ImageLimits(
        max_bytes=settings.image_bytes, max_pixels=settings.image_pixels, max_count=settings.image_count
    )
    fetcher = ImageFetcher(settings.image_bytes) if settings.fetches_images else None
    return ImageDoor(ImageChecker(limits), fetcher)


def prompt_policy(settings: Settings) -> PromptPolicy:
    return PromptPolicy(
        thinking=settings.thinking,
        kept_reasoning=kept_reasoning(settings),
        with_rules=settings.canonicalizes,
        drift=settings.drift,
        checks_keys=settings.checks_keys,
        shortens_writes=settings.shortens_writes,
    )


def make_preparer(settings: Settings, model: LoadedModel, family: Family, known: Transcripts) -> Preparer:
    return Preparer(
        model.tokenizer,
        family,
        vision=model.vision.processor if model.vision else None,
        policy=prompt_policy(settings),
        restore_reasoning=known.restore_reasoning,
    )


def transcripts(
    settings: Settings, tokenizer: Tokenizer, family: Family, table: TableMaker = no_table
) -> Transcripts:
    """Return transcripts with what the tables have of them."""
    metrics = TranscriptMetrics()
    limits = TranscriptLimits(max_bytes=_MAX_TRANSCRIPT_BYTES, cache_ttl_s=settings.transcript_idle_s)
    return Transcripts(
        store=TranscriptStore(limits, metrics=metrics, table=table("variants")),
        reasoning_texts=ReasoningStore(_MAX_REASONING_BYTES, table=table("reasoning")),
        seen=PrefixHistory(table=table("prefixes")),
        names=ConversationNames(table=table("names")),
        recent=RecentConversations(),
        metrics=metrics,
        canonical_reply=canonical_reply,
        token_bytes=tokenizer.token_bytes,
        encode=partial(tokens_of_client_text, tokenizer, ClientMarks.of(tokenizer, family)),
        kept_reasoning=kept_reasoning(settings),
        takes_proof=settings.drift == "note",
        is_changed=is_shortened if settings.shortens_writes else lambda _: False,
    )


def backend_secret(settings: Settings) -> BackendSecret:
    """Return what the server and its proxy alone know: new at each start, unless it is set."""
    return BackendSecret(settings.backend_secret) if settings.backend_secret else BackendSecret.random()


def access_policy(settings: Settings, proxy_key: str) -> AccessPolicy:
    """Return the access policy of the server's own port.

    Args:
        proxy_key: the proxy's key, which is accepted beside the user's keys.

    Raises:
        SettingsError: the address is not loopback, and there is no key.
    """
    if not (settings.keys or is_loopback(settings.mlx_host)):
        raise SettingsError(
            f"MLX_HOST={settings.mlx_host!r} is not loopback: others on the network could use the model. Set "
            "MLX_API_KEY to a key that clients have to send, or leave MLX_HOST at 127.0.0.1."
        )
    keys = (*settings.keys, proxy_key) if settings.keys else ()
    return AccessPolicy(keys, _names(settings), AllowedOrigins(settings.origins))


def check_ports(settings: Settings) -> None:
    """Refuse one port for both servers.

    Raises:
        SettingsError: they would have the same.
    """
    if settings.proxy and settings.mlx_port and settings.mlx_port == settings.proxy_port:
        raise SettingsError(
            f"MLX_PORT and PROXY_PORT are both {settings.mlx_port}. Give one of them another number, or "
            "switch the proxy off with --no-proxy."
        )


def _names(settings: Settings) -> frozenset[str]:
    return frozenset(name.lower() for name in (*settings.hosts, settings.mlx_host))


def proxy_config(
    settings: Settings, backend: str, model: str, window: int, secret: BackendSecret, *, sees: bool
) -> ProxyConfig:
    return ProxyConfig(
        sees=sees,
        port=settings.proxy_port,
        backend=backend,
        model=settings.proxy_model_id or f"openai/{model}",
        window=window,
        keys=settings.proxy_keys or settings.keys,
        secret=secret,
        python=settings.proxy_python or sys.executable,
        hosts=settings.hosts,
        origins=settings.origins,
        max_body_bytes=settings.max_body_bytes,
    )


def page_size(settings: Settings) -> int:
    """Return the tokens of a page: the smallest multiple of the block size that is at least 256."""
    return settings.block_size * math.ceil(_SMALLEST_PAGE / settings.block_size)


def model_places(settings: Settings, hub: Hub) -> tuple[Place, ...]:
    """Return the folders in which models are.

    Raises:
        SettingsError: MODEL_DIR is no folder.
    """
    return places(DEMO_MODEL.parent, _model_dir(settings), hub)


def _model_dir(settings: Settings) -> Path | None:
    return _folder("MODEL_DIR", settings.model_dir)


def adapter_dir(settings: Settings) -> Path | None:
    """Return the folder below which adapters are.

    Raises:
        SettingsError: ADAPTER_DIR is no folder.
    """
    return _folder("ADAPTER_DIR", settings.adapter_dir)


def _folder(variable: str, path: str | None) -> Path | None:
    folder = from_root(path) if path else None
    if folder and not folder.is_dir():
        raise SettingsError(f"{variable}={path!r}: no such folder.")
    return folder


def make_shelf(settings: Settings, loaded: Callable[[], Sequence[tuple[str, Path]]]) -> Shelf:
    """Return the library for the server's endpoints.

    Args:
        loaded: returns names and folders of the loaded models, first of the one that answers by default.
    """
    hub, machine = Hub(), own_machine(settings)
    library = Library(
        model_places(settings, hub), machine, serving=lambda: [folder for _, folder in loaded()]
    )
    return Shelf(library, machine, hub, Downloads(hub), loaded)


def own_machine(settings: Settings) -> Machine:
    return this_machine(this_device(), memory_budget(settings), float32_bytes(settings))


def float32_bytes(settings: Settings) -> int:
    """Return the bytes up to which weights are converted to float32; 0 if they never are.

    Args:
        settings: with the memory of all models together.
    """
    if settings.cpu_dequantize == "off":
        return 0
    return most_float32_bytes(this_device(), memory_budget(settings))


def memory_budget(settings: Settings) -> int:
    """Return the bytes that weights, caches and computing may take together."""
    return (
        settings.memory
        if isinstance(settings.memory, int)
        else int(settings.memory * this_device().usable_bytes)
    )


def usable_share(budget: int) -> int:
    """Return the bytes of a memory budget for what is counted."""
    return int(budget * (1 - _HEADROOM))


def work_reserve(settings: Settings, work: PrefillMemoryCost) -> int:
    """Return the bytes that stay free for the work memory of prefill.

    This is the need of a longest chunk after 65,536 tokens of context, limited to 8 % of the budget, and at
    least the need of that chunk without context.
    """
    most = int(COMPUTING_SHARE * memory_budget(settings))
    return max(work.bytes_of(LONGEST_CHUNK, 0), min(work.bytes_of(LONGEST_CHUNK, _LONG_CONTEXT), most))


def estimated_work(settings: Settings, config: Mapping[str, Json]) -> PrefillMemoryCost:
    """Return the memory that prefill takes, from the model's config alone, if its numbers are float32.

    Where attention is not fused, the scores of all heads are there twice.
    """
    text = text_config(completed(config))
    heads = 0 if own_machine(settings).fuses_attention else int(text.get("num_attention_heads") or 1)
    return PrefillMemoryCost(activation_bytes(text, _SINGLE), pair_bytes=2 * _SINGLE * heads)


@dataclass(frozen=True, slots=True)
class ImageMemory:
    """The memory for reading images.

    Attributes:
        tower_bytes: for a run of the vision tower.
        kept_bytes: for images that are kept as the tower has seen them.
        max_tokens: most tokens of one image.
    """

    tower_bytes: int = 0
    kept_bytes: int = 0
    max_tokens: int = 0


def image_memory(settings: Settings, wanted: int, tower: TowerMemoryCost) -> ImageMemory:
    """Return the memory for reading images, for which one image may have fewer tokens than wanted.

    Then it is a power of two, so that two starts, which measure slightly different figures, agree on it.
    """
    budget = memory_budget(settings)
    affordable = tower.longest(int(COMPUTING_SHARE * budget))
    tokens = wanted if wanted <= affordable else 1 << (affordable.bit_length() - 1)
    return ImageMemory(tower.bytes_of(tokens), kept_image_bytes(budget), tokens)


def admission(settings: Settings, weights_bytes: int, row: SequenceCost, computing: int) -> Admission:
    """Return the admission control for sequences.

    Args:
        row: the memory that a sequence takes.
        computing: bytes that stay free for computing.

    Raises:
        ModelError: there is not enough memory for a single token.
    """
    budget = memory_budget(settings)
    usable = usable_share(budget) - weights_bytes - computing
    found = Admission(usable, row)
    if found.longest < 1:
        raise ModelError(
            f"MEMORY_BUDGET is {budget:,} bytes. The weights need {weights_bytes:,} of them and computing "
            f"{computing:,}, which leaves no room for a prompt. Choose a smaller model, or a larger budget."
        )
    return found


def cache_limits(settings: Settings, footprint: Footprint, usable_bytes: int) -> EvictionLimits:
    """Return the cache's limits. Its budget is at most the memory for all sequences together."""
    return EvictionLimits(
        budget_bytes=min(cache_budget(settings, footprint), usable_bytes),
        max_conversations=settings.max_conversations,
        cache_ttl_s=settings.cache_ttl_s,
    )


_NAMED_DISK_BYTES, _USUAL_DISK_BYTES, _USUAL_DISK_SHARE = 100 * 10**9, 20 * 10**9, 0.1


def disk_limits(settings: Settings) -> DiskLimits:
    """Return the limits of the disk tier. A user who did not ask for it gets a smaller one."""
    a_day = settings.ssd_max_write_per_day
    if settings.ssd_max_size is not None:
        return DiskLimits(max_size=settings.ssd_max_size, max_write_per_day=a_day)
    if settings.ssd_folder:
        return DiskLimits(max_size=_NAMED_DISK_BYTES, max_write_per_day=a_day)
    return DiskLimits(max_size=_USUAL_DISK_BYTES, max_share=_USUAL_DISK_SHARE, max_write_per_day=a_day)


def cache_budget(settings: Settings, footprint: Footprint) -> int:
    """Return the bytes of the prompt cache: a fixed size, or a share of the memory that the weights leave.

    A size of 0 is no cap: all of that memory.
    """
    wanted = settings.cache_bytes or 1.0
    if isinstance(wanted, int):
        return wanted
    return max(int(wanted * (memory_budget(settings) - footprint.weights_bytes)), 0)


def model_name(settings: Settings) -> str:
    """Return the model to serve: the user's choice, else the default of this platform.

    Raises:
        ModelError: MODEL_DIR does not say which.
        SettingsError: MODEL_DIR is no folder.
    """
    if folder := _model_dir(settings):
        return chosen_model(folder, settings.model_path)
    if settings.model_path:
        return settings.model_path
    return DEFAULT_APPLE_MODEL if is_apple_silicon() else str(DEMO_MODEL)


def model_folders(settings: Settings) -> dict[str, Path]:
    """Return the folders of the models that requests can name, by id: those of MODEL_DIR."""
    folder = _model_dir(settings)
    return models_in(folder) if folder else {}


def more_models(settings: Settings, known: Mapping[str, Path]) -> dict[str, Path]:
    """Return the folders of all models by id, those of MORE_MODELS added. What is missing is downloaded.

    Args:
        known: the folders of all other models.

    Raises:
        ModelError: one is neither a folder nor a repository, or its download failed.
        SettingsError: two models would have the same id.
    """
    found = dict(known)
    for folder in map(resolve, settings.more_models):
        if found.setdefault(name_of(folder), folder) != folder:
            raise SettingsError(
                f"MORE_MODELS: two models are called {name_of(folder)!r}, and requests could not tell which "
                "they name. Rename the folder of one."
            )
    return found


def is_apple_silicon() -> bool:
    return sys.platform == "darwin" and platform.machine() == "arm64"


def model_family(settings: Settings, config: Mapping[str, Json], tokenizer: Tokenizer) -> Family:
    """Return the model's family: the user's choice, else the one that its files show."""
    if settings.family:
        return registry.family_by_name(settings.family)
    return registry.detect(
        config, tokenizer.chat_template, tokenizer.added_tokens, rendered_samples(tokenizer)
    )


def time_limits(settings: Settings) -> TimeLimits:
    return TimeLimits(
        chunk_s=settings.chunk_s, preempt_after_s=settings.preempt_after_s, deadline_s=settings.deadline_s
    )


def model_traits(
    settings: Settings, model: LoadedModel, footprint: Footprint, family: Family, admitted: Admission
) -> ModelTraits:
    """Return the facts about the model that the service needs, within the limits of the settings."""
    own_window = footprint.context_window
    return ModelTraits(
        vocabulary=model.vocabulary,
        family=family,
        context_window=min(settings.max_kv_size, own_window or settings.max_kv_size),
        memory=MemoryWindow(tokens=admitted.longest, budget_bytes=memory_budget(settings)),
        default_max_tokens=settings.max_tokens,
        sampling_defaults=(environment_sampling(settings), model.sampling),
        repetition=settings.repetition,
    )


def environment_sampling(settings: Settings) -> SamplingChoice:
    """Return the sampling values that the user's `DEFAULT_*` and `HLG_*` variables set."""
    return SamplingChoice(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        hlg=settings.hlg,
        hlg_width=settings.hlg_width,
        hlg_shoulder=settings.hlg_shoulder,
        hlg_toe=settings.hlg_toe,
        hlg_pivot_offset=settings.hlg_pivot_offset,
        repetition_penalty=settings.repetition_penalty,
        repetition_context_size=settings.repetition_context_size,
    )


def server_limits(settings: Settings) -> ServerLimits:
    return ServerLimits(
        max_connections=settings.max_connections,
        max_body_bytes=settings.max_body_bytes,
        idle_s=settings.idle_s,
        header_s=settings.header_s,
        body_s=settings.body_s,
        write_s=settings.write_s,
        keep_alive_s=settings.keep_alive_s,
        load_wait_s=settings.load_wait_s,
    )
