"""Find the parts of a request that do not reach the model."""

from dataclasses import dataclass

from start_llm.audit.requests import KINDS, words_of
from start_llm.audit.subject import AuditedModel
from start_llm.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Loss:
    """A kind of request that loses words, or is refused.

    Attributes:
        words: the words that are missing from the prompt.
        refusal: the error message; empty if the request is not refused.
    """

    kind: str
    words: tuple[str, ...] = ()
    refusal: str = ""


def losses(subject: AuditedModel) -> list[Loss]:
    """Return a `Loss` for each kind of request that loses words or is refused."""
    candidates = (_loss(subject, kind) for kind in KINDS)
    return [loss for loss in candidates if loss.words or loss.refusal]


def _loss(subject: AuditedModel, kind: str) -> Loss:
    try:
        text = subject.text(subject.prompt(KINDS[kind]).tokens.ids)
    except InvalidRequest as error:
        return Loss(kind, refusal=error.message)
    return Loss(kind, tuple(word for word in words_of(KINDS[kind]) if word not in text))
