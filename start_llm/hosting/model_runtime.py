"""A loaded model with everything that exists once for each loaded model."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from start_llm.config.settings import Settings
from start_llm.core.battery import PowerSource
from start_llm.engine.embedding import LONGEST_TEXT, Embedder
from start_llm.engine.engine import Engine
from start_llm.hosting.model_adapters import ModelAdapters
from start_llm.hosting.model_loading import EngineLoader, EngineStartup
from start_llm.hosting.model_memory import MemoryNeeds
from start_llm.hosting.shared_conversations import OpenConversations
from start_llm.hosting.shared_parts import SharedParts
from start_llm.models.identity import transcripts_identity
from start_llm.models.tokenizer import Tokenizer
from start_llm.prompt.draft_texts import DraftTexts
from start_llm.prompt.prepare import Preparer
from start_llm.server.served_models import ServedModel
from start_llm.server.status import Status
from start_llm.serving.read_ahead import ReadAhead
from start_llm.serving.request_preparation import RequestPreparer
from start_llm.serving.service import AfterReply, Service
from start_llm.storage.database import DatabaseMetrics
from start_llm.telemetry.account import Reports
from start_llm.telemetry.metrics import IdleMetrics
from start_llm.telemetry.trace import Trace
from start_llm.transcripts.transcripts import Transcripts
from start_llm.wiring.from_settings import image_door, make_preparer, reply_defaults, transcripts
from start_llm.wiring.memory_plan import cache_budget, memory_budget

_STOP_S = 5.0  # the longest prefill chunk that is tried takes 4 s


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRuntime(ServedModel):
    """A loaded model, as those know it who load and unload it.

    Attributes:
        settings: with the memory that this model may use.
        startup: the model itself, and what its trials have shown.
    """

    shared: SharedParts
    settings: Settings
    engine: Engine
    startup: EngineStartup
    preparer: Preparer
    conversations: OpenConversations
    read_ahead: ReadAhead | None

    @property
    def needs(self) -> MemoryNeeds:
        needs = self.startup.needs
        return replace(needs, kept_bytes=needs.kept_bytes + self.startup.adapters.nbytes)

    def share_memory(self, nbytes: int) -> None:
        """Give the model this much memory for prompts that run and for its prompt cache."""
        wanted = cache_budget(self.settings, self.card.weights_bytes)
        self.engine.share_memory(nbytes, min(nbytes, wanted))

    def stop(self, timeout_s: float, flush_s: float) -> bool:
        """Fail what runs, write what is to be kept, and end. Returns False if that takes longer.

        Args:
            flush_s: seconds for writing pages to the disk.
        """
        if self.read_ahead:
            self.read_ahead.close()
        has_ended = self.engine.stop(timeout_s, flush_s)
        self.shared.disk.remove_listener(self.engine.note_disk)
        return has_ended


def start_model(
    shared: SharedParts, name: str, folder: Path, others: Sequence[MemoryNeeds] = ()
) -> ModelRuntime:
    """Load a model, and build what answers requests with it.

    Args:
        others: what the other loaded models need.

    Raises:
        StartLLMError: the model cannot be served.
    """
    taken = sum(other.kept_bytes for other in others)
    least_computing = max((other.computing_bytes for other in others), default=0)
    share = memory_budget(shared.settings) - taken
    settings = replace(shared.settings, engine=replace(shared.settings.engine, memory=share))
    with ExitStack() as opened:
        engine, startup = EngineLoader(shared, settings, name, folder, least_computing).start()
        opened.callback(engine.stop, _STOP_S)
        shared.disk.add_listener(engine.note_disk)
        opened.callback(shared.disk.remove_listener, engine.note_disk)
        conversations = shared.conversations.join(transcripts_identity(startup.model, startup.identity))
        opened.callback(shared.conversations.leave, conversations, _STOP_S)
        runtime = _runtime(shared, settings, engine, startup, conversations)
        opened.pop_all()
        if runtime.read_ahead:
            runtime.read_ahead.begin()
        return runtime


def _runtime(
    shared: SharedParts,
    settings: Settings,
    engine: Engine,
    startup: EngineStartup,
    conversations: OpenConversations,
) -> ModelRuntime:
    card, model, tokenizer = startup.card, startup.model, startup.model.tokenizer
    if tokenizer.decoding_warning:
        shared.terminal.say(tokenizer.decoding_warning)
    known = transcripts(settings, tokenizer, card.family, conversations.stores)
    preparer = make_preparer(settings, model, card.family, known)
    trace = shared.trace.of(startup.cache_metrics) if shared.trace else None
    draft_texts = DraftTexts(tokenizer) if startup.engine_metrics.drafts.pays else None
    requests = RequestPreparer(preparer, tokenizer, card, startup.adapters, draft_texts)
    idle = IdleMetrics()
    read_ahead = _read_ahead(settings, engine, requests, known, startup, idle)
    service = Service(
        engine=engine,
        requests=requests,
        transcripts=known,
        defaults=reply_defaults(settings, model.sampling),
        reports=_reports(shared, card.id, trace),
        after=AfterReply(shared.answered, read_ahead),
    )
    adapters = ModelAdapters(engine, startup.adapters, shared.adapters[card.id])
    adapters.mount_again(shared.terminal.say)
    return ModelRuntime(
        service=service,
        card=card,
        token_bytes=tokenizer.token_bytes,
        images=image_door(settings) if card.sees else None,
        status=_status(shared, startup, engine, known, conversations.metrics, idle),
        adapters=adapters,
        embedder=EngineEmbedder(engine, startup.embedder, tokenizer) if startup.embedder else None,
        shared=shared,
        settings=settings,
        engine=engine,
        startup=startup,
        preparer=preparer,
        conversations=conversations,
        read_ahead=read_ahead,
    )


def _read_ahead(
    settings: Settings,
    engine: Engine,
    requests: RequestPreparer,
    known: Transcripts,
    startup: EngineStartup,
    metrics: IdleMetrics,
) -> ReadAhead | None:
    """Begin to read ahead, unless that is off, or nothing can be kept."""
    if settings.engine.idle_work == "off" or not startup.cache_metrics.budget_bytes:
        return None
    runs_on_battery, power = settings.engine.idle_work == "on", PowerSource()

    def may_work() -> bool:
        return startup.engine_metrics.is_idle and (runs_on_battery or not power.is_battery)

    return ReadAhead(engine, requests, known, metrics, may_work)


def _reports(shared: SharedParts, name: str, trace: Trace | None) -> Reports:
    return Reports(
        shared.requests,
        shared.terminal,
        trace,
        shared.prometheus.observer(name),
        shows_images=shared.settings.log.shows_images,
        activity=shared.activity,
        count_tokens=shared.key_limits.count_tokens,
    )


def _status(
    shared: SharedParts,
    startup: EngineStartup,
    engine: Engine,
    known: Transcripts,
    database: DatabaseMetrics,
    idle: IdleMetrics,
) -> Status:
    settings, vision = shared.settings, startup.model.vision
    return Status(
        card=startup.card,
        engine=startup.engine_metrics,
        cache=startup.cache_metrics,
        transcripts=known.metrics,
        database=database,
        idle=idle,
        batch=settings.engine.batch,
        requests=shared.requests,
        disk=shared.disk.metrics,
        responses=shared.responses,
        limits=settings.engine,
        engine_is_alive=engine.is_alive,
        image_input_bytes=lambda: vision.processor.input_bytes if vision else 0,
        drain=shared.drain,
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

    def embed(self, ids: Sequence[int], patience_s: float) -> list[float]:
        """Return the vector of a text, for which requests that somebody waits for go first for so long."""
        return self.engine.run("make a vector", partial(self.embedder.embed, ids), patience_s)
