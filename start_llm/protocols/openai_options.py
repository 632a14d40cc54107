"""The generation fields that OpenAI's protocols share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from start_llm.core.chat import GenerationOptions, Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.sampling import BIAS_RANGE, RANGES, SEED_RANGE, Range, SamplingChoice
from start_llm.protocols.effort import unread_template_options
from start_llm.protocols.fields import Fields, type_name

TOKEN_COUNT = Range(1, 2**31 - 1)
_MOST_STOPS = 16
_LONGEST_STOP = 1000
# The server decides these; a client that could set them could make the template do something else.
_RESERVED_TEMPLATE_OPTIONS = frozenset(
    "messages conversation tools tokenize chat_template add_generation_prompt continue_final_message "
    "return_dict return_tensors return_assistant_tokens_mask padding truncation max_length "
    "tokenizer_kwargs strftime_now".split()
)


def read_options(body: Fields, *, vocabulary: int, top_logprobs: int | None) -> GenerationOptions:
    """Every field that shapes the reply. `max_completion_tokens` wins over `max_tokens`."""
    max_tokens = body.integer("max_tokens", TOKEN_COUNT)
    return GenerationOptions(
        max_tokens=body.integer("max_completion_tokens", TOKEN_COUNT) or max_tokens,
        stop=_stops(body),
        sampling=_sampling(body),
        presence_penalty=body.number("presence_penalty", RANGES["presence_penalty"]) or 0.0,
        frequency_penalty=body.number("frequency_penalty", RANGES["frequency_penalty"]) or 0.0,
        logit_bias=_logit_bias(body, vocabulary),
        seed=body.integer("seed", SEED_RANGE),
        top_logprobs=top_logprobs,
    )


def _sampling(body: Fields) -> SamplingChoice:
    return SamplingChoice(
        temperature=body.number("temperature", RANGES["temperature"]),
        top_p=body.number("top_p", RANGES["top_p"]),
        top_k=body.integer("top_k", RANGES["top_k"]),
        min_p=body.number("min_p", RANGES["min_p"]),
        repetition_penalty=body.number("repetition_penalty", RANGES["repetition_penalty"]),
        repetition_context_size=body.integer("repetition_context_size", RANGES["repetition_context_size"]),
    )


def _stops(body: Fields) -> tuple[str, ...]:
    stops = body.texts("stop")
    if len(stops) > _MOST_STOPS:
        raise body.fail("stop", f"has {len(stops)} strings; at most {_MOST_STOPS} are accepted")
    if any(not stop or len(stop) > _LONGEST_STOP for stop in stops):
        raise body.fail("stop", f"must hold strings of 1 to {_LONGEST_STOP} characters")
    return tuple(dict.fromkeys(stops))


def _logit_bias(body: Fields, vocabulary: int) -> dict[int, float]:
    entries = body.object("logit_bias")
    if entries is None:
        return {}
    biases: dict[int, float] = {}
    for key in entries.data:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocabulary):
            raise body.fail("logit_bias", f"has the key {key!r}; keys are token ids below {vocabulary}")
        bias = entries.number(key, BIAS_RANGE)
        if bias is not None:
            biases[int(key)] = bias
    return biases


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


def is_free_choice(value: Json) -> bool:
    return value in ("auto", "none")


FREE_TOOL_CHOICE = NotYet(
    "tool_choice", is_free_choice, "must be 'auto' or 'none': a forced call is not supported yet"
)
COMMON_NOT_YET = (
    NotYet("n", is_one, "must be 1: one reply is made for each request"),
    NotYet("adapter", is_none_word, "names an adapter, and none is mounted on this server"),
    NotYet("hlg", is_switched_off, "asks for tone-curve sampling, which this server does not have"),
)


def read_template_options(body: Fields) -> Mapping[str, Json]:
    """Variables for the chat template, without those that are the server's own."""
    options = body.object("chat_template_kwargs")
    if options is None:
        return {}
    for name in options.data:
        if name in _RESERVED_TEMPLATE_OPTIONS:
            raise options.fail(name, "is decided by the server")
    return unread_template_options(options.data)


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
