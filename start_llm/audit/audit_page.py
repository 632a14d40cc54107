"""Make the page that `python -m start_llm audit FOLDER` prints."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from start_llm.audit.call_round_trip import CallAudit, audit_calls
from start_llm.audit.lost_parts import losses
from start_llm.audit.requests import KINDS
from start_llm.audit.subject import AuditedModel
from start_llm.audit.turns import CLIENTS, efficiency
from start_llm.config.settings import Settings
from start_llm.core.errors import ModelError
from start_llm.core.sampling import SamplingChoice
from start_llm.models.loader import read
from start_llm.prompt.adapt import needed
from start_llm.prompt.prepare import Preparer
from start_llm.prompt.template_audit.audit import described
from start_llm.wiring.from_settings import model_family

_SHOWN = 200


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The findings, in rows of a name and a value.

    Attributes:
        is_fine: no kind of request loses anything, the template renders a call, and all rendered calls are
            parsed.
    """

    rows: tuple[tuple[str, str], ...]
    is_fine: bool


def audit_folder(settings: Settings, folder: Path) -> AuditReport:
    """Audit the config, the tokenizer and the chat template of a model.

    Raises:
        ModelError: the files cannot be read, or there is no chat template.
    """
    model = read(folder)
    if not model.tokenizer.has_chat_template:
        raise ModelError(f"The model in {folder} has no chat template.")
    family = model_family(settings, model.config, model.tokenizer)
    subject = AuditedModel(model.tokenizer, family, Preparer(model.tokenizer, family))
    calls, lost = audit_calls(subject), losses(subject)
    rows = [
        ("model", folder.name),
        ("family", f"{subject.family.name} ({model.config.get('model_type', 'of no type')})"),
        ("reasoning", _reasoning_texts(subject)),
        ("template", "; ".join([described(subject.preparer.facts), *needed(subject.preparer.facts)])),
        *_calls(calls),
        *_lost(lost),
        *_efficiency(subject),
        ("sampling", _sampling(model.sampling)),
    ]
    return AuditReport(tuple(rows), is_fine=not (lost or calls.unread or calls.notation is None))


def _reasoning_texts(subject: AuditedModel) -> str:
    marks, facts = subject.family.reasoning, subject.preparer.facts
    if marks is None:
        return "none"
    shown = f"{marks.opening} … {marks.closing}"
    return shown if facts.reasoning_key else f"{shown}, which the template never shows"


def _calls(audit: CallAudit) -> Iterator[tuple[str, str]]:
    tried = len(audit.read) + len(audit.unread)
    if not audit.sample:
        yield "calls", "the template shows none that can be recognized in its prompt"
        return
    notation = audit.notation or "NOT READ by any reader: an agent gets them as text"
    yield "calls", f"{notation}; {len(audit.read)} of {tried} kinds read"
    yield from (("", f"not read: {kind}") for kind in audit.unread)
    yield from (("", f"no single reply has: {kind}") for kind in audit.unrendered)
    yield "", f"as in: {_short(audit.sample)}"


def _lost(lost: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield "lost", f"{f'in {len(lost)}' if lost else 'nothing, in any'} of {len(KINDS)} kinds of requests"
    yield from (("", f"{kind}: {_short(what)}") for kind, what in lost.items())


def _efficiency(subject: AuditedModel) -> Iterator[tuple[str, str]]:
    """Yield rows of unavoidable prompt tokens / computed prompt tokens, for each client."""
    title = "efficiency"
    for thinks in (False, True) if subject.family.reasoning else (False,):
        figures = {client: efficiency(subject, client, thinks=thinks) for client in CLIENTS}
        yield title, f"{'thinking' if thinks else 'not thinking'}: {_figures(figures)}"
        title = ""


def _figures(figures: Mapping[str, float | None]) -> str:
    return ", ".join(
        f"{client} unknown" if figure is None else f"{client} {figure:.2f}"
        for client, figure in figures.items()
    )


def _sampling(choice: SamplingChoice) -> str:
    values = {name: value for name, value in asdict(choice).items() if value is not None}
    text = ", ".join(f"{name} {value:g}" for name, value in values.items())
    return f"{text} (generation_config.json)" if text else "the folder recommends none"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
