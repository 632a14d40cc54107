"""Translates the settings into the arguments of each part."""

import secrets
from collections.abc import Callable, Mapping
from functools import partial

from start_llm.access.access_policy import AccessPolicy, is_loopback
from start_llm.access.backend_secret import BackendSecret
from start_llm.access.cross_origin import AllowedOrigins
from start_llm.config.paths import from_root, own_name
from start_llm.config.settings import Settings
from start_llm.core.chat import Json
from start_llm.core.errors import SettingsError
from start_llm.core.family import Family
from start_llm.core.sampling import SamplingChoice
from start_llm.formats import registry
from start_llm.images.checking import ImageChecker
from start_llm.images.door import ImageDoor
from start_llm.images.fetching import ImageFetcher
from start_llm.models.known_digests import KnownDigests
from start_llm.models.loader import LoadedModel
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.canonical_form import canonical_reply
from start_llm.prompt.client_marks import ClientMarks, tokens_of_client_text
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.shorten import is_shortened
from start_llm.prompt.template_audit.samples import rendered_samples
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.seal import KEY_BYTES, Seal, kept_key
from start_llm.serving.service import ReplyDefaults
from start_llm.storage.database import NO_TABLE, DatabaseTable
from start_llm.telemetry.metrics import CacheMetrics, TranscriptMetrics
from start_llm.telemetry.trace import Trace
from start_llm.telemetry.trace_files import TraceFiles
from start_llm.transcripts.beginnings import Beginnings
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore
from start_llm.transcripts.recent import RecentConversations
from start_llm.transcripts.transcript_store import TranscriptStore
from start_llm.transcripts.transcripts import Transcripts, TranscriptStores

_MAX_TRANSCRIPT_BYTES = 128 * 2**20
_MAX_REASONING_BYTES = 32 * 2**20


type TableMaker = Callable[[str], DatabaseTable]
"""Returns the table of this name in which a store outlives the server."""


def no_table(_: str) -> DatabaseTable:
    """Let a store end with the server."""
    return NO_TABLE


def make_trace(settings: Settings, say: Callable[[str], None]) -> Trace | None:
    """Return the trace of requests; None if it is off.

    Raises:
        SettingsError: LOG_ROOT is not a folder.
    """
    log = settings.log
    if not log.traces:
        return None
    trace = Trace(TraceFiles(from_root(log.root)), CacheMetrics(), say, with_prompts=log.traces_prompts)
    trace.start()
    return trace


def make_seal(settings: Settings, say: Callable[[str], None]) -> Seal:
    """Return the seal for reasoning that clients send back.

    Its key is kept in a file, so that sealed reasoning opens after a restart. If the file cannot be used, the
    user is warned, and the key is for this process alone.
    """
    path = from_root(settings.server.state_root) / "seal.key"
    try:
        return Seal(kept_key(path))
    except OSError as error:
        say(f"The key of sealed reasoning cannot be kept ({error}). This one is for this process alone.")
        return Seal(secrets.token_bytes(KEY_BYTES))


def known_digests(settings: Settings, say: Callable[[str], None], rank: int = 0) -> KnownDigests:
    """Return the digests that this process remembers; ranks on one machine have a file each."""
    name = own_name("weights", rank)
    return KnownDigests(from_root(settings.server.state_root) / f"{name}.json", say)


def response_store(settings: Settings, table: TableMaker) -> ResponseStore:
    return ResponseStore(settings.responses.max_bytes, settings.responses.kept_s, table=table("responses"))


def image_door(settings: Settings) -> ImageDoor:
    """Return what takes in the images of requests."""
    fetcher = ImageFetcher(settings.images.max_bytes) if settings.images.fetches else None
    return ImageDoor(ImageChecker(settings.images), fetcher)


def make_preparer(settings: Settings, model: LoadedModel, family: Family, known: Transcripts) -> Preparer:
    return Preparer(
        model.tokenizer,
        family,
        vision=model.vision.processor if model.vision else None,
        policy=settings.prompt,
        restore_reasoning=known.restore_reasoning,
    )


def transcript_stores(settings: Settings, table: TableMaker = no_table) -> TranscriptStores:
    """Return stores with what the tables have of them."""
    return TranscriptStores(
        store=TranscriptStore(
            _MAX_TRANSCRIPT_BYTES, settings.cache.transcript_idle_s, table=table("variants")
        ),
        reasoning_texts=ReasoningStore(_MAX_REASONING_BYTES, table=table("reasoning")),
        seen=PrefixHistory(table=table("prefixes")),
        names=ConversationNames(table=table("names")),
        beginnings=Beginnings(table=table("beginnings")),
    )


def transcripts(
    settings: Settings, tokenizer: Tokenizer, family: Family, stores: TranscriptStores
) -> Transcripts:
    return Transcripts(
        store=stores.store,
        reasoning_texts=stores.reasoning_texts,
        seen=stores.seen,
        names=stores.names,
        beginnings=stores.beginnings,
        recent=RecentConversations(),
        metrics=TranscriptMetrics(stores.store.metrics),
        canonical_reply=canonical_reply,
        token_bytes=tokenizer.token_bytes,
        encode=partial(tokens_of_client_text, tokenizer, ClientMarks.of(tokenizer, family)),
        kept_reasoning=settings.prompt.shown_reasoning,
        takes_proof=settings.prompt.drift == "note",
        is_changed=is_shortened if settings.prompt.shortens_writes else lambda _: False,
    )


def backend_secret(settings: Settings) -> BackendSecret:
    """Return what the server and its proxy alone know: new at each start, unless it is set."""
    secret = settings.proxy.backend_secret
    return BackendSecret(secret) if secret else BackendSecret.random()


def access_policy(settings: Settings, proxy_key: str) -> AccessPolicy:
    """Return the access policy of the server's own port.

    Args:
        proxy_key: the proxy's key, which is accepted beside the user's keys.

    Raises:
        SettingsError: the address is not loopback, and there is no key.
    """
    access, host = settings.access, settings.server.host
    if not (access.keys or is_loopback(host)):
        raise SettingsError(
            f"MLX_HOST={host!r} is not loopback: others on the network could use the model. Set "
            "MLX_API_KEY to a key that clients have to send, or leave MLX_HOST at 127.0.0.1."
        )
    keys = (*access.keys, proxy_key) if access.keys else ()
    names = frozenset(name.lower() for name in (*access.hosts, host))
    return AccessPolicy(keys, names, AllowedOrigins(access.origins))


def check_backends(settings: Settings) -> None:
    """Refuse servers behind the proxy that would not believe it whose request it passes on.

    Raises:
        SettingsError: there are some, and no secret that they could share.
    """
    if settings.proxy.backends and not settings.proxy.backend_secret:
        raise SettingsError(
            "PROXY_BACKENDS needs BACKEND_SECRET, the same on all of these servers. Set it to what "
            "`openssl rand -hex 24` writes."
        )


def check_ports(settings: Settings) -> None:
    """Refuse one port for both servers.

    Raises:
        SettingsError: they would have the same.
    """
    port = settings.server.port
    if settings.proxy.is_on and port and port == settings.proxy.port:
        raise SettingsError(
            f"MLX_PORT and PROXY_PORT are both {port}. Give one of them another number, or "
            "switch the proxy off with --no-proxy."
        )


def model_family(settings: Settings, config: Mapping[str, Json], tokenizer: Tokenizer) -> Family:
    """Return the model's family: the user's choice, else the one that its files show."""
    if settings.model.family:
        return registry.family_by_name(settings.model.family)
    return registry.detect(
        config, tokenizer.chat_template, tokenizer.added_tokens, rendered_samples(tokenizer)
    )


def reply_defaults(settings: Settings, author: SamplingChoice) -> ReplyDefaults:
    """Return what holds for requests that set nothing.

    Args:
        author: the sampling defaults of the model's author.
    """
    return ReplyDefaults(
        max_tokens=settings.reply.max_tokens,
        sampling=(settings.sampling, author),
        repetition=settings.reply.repetition,
    )
