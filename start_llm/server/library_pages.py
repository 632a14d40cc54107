"""Renders what the library of models tells: `/library`, `/fit`, `/downloads`."""

from dataclasses import asdict, dataclass

from start_llm.core.chat import Json
from start_llm.core.model_listing import (
    Download,
    DownloadQueue,
    Fit,
    FitReport,
    LibraryEntry,
    ModelLibrary,
)
from start_llm.server.page_request import Page, PageRequest, members
from start_llm.server.served_models import ServedModels
from start_llm.telemetry.metrics import EngineMetrics

_FEWEST_STEPS = 32
"""Steps of replies from which a decode speed is measured."""


@dataclass(frozen=True, slots=True)
class LibraryPages:
    """Answers requests about the library."""

    library: ModelLibrary
    queue: DownloadQueue
    served: ServedModels

    def models(self, _request: PageRequest) -> Page:
        return 200, {"models": [_entry(entry) for entry in self.library.entries()]}

    def fit(self, request: PageRequest) -> Page:
        """Judge a model by what is on this machine."""
        asked = request.fields
        return self._fit(self.library.fit(asked.text("model"), asked.text("repo")), asked.text("repo"))

    def fit_on_hub(self, request: PageRequest) -> Page:
        """Judge a repository by what the hub tells about it."""
        repo = request.fields.required_text("repo")
        return self._fit(self.library.fit_on_hub(repo), repo)

    def _fit(self, fit: Fit, repo: str | None) -> Page:
        status = self.served.status
        is_loaded = fit.model == status.card.id and not repo
        measured = _measured_tps(status.engine) if is_loaded else None
        context = status.card.context_window if is_loaded else fit.report.context_tokens
        return 200, _fit(fit, context, measured, int(status.engine.stepped_at * 1000))

    def downloads(self, request: PageRequest) -> Page:
        downloads = self.queue.list(request.tenant)
        return 200, {"downloads": [_download(download) for download in downloads]}

    def start(self, request: PageRequest) -> Page:
        repo_id = request.fields.required_text("repo_id")
        return 202, _download(self.queue.start(request.tenant, repo_id))

    def pause(self, request: PageRequest) -> Page:
        return 200, _download(self.queue.pause(request.tenant, request.name))

    def resume(self, request: PageRequest) -> Page:
        return 202, _download(self.queue.resume(request.tenant, request.name))

    def remove(self, request: PageRequest) -> Page:
        return 200, _download(self.queue.remove(request.tenant, request.name)) | {"deleted": True}


def _measured_tps(engine: EngineMetrics) -> float | None:
    """Return the tokens a second of one reply: the median of the last pauses between two steps."""
    pauses = sorted(engine.stalls.copy())
    if len(pauses) < _FEWEST_STEPS:
        return None
    median = pauses[len(pauses) // 2]
    return round(1 / median, 1) if median else None


def _entry(entry: LibraryEntry) -> dict[str, Json]:
    return {
        **members(entry, "repo_id model_type size_bytes quant_bits vision supported serving"),
        "assessment": _assessment(entry.report) if entry.report else None,
        **members(entry, "complete place path"),
    }


def _assessment(report: FitReport) -> dict[str, Json]:
    return members(report, "fits max_safe_context=context_tokens predicted_decode_tps=decode_tps")


def _download(download: Download) -> dict[str, Json]:
    body: dict[str, Json] = asdict(download)
    if download.error is None:
        del body["error"]
    return body


def _fit(fit: Fit, context: int, measured_tps: float | None, measured_at: int) -> dict[str, Json]:
    report = fit.report
    return {
        "model": fit.model,
        "machine": members(fit.machine, "chip ram_bytes bandwidth_gbs"),
        "context_tokens": context,
        "typical_context_tokens": min(report.typical_context_tokens, context),
        "typical_decode_tps": report.decode_tps,
        "typical_prefill_tps": report.prefill_tps,
        "measured_decode_tps": measured_tps,
        "measured_at": measured_at if measured_tps is not None else None,
        "report": members(
            report,
            "fits weights_bytes kv_bytes transient_bytes image_bytes total_bytes usable_bytes "
            "max_safe_context=context_tokens predicted_decode_tps=decode_tps "
            "predicted_prefill_tps=prefill_tps",
        ),
        "verdict": report.verdict,
        "arithmetic": list(fit.arithmetic),
        "sku_matrix_ctx": fit.sku_context,
        "sku_matrix": [
            members(machine, "sku=name ram_gb")
            | members(on_machine, "fits max_context=context_tokens decode_tps")
            for machine, on_machine in fit.skus
        ],
    }
