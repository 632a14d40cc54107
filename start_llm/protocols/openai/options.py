"""Reads the generation fields that OpenAI's protocols share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from start_llm.core.chat import GenerationOptions, Json
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields, type_name
from start_llm.protocols.generation_fields import read_generation, read_limit


def read_options(body: Fields, *, vocabulary: int, top_logprobs: int | None) -> GenerationOptions:
    """Read every field that shapes the reply. `max_completion_tokens` wins over `max_tokens`."""
    return read_generation(
        body,
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop="stop",
        vocabulary=vocabulary,
        top_logprobs=top_logprobs,
    )


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that may ask for an unsupported feature. `accepts` returns True for values that do not."""

    name: str
    accepts: Callable[[Json], bool]
    problem: str


def refuse_unsupported(body: Fields, rows: tuple[UnsupportedField, ...]) -> None:
    """Refuse unsupported values. Ignoring them would return a wrong reply.

    Raises:
        InvalidRequest: names the first such field.
    """
    for row in rows:
        value = body.value(row.name)
        if value is not None and not row.accepts(value):
            raise body.fail(row.name, row.problem)


def is_one(value: Json) -> bool:
    return value == 1 and not isinstance(value, bool)


def is_false(value: Json) -> bool:
    return value is False


UNSUPPORTED_FIELDS = (UnsupportedField("n", is_one, "must be 1: one reply is made for each request"),)


def read_stream(body: Fields) -> tuple[bool, bool]:
    """Return `stream`, and True if the stream ends with a separate usage chunk."""
    stream = body.boolean("stream")
    options = body.object("stream_options")
    return stream, options.boolean("include_usage") if options else False


def token_ids(items: list[Json], path: str, vocabulary: int) -> tuple[int, ...]:
    """Return a prompt of token ids.

    Raises:
        InvalidRequest: names an item that is not a token id of the vocabulary.
    """
    for index, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int):
            raise InvalidRequest(
                f"'{path}[{index}]' must be a token id, not {type_name(item)}.", param=f"{path}[{index}]"
            )
        if not 0 <= item < vocabulary:
            raise InvalidRequest(
                f"'{path}[{index}]' must be a token id from 0 to {vocabulary - 1}.", param=f"{path}[{index}]"
            )
    return tuple(cast("list[int]", items))
