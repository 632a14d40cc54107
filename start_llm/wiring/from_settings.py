"""Translates the settings into the arguments of each part."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial

from start_llm.access.access_policy import AccessPolicy, is_loopback
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.config.paths import from_root
from start_llm.config.settings import Settings
from start_llm.core.chat import Json, KeptReasoning
from start_llm.core.errors import SettingsError
from start_llm.core.family import Family
from start_llm.core.sampling import SamplingChoice
from start_llm.engine.resources import TimeLimits
from start_llm.formats import registry
from start_llm.images.checking import ImageChecker, ImageLimits
from start_llm.images.door import ImageDoor
from start_llm.images.fetching import ImageFetcher
from start_llm.models.known_digests import KnownDigests
from start_llm.models.loader import LoadedModel
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.canonical_form import canonical_reply
from start_llm.prompt.client_marks import ClientMarks, tokens_of_client_text
from start_llm.prompt.prepare import Preparer, PromptPolicy
from start_llm.prompt.shorten import is_shortened
from start_llm.prompt.template_audit.samples import rendered_samples
from start_llm.protocols.responses.response_store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal
from start_llm.protocols.seal_key import kept_key
from start_llm.proxy.config import ProxyConfig
from start_llm.server.listener import ServerLimits
from start_llm.serving.service import ReplyDefaults
from start_llm.storage.database import DatabaseTable
from start_llm.telemetry.metrics import CacheMetrics, TranscriptMetrics
from start_llm.telemetry.trace import Trace, start_trace
from start_llm.transcripts.guard import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore
from start_llm.transcripts.recent import RecentConversations
from start_llm.transcripts.turn import Transcripts
from start_llm.transcripts.turn_store import TranscriptLimits, TranscriptStore

_MAX_TRANSCRIPT_BYTES = 128 * 2**20
_MAX_REASONING_BYTES = 32 * 2**20
_SMALLEST_PAGE = 256


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


def reply_defaults(settings: Settings, author: SamplingChoice) -> ReplyDefaults:
    """Return what holds for requests that set nothing.

    Args:
        author: the sampling defaults of the model's author.
    """
    return ReplyDefaults(
        max_tokens=settings.max_tokens,
        sampling=(environment_sampling(settings), author),
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
