"""What the settings mean to each part."""

from __future__ import annotations

import math
import platform
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from start_llm.cache.eviction import Limits
from start_llm.core.chat import Json, KeptThoughts
from start_llm.core.door import Door, is_loopback
from start_llm.core.errors import ModelError, SettingsError
from start_llm.core.family import Family
from start_llm.core.sampling import SamplingChoice
from start_llm.engine.admission import Admission
from start_llm.engine.cost import RowCost
from start_llm.engine.engine import EngineConfig
from start_llm.engine.machinery import Pace
from start_llm.engine.pacing import LONGEST_CHUNK
from start_llm.engine.work import WorkCost
from start_llm.formats import registry
from start_llm.models.device import this_device
from start_llm.models.footprint import Footprint
from start_llm.models.loader import LoadedModel
from start_llm.models.tokenizer import Tokenizer
from start_llm.places import DEMO_MODEL, ROOT
from start_llm.prompt.canonical import canonical_reply
from start_llm.prompt.prepare import PromptPolicy
from start_llm.prompt.samples import rendered_samples
from start_llm.prompt.shorten import is_shortened
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.protocols.seal_key import kept_key
from start_llm.proxy.config import ProxyConfig
from start_llm.server.listener import ServerLimits
from start_llm.service import MemoryWindow, ModelTraits
from start_llm.settings import Settings
from start_llm.telemetry.metrics import CacheMetrics, TranscriptMetrics
from start_llm.telemetry.trace import Trace, start_trace
from start_llm.transcripts.guard import Names
from start_llm.transcripts.recent import RecentConversations
from start_llm.transcripts.seen import SeenConversations
from start_llm.transcripts.store import Limits as TranscriptLimits
from start_llm.transcripts.store import TranscriptStore
from start_llm.transcripts.thoughts import ThoughtStore
from start_llm.transcripts.turn import Transcripts

_APPLE_MODEL = "lmstudio-community/GLM-4.7-Flash-MLX-4bit"
_MOST_TRANSCRIPT_BYTES = 128 * 2**20
_MOST_THOUGHT_BYTES = 32 * 2**20
_SMALLEST_PAGE = 256
_WORK_SHARE = 0.08
_LONG_CONTEXT = 65_536
_HEADROOM = 0.05
"""Share of the memory for what nobody counts: allocators, sockets, texts."""


def kept_thoughts(settings: Settings) -> KeptThoughts:
    """Without notes nothing is shown that a fresh rendering does not show."""
    is_exact = settings.drift == "exact" and settings.kept_thoughts == "true"
    return "template" if is_exact else settings.kept_thoughts


def make_trace(settings: Settings, cache: CacheMetrics, say: Callable[[str], None]) -> Trace | None:
    """What is written of requests; None if nothing is to be."""
    root = ROOT / Path(settings.log_root).expanduser()
    return start_trace(root, cache, say, with_prompts=settings.traces_prompts) if settings.traces else None


def make_seal(settings: Settings, say: Callable[[str], None]) -> Seal:
    """What opens the thoughts that clients send back, after a restart too if its key can be kept."""
    path = ROOT / Path(settings.state_root).expanduser() / "seal.key"
    try:
        return Seal(kept_key(path))
    except OSError as error:
        say(f"The key of sealed thoughts cannot be kept ({error}). This one is for this process alone.")
        return Seal(secrets.token_bytes(KEY_BYTES))


def response_store(settings: Settings) -> ResponseStore:
    return ResponseStore(settings.response_bytes, settings.response_kept_s)


def prompt_policy(settings: Settings) -> PromptPolicy:
    return PromptPolicy(
        thinking=settings.thinking,
        kept_thoughts=kept_thoughts(settings),
        with_rules=settings.canonicalizes,
        drift=settings.drift,
        checks_keys=settings.checks_keys,
        shortens_writes=settings.shortens_writes,
    )


def transcripts(settings: Settings, tokenizer: Tokenizer) -> Transcripts:
    """With nothing in them."""
    metrics = TranscriptMetrics()
    limits = TranscriptLimits(most_bytes=_MOST_TRANSCRIPT_BYTES, unused_s=settings.transcript_idle_s)
    return Transcripts(
        store=TranscriptStore(limits, metrics=metrics),
        thoughts=ThoughtStore(_MOST_THOUGHT_BYTES),
        seen=SeenConversations(),
        names=Names(),
        recent=RecentConversations(),
        metrics=metrics,
        canonical_reply=canonical_reply,
        token_bytes=tokenizer.token_bytes,
        encode=lambda text: tokenizer.encode(text, as_document=False),
        kept_thoughts=kept_thoughts(settings),
        takes_proof=settings.drift == "note",
        is_changed=is_shortened if settings.shortens_writes else lambda _: False,
    )


def door(settings: Settings, proxy_key: str) -> Door:
    """Who may talk to the server's own port.

    Args:
        proxy_key: that of the proxy, which may always.

    Raises:
        SettingsError: it would be open to the network without any key.
    """
    if not (settings.keys or is_loopback(settings.mlx_host)):
        raise SettingsError(
            f"MLX_HOST={settings.mlx_host!r} is not loopback: others on the network could use the model. Set "
            "MLX_API_KEY to a key that clients have to send, or leave MLX_HOST at 127.0.0.1."
        )
    keys = (*settings.keys, proxy_key) if settings.keys else ()
    return Door(keys, _names(settings))


def _names(settings: Settings) -> frozenset[str]:
    return frozenset(name.lower() for name in (*settings.hosts, settings.mlx_host))


def proxy_config(settings: Settings, backend: str, model: str, window: int, backend_key: str) -> ProxyConfig:
    return ProxyConfig(
        port=settings.proxy_port,
        backend=backend,
        model=settings.proxy_model_id or f"openai/{model}",
        window=window,
        keys=settings.proxy_keys or settings.keys,
        backend_key=backend_key,
        python=settings.proxy_python or sys.executable,
        hosts=settings.hosts,
        most_body_bytes=settings.most_body_bytes,
    )


def page_size(settings: Settings) -> int:
    """Tokens of a page: as many blocks as make at least 256."""
    return settings.block_size * math.ceil(_SMALLEST_PAGE / settings.block_size)


def memory_budget(settings: Settings) -> int:
    """Bytes for everything."""
    return (
        settings.memory
        if isinstance(settings.memory, int)
        else int(settings.memory * this_device().usable_bytes)
    )


def work_reserve(settings: Settings, work: WorkCost) -> int:
    """Bytes kept free for computing: a longest chunk's, behind a long context if that is affordable."""
    most = int(_WORK_SHARE * memory_budget(settings))
    return max(work.bytes_of(LONGEST_CHUNK, 0), min(work.bytes_of(LONGEST_CHUNK, _LONG_CONTEXT), most))


def admission(settings: Settings, weights_bytes: int, row: RowCost, computing: int) -> Admission:
    """Who is let in.

    Args:
        row: what a sequence takes.
        computing: bytes that are kept free for it.

    Raises:
        ModelError: there is no memory for a single token.
    """
    budget = memory_budget(settings)
    usable = int(budget * (1 - _HEADROOM)) - weights_bytes - computing
    found = Admission(usable, row)
    if found.longest < 1:
        raise ModelError(
            f"MEMORY_BUDGET is {budget:,} bytes. The weights need {weights_bytes:,} of them and computing "
            f"{computing:,}, which leaves no room for a prompt. Choose a smaller model, or a larger budget."
        )
    return found


def cache_limits(settings: Settings, footprint: Footprint, usable_bytes: int) -> Limits:
    """The cache has no more than what there is for all rows together."""
    return Limits(
        budget_bytes=min(cache_budget(settings, footprint), usable_bytes),
        most_ends=settings.most_ends,
        unused_s=settings.unused_s,
    )


def cache_budget(settings: Settings, footprint: Footprint) -> int:
    """Bytes of the prompt cache: a number, or a share of the memory that the weights leave."""
    wanted = settings.cache_bytes
    if isinstance(wanted, int):
        return wanted
    return max(int(wanted * (memory_budget(settings) - footprint.weights_bytes)), 0)


def model_name(settings: Settings) -> str:
    """The model to serve: what the user named, else the default of this platform."""
    if settings.model_path:
        return settings.model_path
    is_apple_silicon = sys.platform == "darwin" and platform.machine() == "arm64"
    return _APPLE_MODEL if is_apple_silicon else str(DEMO_MODEL)


def engine_config(settings: Settings) -> EngineConfig:
    return EngineConfig(most_waiting=settings.most_waiting)


def model_family(settings: Settings, config: Mapping[str, Json], tokenizer: Tokenizer) -> Family:
    """The form of the model's text: what the user named, else what its files show."""
    if settings.family:
        return registry.named(settings.family)
    return registry.detect(
        config, tokenizer.chat_template, tokenizer.added_tokens, rendered_samples(tokenizer)
    )


def pace(settings: Settings) -> Pace:
    return Pace(chunk_s=settings.chunk_s, turn_s=settings.turn_s, deadline_s=settings.deadline_s)


def model_traits(
    settings: Settings, model: LoadedModel, footprint: Footprint, family: Family, admitted: Admission
) -> ModelTraits:
    """What the service is told of the model, within what the settings allow."""
    own_window = footprint.context_window
    return ModelTraits(
        vocabulary=model.vocabulary,
        family=family,
        context_window=min(settings.max_kv_size, own_window or settings.max_kv_size),
        memory=MemoryWindow(tokens=admitted.longest, budget_bytes=memory_budget(settings)),
        default_max_tokens=settings.max_tokens,
        sampling_defaults=(environment_sampling(settings), model.sampling),
    )


def environment_sampling(settings: Settings) -> SamplingChoice:
    """The `DEFAULT_*` variables that were set explicitly."""
    return SamplingChoice(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        repetition_context_size=settings.repetition_context_size,
    )


def server_limits(settings: Settings) -> ServerLimits:
    return ServerLimits(
        most_connections=settings.most_connections,
        most_body_bytes=settings.most_body_bytes,
        idle_s=settings.idle_s,
        header_s=settings.header_s,
        body_s=settings.body_s,
        write_s=settings.write_s,
        keep_alive_s=settings.keep_alive_s,
    )
