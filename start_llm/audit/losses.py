"""What of a request the model would not read."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.audit.requests import KINDS, words_of
from start_llm.audit.subject import Subject
from start_llm.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Loss:
    """A kind of request of which words do not reach the model; or none does, if it is refused."""

    kind: str
    words: tuple[str, ...] = ()
    refusal: str = ""


def losses(subject: Subject) -> list[Loss]:
    """Of all kinds of requests."""
    found = (_loss(subject, kind) for kind in KINDS)
    return [loss for loss in found if loss.words or loss.refusal]


def _loss(subject: Subject, kind: str) -> Loss:
    try:
        text = subject.text(subject.prompt(KINDS[kind]).tokens.ids)
    except InvalidRequest as error:
        return Loss(kind, refusal=error.message)
    return Loss(kind, tuple(word for word in words_of(KINDS[kind]) if word not in text))
