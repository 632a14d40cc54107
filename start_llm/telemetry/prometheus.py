"""What Prometheus scrapes at `/metrics`: counters of models, and histograms of their requests.

What vLLM counts too has its name, with `start_llm_` in place of `vllm:`. `docs/metrics.md` has them all.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from start_llm.telemetry.metrics import DiskMetrics, ModelMetrics
from start_llm.telemetry.request_record import RequestRecord

PREFIX = "start_llm_"
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_TOKENS = (1, 10, *(digit * power for power in (100, 1000, 10_000, 100_000) for digit in (1, 2, 5)), 10**6)

type Number = int | float

disable_created_metrics()  # a second line for each series, which no dashboard uses


@dataclass(frozen=True, slots=True)
class _Series[Source]:
    """A metric that is read from the counters of a model or of the disk tier.

    Attributes:
        name: without the prefix, and without the `_total` of a counter.
        read: returns its value; with a label, a value for each of the label's.
    """

    name: str
    help: str
    read: Callable[[Source], Number | Mapping[str, Number]]
    label: str | None = None

    def values(self, source: Source) -> Mapping[str, Number]:
        value = self.read(source)
        return value if isinstance(value, Mapping) else {"": value}


_MODEL_COUNTERS: tuple[_Series[ModelMetrics], ...] = (
    _Series(
        "prefix_cache_queries",
        "Prompt tokens that the prompt cache was asked for.",
        lambda of: of.cache.reused_tokens + of.cache.computed_tokens,
    ),
    _Series(
        "prefix_cache_hits", "Prompt tokens that the prompt cache had.", lambda of: of.cache.reused_tokens
    ),
    _Series(
        "computed_prompt_tokens", "Prompt tokens that were computed.", lambda of: of.cache.computed_tokens
    ),
    _Series(
        "new_prompt_tokens",
        "Computed prompt tokens that had never been computed before.",
        lambda of: of.cache.unavoidable_tokens,
    ),
    _Series("generation_tokens", "Tokens of replies.", lambda of: of.engine.generated_tokens),
    _Series(
        "num_preemptions", "Replies that made room for others for a while.", lambda of: of.engine.preemptions
    ),
    _Series("spec_decode_num_drafts", "Drafts that were verified.", lambda of: of.engine.drafts.drafts),
    _Series("spec_decode_num_draft_tokens", "Tokens of drafts.", lambda of: of.engine.drafts.drafted_tokens),
    _Series(
        "spec_decode_num_accepted_tokens",
        "Tokens of drafts that became the reply's.",
        lambda of: of.engine.drafts.accepted_tokens,
    ),
    _Series(
        "idle_read_tokens", "Tokens that were computed while nobody waited.", lambda of: of.idle.read_tokens
    ),
    _Series(
        "idle_restored_tokens",
        "Tokens that came from the disk while nobody waited.",
        lambda of: of.idle.restored_tokens,
    ),
    _Series("idle_used_tokens", "Of both, tokens that a request used.", lambda of: of.idle.used_tokens),
    _Series("engine_failures", "Engine actions that raised an error.", lambda of: of.engine.failures),
    _Series("prompt_cache_lookups", "Prompts that were looked up.", lambda of: of.cache.lookups),
    _Series("prompt_cache_hits", "Prompts of which something was cached.", lambda of: of.cache.hits),
    _Series(
        "prompt_cache_misses",
        "Prompts of which less was cached than had been computed before, by reason.",
        lambda of: dict(of.cache.misses),
        "reason",
    ),
    _Series(
        "prompt_cache_evictions", "Pages and states that made room for others.", lambda of: of.cache.evictions
    ),
    _Series(
        "transcript_bound_requests",
        "Requests that begin with the recorded tokens of earlier turns.",
        lambda of: of.transcripts.bound,
    ),
    _Series(
        "transcript_notes",
        "Prompts with a note about values that have changed.",
        lambda of: of.transcripts.notes,
    ),
)
_MODEL_GAUGES: tuple[_Series[ModelMetrics], ...] = (
    _Series("num_requests_running", "Requests that are computed.", lambda of: of.engine.active_sequences),
    _Series("num_requests_waiting", "Requests that wait to be computed.", lambda of: of.engine.waiting),
    _Series(
        "kv_cache_usage_perc",
        "Share of the prompt cache's memory that is in use, from 0 to 1.",
        lambda of: _share(of.cache.stored_bytes + of.cache.live_bytes, of.cache.budget_bytes),
    ),
    _Series(
        "prompt_cache_bytes",
        "Memory of what is cached and of the requests that run, by kind.",
        lambda of: {
            "pages": of.cache.page_bytes,
            "sequence_caches": of.cache.seq_cache_bytes,
            "checkpoints": of.cache.checkpoint_bytes,
            "live": of.cache.live_bytes,
        },
        "kind",
    ),
    _Series(
        "prompt_cache_max_bytes", "Memory that the prompt cache may use.", lambda of: of.cache.budget_bytes
    ),
    _Series("model_weights_bytes", "Memory of the model's weights.", lambda of: of.card.weights_bytes),
)
_DISK_COUNTERS: tuple[_Series[DiskMetrics], ...] = (
    _Series(
        "ssd_cache_restored_tokens", "Prompt tokens that were read from disk.", lambda of: of.restored_tokens
    ),
    _Series(
        "ssd_cache_restored_bytes",
        "Bytes that were read from disk for prompts.",
        lambda of: of.restored_bytes,
    ),
    _Series(
        "ssd_cache_restored_seconds",
        "Seconds for which prompts waited for the disk.",
        lambda of: of.restored_s,
    ),
    _Series("ssd_cache_written_bytes", "Bytes that were written to disk.", lambda of: of.written_bytes),
    _Series("ssd_cache_evictions", "Files that made room for others.", lambda of: of.evictions),
    _Series("ssd_cache_errors", "Failures to write or to open a file.", lambda of: of.errors),
    _Series(
        "ssd_cache_rejected_files",
        "Files that could not be used, by reason.",
        lambda of: dict(of.rejected),
        "reason",
    ),
)
_DISK_GAUGES: tuple[_Series[DiskMetrics], ...] = (
    _Series("ssd_cache_files", "Files of the disk tier.", lambda of: of.files),
    _Series("ssd_cache_bytes", "Bytes of the disk tier's folder.", lambda of: of.nbytes),
    _Series("ssd_cache_max_bytes", "Bytes that the folder may have.", lambda of: of.max_bytes),
)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


type _Totals = defaultdict[tuple[str, str], Number]
"""Values of counters, by name and value of the label."""


class ModelCounters(Collector):
    """The counters of all models. Safe to use from any thread.

    A model that is loaded again begins to count at 0, so what it has counted before is added: a counter never
    goes down.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, ModelMetrics] = {}
        self._before: defaultdict[str, _Totals] = defaultdict(lambda: defaultdict(int))
        self._lock = threading.Lock()

    def attach(self, model: str, metrics: ModelMetrics) -> None:
        """Show the counters of a model that was loaded."""
        with self._lock:
            self._loaded[model] = metrics

    def detach(self, model: str) -> None:
        """Keep what a model has counted that counts no more."""
        with self._lock:
            metrics = self._loaded.pop(model)
            for series in _MODEL_COUNTERS:
                for label, value in series.values(metrics).items():
                    self._before[model][series.name, label] += value

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = [self._counter(series) for series in _MODEL_COUNTERS]
            families += [self._gauge(series) for series in _MODEL_GAUGES]
        yield from families

    def _counter(self, series: _Series[ModelMetrics]) -> Metric:
        family = CounterMetricFamily(PREFIX + series.name, series.help, labels=_labels(series))
        for model in self._loaded.keys() | self._before.keys():
            totals = {
                label: value for (name, label), value in self._before[model].items() if name == series.name
            }
            now = series.values(self._loaded[model]) if model in self._loaded else {}
            for label in sorted(totals.keys() | now.keys()):
                family.add_metric(_values(series, model, label), totals.get(label, 0) + now.get(label, 0))
        return family

    def _gauge(self, series: _Series[ModelMetrics]) -> Metric:
        family = GaugeMetricFamily(PREFIX + series.name, series.help, labels=_labels(series))
        for model, metrics in self._loaded.items():
            for label, value in series.values(metrics).items():
                family.add_metric(_values(series, model, label), value)
        return family


def _labels(series: _Series[ModelMetrics]) -> list[str]:
    return ["model_name", series.label] if series.label else ["model_name"]


def _values(series: _Series[ModelMetrics], model: str, label: str) -> list[str]:
    return [model, label] if series.label else [model]


class _DiskCounters(Collector):
    """The counters of the disk tier."""

    def __init__(self, metrics: DiskMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for kind, table in ((CounterMetricFamily, _DISK_COUNTERS), (GaugeMetricFamily, _DISK_GAUGES)):
            for series in table:
                family = kind(
                    PREFIX + series.name, series.help, labels=[series.label] if series.label else []
                )
                for label, value in series.values(self._metrics).items():
                    family.add_metric([label] if series.label else [], value)
                yield family


class ServerMetrics:
    """All metrics of a server. Safe to use from any thread."""

    def __init__(self) -> None:
        self.models = ModelCounters()
        self._registry = CollectorRegistry()
        self._registry.register(self.models)
        ProcessCollector(registry=self._registry)
        self._responses = Counter(
            f"{PREFIX}http_requests",
            "HTTP responses, by the path's pattern.",
            ("handler", "method", "status"),
            registry=self._registry,
        )
        self._requests = RequestHistograms(self._registry)

    def show_disk(self, metrics: DiskMetrics) -> None:
        """Show the counters of the disk tier, which all models share."""
        self._registry.register(_DiskCounters(metrics))

    def note_response(self, handler: str, method: str, status: int) -> None:
        """Count a response.

        Args:
            handler: the pattern of its path, of which there are few.
        """
        self._responses.labels(handler, method, str(status)).inc()

    def observer(self, model: str) -> RequestObserver:
        """Return what observes the requests of a model."""
        return RequestObserver(self._requests, model)

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Return the content type and the text of all metrics.

        Args:
            accept: the header of this name, which chooses between OpenMetrics and Prometheus' own format.
        """
        encode, content_type = choose_encoder(accept)
        return content_type, encode(self._registry)


class RequestHistograms:
    """Times and lengths of requests, for each model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, ("model_name", *labels), registry=registry, buckets=buckets)

        self.ended = Counter(
            f"{PREFIX}request_success",
            "How requests have ended: stop, length, tool_calls, deadline, repetition, failed, cancelled.",
            ("model_name", "finished_reason"),
            registry=registry,
        )
        self.ttft = histogram(
            "time_to_first_token_seconds", "Seconds from a request to the first token of its reply.", _SECONDS
        )
        self.between = histogram(
            "inter_token_latency_seconds", "Seconds between two tokens of a reply.", _TOKEN_SECONDS
        )
        self.total = histogram("e2e_request_latency_seconds", "Seconds from a request to its end.", _SECONDS)
        self.queued = histogram(
            "request_queue_time_seconds", "Seconds before a prompt's turn came.", _SECONDS
        )
        self.prefill = histogram(
            "request_prefill_time_seconds", "Seconds from then to the first token of the reply.", _SECONDS
        )
        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.reply = histogram("request_generation_tokens", "Tokens of a reply.", _TOKENS)
        self.sources = histogram(
            "request_prefill_tokens",
            "Prompt tokens of a request that were computed, cached in memory, or restored from disk.",
            _TOKENS,
            "source",
        )


class RequestObserver:
    """Observes the requests of one model. Safe to use from any thread."""

    def __init__(self, histograms: RequestHistograms, model: str) -> None:
        self._histograms = histograms
        self._model = model
        self._between = histograms.between.labels(model)

    def note_turn(self, queued_s: float) -> None:
        """Note that the turn of a prompt has come."""
        self._histograms.queued.labels(self._model).observe(queued_s)

    def note_first_token(self, ttft_s: float, prefill_s: float) -> None:
        self._histograms.ttft.labels(self._model).observe(ttft_s)
        self._histograms.prefill.labels(self._model).observe(prefill_s)

    def note_tokens(self, count: int, seconds: float) -> None:
        """Note tokens of a reply that came together, and the seconds since those before them."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def note_end(self, record: RequestRecord) -> None:
        """Note the end of a request; if its turn had come, also where the tokens of its prompt came from."""
        histograms, restored = self._histograms, record.restored
        histograms.ended.labels(self._model, record.ending).inc()
        histograms.total.labels(self._model).observe(record.seconds)
        histograms.prompt.labels(self._model).observe(record.facts.prompt_tokens)
        histograms.reply.labels(self._model).observe(record.written)
        if restored is None:
            return
        sources = {
            "computed": record.computed,
            "cached": restored.tokens - restored.disk_tokens,
            "restored": restored.disk_tokens,
        }
        for source, tokens in sources.items():
            histograms.sources.labels(self._model, source).observe(tokens)
