"""Find the parts of a request that do not reach the model."""

from start_llm.audit.requests import KINDS, meanings, words_of
from start_llm.audit.subject import AuditedModel
from start_llm.core.errors import InvalidRequest


def losses(subject: AuditedModel) -> dict[str, str]:
    """Return for each kind of request that loses words or is refused what is lost, or the error."""
    lost = {kind: _loss(subject, kind) for kind in KINDS}
    return {kind: what for kind, what in lost.items() if what}


def _loss(subject: AuditedModel, kind: str) -> str:
    try:
        text = subject.text(subject.prompt(KINDS[kind]).tokens.ids)
    except InvalidRequest as error:
        return f"refused: {error.message}"
    words = [word for word in words_of(KINDS[kind]) if word not in text]
    return f"{' and '.join(meanings(words))} does not reach the model" if words else ""
