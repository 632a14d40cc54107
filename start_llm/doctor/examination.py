"""The examination: everything that `start_llm doctor` looks at, in order."""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from start_llm.audit.audit_page import audit_folder
from start_llm.config.settings import Settings
from start_llm.core.errors import StartLLMError
from start_llm.doctor.findings import Finding, Findings, Verdict
from start_llm.doctor.machine import examine_machine
from start_llm.doctor.measures import (
    CacheTrial,
    decode_findings,
    draft_finding,
    prompt_length,
)
from start_llm.doctor.network import Network, Rounding, Sense, forget_peak_memory, peak_memory
from start_llm.doctor.server import ExaminedServer, examined_server
from start_llm.doctor.text import PASSAGE, prose
from start_llm.doctor.truth import Comparison, Truth
from start_llm.engine.engine import Engine
from start_llm.models.loader import read
from start_llm.wiring.memory_plan import memory_budget

_AFTER_RESTART = 8
_RULES_TOKENS = 300
"""More than a page of the cache has."""
_ROUNDING_WORDS = (120, 260, 400)
_CHANCE = 0.9
_REMEMBERED = 0.7
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is examined.

    Attributes:
        conversations: to compare, if there is time for all.
        truth_s: seconds for them.
        restarted_s: seconds for those after the restart.
        cold_s: seconds that the longest prompt should take.
        duration: of all of it, in words.
    """

    conversations: int = 50
    truth_s: float = 110.0
    restarted_s: float = 30.0
    cold_s: float = 6.0
    duration: str = "about five minutes"


WHOLE = Extent()
QUICK = Extent(conversations=5, truth_s=15.0, restarted_s=5.0, cold_s=1.0, duration="about a minute")


def examine(settings: Settings, model: Path, findings: Findings, extent: Extent = WHOLE) -> None:
    """Examine this machine with a model.

    Args:
        findings: filled, one by one.
    """
    for finding in examine_machine(settings):
        findings.add(finding)
    try:
        findings.add(_template(settings, model))
        with examined_server(settings, model) as server:
            _Examination(settings, server, findings, extent).run()
    except StartLLMError as error:
        findings.add(Finding("server", "fault", _without_paths(str(error), model)))


def _without_paths(text: str, model: Path) -> str:
    """Leave out of a message where the user has what."""
    return text.replace(str(model), model.name).replace(str(Path.home()), "~")


def _template(settings: Settings, model: Path) -> Finding:
    if not read(model).tokenizer.has_chat_template:
        return Finding("template", "look", "the model has no chat template: agents cannot use it")
    page = audit_folder(settings, model)
    facts = dict(row for row in page.rows if row[0])
    text = f"{facts['family']}: lost {facts['lost']}; calls: {facts.get('calls', 'none')}"
    return Finding("template", "fine" if page.is_fine else "look", text, {"is_fine": page.is_fine})


class _Examination:
    """What needs a running server.

    Args:
        settings: the user's.
    """

    def __init__(
        self, settings: Settings, server: ExaminedServer, findings: Findings, extent: Extent
    ) -> None:
        self._settings = settings
        self._server = server
        self._add = findings.add
        self._extent = extent

    def run(self) -> None:
        """Examine what is served, then restart the server and look at what is left."""
        self._add(self._loaded(self._server.start()))
        truth, cache = self._before_the_restart()
        # The first model is not referred to any more: two of them might not fit.
        self._server.stop()
        self._server.start()
        self._after_the_restart(truth, cache)

    def _before_the_restart(self) -> tuple[Truth, CacheTrial | None]:
        network = self._network()
        samples = [self._encode(prose(f"sample {words}", words)) for words in _ROUNDING_WORDS]
        rounding = self._engine.run("measure rounding", partial(network.rounding, samples))
        self._add(judged_rounding(rounding))
        self._add(
            judged_sense(self._engine.run("measure sense", partial(network.sense, self._encode(PASSAGE))))
        )
        truth = self._truth(rounding)
        engine, extent = self._engine, self._extent
        comparison = truth.play(engine, network, extent.conversations, extent.truth_s)
        self._add(self._truth_finding(comparison))
        cache = None
        if self._server.runtime.startup.model.tokenizer.has_chat_template:
            # What the network computed for comparison is not the server's memory.
            self._engine.run("forget the peak of memory", forget_peak_memory)
            cache = CacheTrial.play(self._server, prompt_length(self._server, extent.cold_s))
            self._add(self._peak())
            for finding in decode_findings(self._server, network):
                self._add(finding)
            self._add(draft_finding(self._server.runtime.status.engine.drafts))
        return truth, cache

    def _after_the_restart(self, truth: Truth, cache: CacheTrial | None) -> None:
        if cache:
            for finding in cache.findings_after_restart(reuses=self._reuses):
                self._add(finding)
        if self._reuses:
            comparison = truth.go_on(self._engine, self._network(), _AFTER_RESTART, self._extent.restarted_s)
            self._add(self._restart_finding(comparison))
            self._add(self._files())

    @property
    def _reuses(self) -> bool:
        """True if there is a prompt cache."""
        return self._server.runtime.status.cache.budget_bytes > 0

    @property
    def _engine(self) -> Engine:
        return self._server.runtime.engine

    def _network(self) -> Network:
        model = self._server.runtime.startup.model
        return self._engine.run(
            "look at the network", partial(Network, model.network, model.tokenizer.eos_token_ids)
        )

    def _encode(self, text: str) -> list[int]:
        return self._server.runtime.startup.model.tokenizer.encode(text, as_document=False)

    def _loaded(self, seconds: float) -> Finding:
        card = self._server.runtime.card
        figures = {
            "model_type": card.model_type,
            "seconds": round(seconds, 1),
            "weights_bytes": card.weights_bytes,
            "context_window": card.context_window,
        }
        text = (
            f"{card.id}: {card.weights_bytes / _GIB:.2f} GiB of weights loaded in {seconds:.1f} s, "
            f"window {card.context_window:,} tokens"
        )
        return Finding("model", "fine", text, figures)

    def _truth(self, rounding: Rounding) -> Truth:
        eos = self._server.runtime.startup.model.tokenizer.eos_token_ids
        return Truth(self._encode, eos, rounding.tolerance, _RULES_TOKENS)

    def _truth_finding(self, comparison: Comparison) -> Finding:
        share = comparison.restored_tokens / max(comparison.prompt_tokens, 1)
        return self._judged("truth", comparison, f"{share:.0%} of the prompts from the cache")

    def _restart_finding(self, comparison: Comparison) -> Finding:
        finding = self._judged("restart", comparison, f"{comparison.disk_tokens:,} tokens from the disk")
        if self._server.runtime.status.disk.computed_instead:
            text = f"{finding.text}; some were computed, which is faster than this disk"
            return replace(finding, text=text)
        if finding.verdict == "fine" and not comparison.disk_tokens:
            return replace(finding, verdict="fault", text=f"{comparison}: nothing came back from the disk")
        return finding

    def _judged(self, topic: str, comparison: Comparison, source: str) -> Finding:
        if not comparison.wrong:
            text = f"{comparison}, {source}: each as if computed anew"
            return Finding(topic, "fine", text, comparison.figures)
        text = f"{comparison}, {source}: {len(comparison.wrong)} are wrong. First, {comparison.wrong[0]}"
        if self._settings.kv.bits:
            return Finding(topic, "look", f"{text} (KV_BITS gives up precision)", comparison.figures)
        return Finding(topic, "fault", text, comparison.figures)

    def _peak(self) -> Finding:
        peak, budget = self._engine.run("read the peak of memory", peak_memory), memory_budget(self._settings)
        text = f"{peak / _GIB:.2f} GiB at most, of {budget / _GIB:.1f} GiB"
        verdict: Verdict = "fine" if peak <= budget else "fault"
        return Finding("peak memory", verdict, text, {"peak_bytes": peak, "budget_bytes": budget})

    def _files(self) -> Finding:
        """Judge the files that this examination has written and read."""
        disk = self._server.runtime.status.disk
        rejected, errors = disk.rejected.total(), disk.errors
        figures = {"state": disk.state, "rejected": rejected, "errors": errors}
        if disk.state != "on":
            return Finding("disk tier", "fault", f"it is {disk.state}", figures)
        if rejected or errors:
            reasons = ", ".join(disk.rejected)
            text = (
                f"{rejected} files were not read as they were written ({reasons}), {errors} errors in writing"
            )
            return Finding("disk tier", "fault", text, figures)
        return Finding("disk tier", "fine", "every file was read as it was written", figures)


def judged_rounding(rounding: Rounding) -> Finding:
    figures = asdict(rounding) | {"tolerance": rounding.tolerance}
    if not rounding.is_rounding:
        text = (
            "prompts computed in pieces give other predictions than computed at once (by "
            f"{rounding.typical:.2g} standard deviations, {rounding.precision}): positions (RoPE), masks or "
            "kernels are wrong for this model on this machine"
        )
        return Finding("network", "fault", text, figures)
    text = f"prompts computed in pieces and at once agree (up to {rounding.nats:.2g} nats, which is rounding)"
    return Finding("network", "fine", text, figures)


def judged_sense(sense: Sense) -> Finding:
    figures = {
        "first": round(sense.first, 3),
        "second": round(sense.second, 3),
    }
    nats = f"{sense.first:.2f} nats for a token of English, {sense.second:.2f} when it reads the text again"
    if not sense.first < _CHANCE * sense.chance:
        return Finding("language", "skipped", f"{nats}: no better than chance ({sense.chance:.2f})", figures)
    if not sense.second < _REMEMBERED * sense.first:
        text = (
            f"{nats}: it does not recognise what it has just read. Are its positions (RoPE) and files right?"
        )
        return Finding("language", "look", text, figures)
    return Finding("language", "fine", nats, figures)
