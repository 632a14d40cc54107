"""Mends the history of a conversation before it is parsed: no session ends by what it cannot take back.

A client sends its history with each request. If the server refused a message of it, it would refuse every
later turn too. So whatever comes before the newest question is mended, and `Fields.mended` says where. The
newest question is what follows the model's last message: it is left as it is, and may be refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from start_llm.core.chat import Json
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.anthropic import messages_history as anthropic
from start_llm.protocols.fields import Fields
from start_llm.protocols.mending import Item, as_text
from start_llm.protocols.openai import chat_history as openai
from start_llm.protocols.responses import items_history as responses
from start_llm.protocols.routes import BodyKind

_ASSISTANT, _USER = "assistant", "user"
_MOST_REPORTED = 20


@dataclass(frozen=True, slots=True)
class _Form:
    """How a protocol writes a history.

    Attributes:
        array: the field that has it.
        role_of: returns whose an item is; None if nothing shows it.
        mended: returns an item of this role that can be read.
    """

    array: str
    role_of: Callable[[Item], str | None]
    mended: Callable[[Item, str], Item]


_FORMS: Mapping[BodyKind, _Form] = {
    "chat": _Form("messages", openai.role_of, openai.mended_message),
    "messages": _Form("messages", anthropic.role_of, anthropic.mended_message),
    "responses": _Form("input", responses.role_of, responses.mended_item),
}


def with_mended_history(kind: BodyKind | None, body: Fields) -> Fields:
    """Return the body of a request, with its history mended. Other kinds of bodies have none.

    Raises:
        InvalidRequest: a damaged value is nested too deeply to be written as text.
    """
    form = _FORMS.get(kind) if kind else None
    items = body.value(form.array) if form else None
    if form is None or not isinstance(items, list):
        return Fields(body.data)
    try:
        past = _mended(items[: _length_of_past(items, form)], form)
        damaged = [index for index, (new, old) in enumerate(zip(past, items, strict=False)) if new != old]
    except RecursionError as error:
        raise InvalidRequest(f"'{form.array}' is nested too deeply.", param=form.array) from error
    halves = {path for path in body.mended if path.startswith(f"{form.array}[")}
    mended = frozenset(halves | {f"{form.array}[{index}]" for index in damaged})
    return Fields({**body.data, form.array: [*past, *items[len(past) :]]}, mended=mended)


def reported_paths(mended: Iterable[str]) -> tuple[str, ...]:
    """Return some of these paths, in the order of their messages."""
    return tuple(sorted(mended, key=lambda path: (len(path), path))[:_MOST_REPORTED])


def _length_of_past(items: Sequence[Json], form: _Form) -> int:
    """Return how many items come before the newest question. The last item, if nobody's, belongs to it."""
    roles = [form.role_of(item) if isinstance(item, dict) else None for item in items]
    end = len(items)
    while end and (roles[end - 1] not in (None, _ASSISTANT) or (end == len(items) and roles[-1] is None)):
        end -= 1
    return end


def _mended(items: Sequence[Json], form: _Form) -> list[Json]:
    """Return items that can be read. One of nobody is a reply if it follows a question."""
    mended: list[Json] = []
    before: str = _ASSISTANT
    for item in items:
        message: Item = item if isinstance(item, dict) else {"content": as_text(item)}
        before = form.role_of(message) or (_USER if before == _ASSISTANT else _ASSISTANT)
        mended.append(form.mended(message, before))
    return mended
