"""Reads the thinking switch, the effort and the token budget of a request, from one table of fields.

`_ROWS` lists the fields and `_PLACES` the objects of a body that may contain them, both by precedence. The
place counts before the field, so a `reasoning_effort` at the top level overrides an `enable_thinking` in
`chat_template_kwargs`. `on`, `effort` and `budget` each come from the first field that sets them, so an
effort may occur together with `on=False`.

A wrong type at the top level is refused. The other places are free-form, so unreadable values there are
ignored. Unknown words are ignored everywhere, because clients invent levels.
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
"""Names in `chat_template_kwargs` that the server reads and then sets for the template itself."""

_PLACES = ("chat_template_kwargs", "metadata", "extra_body")  # searched after the top level
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
_LARGEST_BUDGET = 2**63 - 1  # more than any reasoning; also replaces infinity, which has no integer


def read_thinking(body: Fields) -> Thinking:
    """Return the thinking options of a request body of any protocol.

    Raises:
        InvalidRequest: names a field at the top level with a wrong type, or a budget that is not a count.
    """
    statements = list(_statements(body))
    return Thinking(
        on=_first(statement.on for statement in statements),
        effort=_first(statement.effort for statement in statements),
        budget=_first(statement.budget for statement in statements),
    )


def unread_template_options(options: Mapping[str, Json]) -> dict[str, Json]:
    """Return `chat_template_kwargs` without the values that `read_thinking` used.

    A value that it did not understand stays, because the template may understand it. `null` is dropped,
    because a template that only checks whether the name is defined would treat it as "off".
    """
    return {name: value for name, value in options.items() if not _is_consumed(name, value)}


def _is_consumed(name: str, value: Json) -> bool:
    if name not in CONSUMED_TEMPLATE_OPTIONS:
        return False
    return value is None or any(
        statement != _SILENT for statement in _lenient_statements({name: value}, _ROWS)
    )


def _statements(body: Fields) -> Iterator[Thinking]:
    """Yield the setting of every field, in order of precedence."""
    body.object("chat_template_kwargs")
    for row in _ROWS:
        yield row.says(body)
    for place in _PLACES:
        rows = (*_ROWS, *_ROWS_OF_TEMPLATES) if place == "chat_template_kwargs" else _ROWS
        yield from _lenient_statements(body.value(place), rows)


def _lenient_statements(value: Json, rows: Iterable[_EffortField]) -> Iterator[Thinking]:
    place = Fields(value if isinstance(value, dict) else {})
    for row in rows:
        try:
            yield row.says(place)
        except InvalidRequest:
            continue  # `metadata` or a template may use the same names for something else


def _first[T](values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _switch(fields: Fields, name: str) -> Thinking:
    return _SILENT if fields.value(name) is None else Thinking(on=fields.boolean(name))


def _word(fields: Fields, name: str) -> Thinking:
    return _WORDS.get((fields.text(name) or "").strip().lower(), _SILENT)


def _object(fields: Fields, name: str) -> Thinking:
    """Check the type. The members have rows of their own."""
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
    """Return a budget. It limits reasoning without turning it on; 0 turns it off."""
    number = fields.number(name, _ANY_NUMBER)
    if number is None:
        return _SILENT
    tokens = min(number, _LARGEST_BUDGET)
    if tokens < 0 or tokens % 1:
        raise fields.fail(name, "must be a whole number of tokens, 0 or more")
    return Thinking(budget=int(tokens)) if tokens else Thinking(on=False)


@dataclass(frozen=True, slots=True)
class _EffortField:
    """A field, or a member of an object field (`thinking.type`), and its reader."""

    path: str
    read: Callable[[Fields, str], Thinking]

    def says(self, place: Fields) -> Thinking:
        name, _, member = self.path.partition(".")
        if not member:
            return self.read(place, name)
        inside = place.value(name)
        return self.read(Fields(inside, place.path_of(name)), member) if isinstance(inside, dict) else _SILENT


# By precedence. A budget comes before the switches beside it, because a budget of 0 means off.
_ROWS = (
    _EffortField("thinking_budget", _budget),
    _EffortField("enable_thinking", _switch),
    _EffortField("thinking", _switch_word_or_object),
    _EffortField("thinking.budget_tokens", _budget),
    _EffortField("thinking.type", _word),
    _EffortField("reasoning_effort", _word),
    _EffortField("reasoning", _switch_word_or_object),
    _EffortField("reasoning.max_tokens", _budget),
    _EffortField("reasoning.enabled", _switch),
    _EffortField("reasoning.effort", _word),
    _EffortField("reasoning.level", _word),
    _EffortField("reasoning.type", _word),
    _EffortField("output_config", _object),
    _EffortField("output_config.effort", _word),
)
# Names that some templates use but no protocol.
_ROWS_OF_TEMPLATES = (_EffortField("thinking_mode", _word), _EffortField("thinking_effort", _word))


# The server sets these. If clients could set them, the template could do something else.
_RESERVED = frozenset(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message "
    "return_dict return_tensors return_assistant_tokens_mask padding truncation max_length "
    "tokenizer_kwargs strftime_now".split()
)


def read_template_options(body: Fields) -> Mapping[str, Json]:
    """Return the options that the server neither reads nor sets itself.

    Raises:
        InvalidRequest: names an option that the server sets.
    """
    options = body.object("chat_template_kwargs")
    if options is None:
        return {}
    for name in options.data:
        if name in _RESERVED:
            raise options.fail(name, "is decided by the server")
    return unread_template_options(options.data)
