"""Whether to think, how hard and for how many tokens: one table of the fields that say so.

`_ROWS` are the fields and `_PLACES` the objects of a body that may hold them, both in order of strength. The
place counts before the row, so a `reasoning_effort` at the top level overrides an `enable_thinking` of
`chat_template_kwargs`. `on`, `effort` and `budget` each come from the strongest field that says something
about it, so an effort may stand beside `on=False`.

At the top level a wrong type is refused. The other places are free-form, and what cannot be read there is
ignored, as are words that nobody knows in any place: clients invent levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf

from start_llm.core.chat import Json, Thinking
from start_llm.core.errors import InvalidRequest
from start_llm.core.sampling import Range
from start_llm.protocols.fields import Fields

CONSUMED_TEMPLATE_OPTIONS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_budget"})
"""Names in `chat_template_kwargs` that the server sets for the template, once it has read them."""

_PLACES = ("chat_template_kwargs", "metadata", "extra_body")  # after the top level
_SILENT = Thinking()
_WORDS: Mapping[str, Thinking] = {
    **dict.fromkeys("off none disable disabled false 0 no chat no_think".split(), Thinking(on=False)),
    **dict.fromkeys(
        "on enable enabled adaptive auto default true 1 yes thinking think".split(), Thinking(on=True)
    ),
    **{word: Thinking(on=True, effort=word) for word in "minimal low medium high xhigh".split()},
    "max": Thinking(on=True, effort="xhigh"),
}
_ANY_NUMBER = Range(-inf, inf)
_LARGEST_BUDGET = 2**63 - 1  # more than any thought; infinity, which has no integer, becomes it too


def read_thinking(body: Fields) -> Thinking:
    """What a request body of any protocol says about thinking.

    Raises:
        InvalidRequest: names a field at the top level that has the wrong type, or a budget that is no count.
    """
    said = list(_statements(body))
    return Thinking(
        on=_first(one.on for one in said),
        effort=_first(one.effort for one in said),
        budget=_first(one.budget for one in said),
    )


def unread_template_options(options: Mapping[str, Json]) -> dict[str, Json]:
    """`chat_template_kwargs` without what `read_thinking` took from it.

    A value that it did not understand stays: a template may. `null` is absent here too, and would mean
    "off" to a template that only asks whether the name is defined.
    """
    return {name: value for name, value in options.items() if not _is_consumed(name, value)}


def _is_consumed(name: str, value: Json) -> bool:
    if name not in CONSUMED_TEMPLATE_OPTIONS:
        return False
    return value is None or any(one != _SILENT for one in _lenient_statements({name: value}, _ROWS))


def _statements(body: Fields) -> Iterator[Thinking]:
    """What every field says, the strongest first."""
    body.object("chat_template_kwargs")
    for row in _ROWS:
        yield row.says(body)
    for place in _PLACES:
        rows = (*_ROWS, *_ROWS_OF_TEMPLATES) if place == "chat_template_kwargs" else _ROWS
        yield from _lenient_statements(body.value(place), rows)


def _lenient_statements(value: Json, rows: Iterable[_Row]) -> Iterator[Thinking]:
    place = Fields(value if isinstance(value, dict) else {})
    for row in rows:
        try:
            yield row.says(place)
        except InvalidRequest:
            continue  # `metadata` may use our names for things of its own, and so may a template


def _first[T](values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _switch(fields: Fields, name: str) -> Thinking:
    return _SILENT if fields.value(name) is None else Thinking(on=fields.boolean(name))


def _word(fields: Fields, name: str) -> Thinking:
    return _WORDS.get((fields.text(name) or "").strip().lower(), _SILENT)


def _object(fields: Fields, name: str) -> Thinking:
    """Says nothing itself; its members have rows of their own."""
    fields.object(name)
    return _SILENT


def _switch_word_or_object(fields: Fields, name: str) -> Thinking:
    match fields.value(name):
        case None | bool():
            return _switch(fields, name)
        case str():
            return _word(fields, name)
        case dict():
            return _object(fields, name)
        case _:
            raise fields.expected(name, "a boolean, a string or an object")


def _budget(fields: Fields, name: str) -> Thinking:
    """A budget bounds a thought without asking for one; 0 leaves no room for any."""
    number = fields.number(name, _ANY_NUMBER)
    if number is None:
        return _SILENT
    tokens = min(number, _LARGEST_BUDGET)
    if tokens < 0 or tokens % 1:
        raise fields.fail(name, "must be a whole number of tokens, 0 or more")
    return Thinking(budget=int(tokens)) if tokens else Thinking(on=False)


@dataclass(frozen=True, slots=True)
class _Row:
    """A field, or a member of an object field (`thinking.type`), and how it is read."""

    path: str
    read: Callable[[Fields, str], Thinking]

    def says(self, place: Fields) -> Thinking:
        name, _, member = self.path.partition(".")
        if not member:
            return self.read(place, name)
        inside = place.value(name)
        return self.read(Fields(inside, place.path_of(name)), member) if isinstance(inside, dict) else _SILENT


# The strongest first. A budget stands before the switches beside it, because a budget of 0 means off.
_ROWS = (
    _Row("thinking_budget", _budget),
    _Row("enable_thinking", _switch),
    _Row("thinking", _switch_word_or_object),
    _Row("thinking.budget_tokens", _budget),
    _Row("thinking.type", _word),
    _Row("reasoning_effort", _word),
    _Row("reasoning", _switch_word_or_object),
    _Row("reasoning.max_tokens", _budget),
    _Row("reasoning.enabled", _switch),
    _Row("reasoning.effort", _word),
    _Row("reasoning.level", _word),
    _Row("reasoning.type", _word),
    _Row("output_config", _object),
    _Row("output_config.effort", _word),
)
# Names that some templates have for the same, and no protocol.
_ROWS_OF_TEMPLATES = (_Row("thinking_mode", _word), _Row("thinking_effort", _word))
