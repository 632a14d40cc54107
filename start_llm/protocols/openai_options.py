"""The generation fields that OpenAI's protocols share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from start_llm.core.chat import GenerationOptions, Json
from start_llm.core.errors import InvalidRequest
from start_llm.protocols.fields import Fields, type_name
from start_llm.protocols.generation import TOKEN_COUNT, read_generation


def read_options(body: Fields, *, vocabulary: int, top_logprobs: int | None) -> GenerationOptions:
    """Every field that shapes the reply. `max_completion_tokens` wins over `max_tokens`."""
    max_tokens = body.integer("max_tokens", TOKEN_COUNT)
    return read_generation(
        body,
        max_tokens=body.integer("max_completion_tokens", TOKEN_COUNT) or max_tokens,
        stop="stop",
        vocabulary=vocabulary,
        top_logprobs=top_logprobs,
    )


@dataclass(frozen=True, slots=True)
class NotYet:
    """A field whose value may ask for something that is not built; `accepts` tells the values that do not."""

    name: str
    accepts: Callable[[Json], bool]
    problem: str


def refuse_unbuilt(body: Fields, rows: tuple[NotYet, ...]) -> None:
    """A value that cannot be honoured is refused; silence would be a wrong answer.

    Raises:
        InvalidRequest: names the first such field.
    """
    for row in rows:
        value = body.value(row.name)
        if value is not None and not row.accepts(value):
            raise body.fail(row.name, row.problem)


def is_one(value: Json) -> bool:
    return value == 1 and not isinstance(value, bool)


def is_none_word(value: Json) -> bool:
    return value in ("none", "")


def is_switched_off(value: Json) -> bool:
    return value is False or (isinstance(value, dict) and not value.get("enabled"))


COMMON_NOT_YET = (
    NotYet("n", is_one, "must be 1: one reply is made for each request"),
    NotYet("adapter", is_none_word, "names an adapter, and none is mounted on this server"),
    NotYet("hlg", is_switched_off, "asks for tone-curve sampling, which this server does not have"),
)


def read_stream(body: Fields) -> tuple[bool, bool]:
    """`stream`, and whether the stream ends with a usage chunk of its own."""
    stream = body.boolean("stream")
    options = body.object("stream_options")
    return stream, options.boolean("include_usage") if options else False


def token_ids(items: list[Json], path: str, vocabulary: int) -> tuple[int, ...]:
    """A prompt that is given as token ids."""
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
