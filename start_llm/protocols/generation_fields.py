"""Reads the generation fields that have (nearly) one name in every protocol, and those of OpenAI's."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

from start_llm.core.chat import GenerationOptions, Json
from start_llm.core.errors import InvalidRequest
from start_llm.core.sampling import BIAS_RANGE, RANGES, SEED_RANGE, Range, SamplingChoice
from start_llm.protocols.fields import Fields, type_name

TOKEN_COUNT = Range(1, 2**31 - 1)
TOP_LOGPROBS = Range(0, 20)
_LIMIT = Range(-1, TOKEN_COUNT.high)
NO_LIMIT = -1
"""What LM Studio and llama.cpp, and clients made for them, call no limit."""
COMPLETION_LIMITS = ("max_completion_tokens", "max_tokens", "n_predict")
"""The limits of a completion; the first one that is given counts. The last one is llama.cpp's."""
_PREWARMING_LIMITS = frozenset({"n_predict"})
"""Limits that may be 0 everywhere: llama.cpp reads the prompt into its cache then."""
_MAX_STOPS = 16
_LONGEST_STOP = 1000


def read_generation(
    body: Fields,
    *,
    max_tokens: int | None,
    vocabulary: int,
    stop: str = "stop",
    top_logprobs: int | None = None,
) -> GenerationOptions:
    """Read every field that shapes the reply, except its length.

    Args:
        stop: name of the field with the stop strings.
    """
    return GenerationOptions(
        max_tokens=max_tokens,
        stop=_stops(body, stop),
        sampling=_sampling(body),
        presence_penalty=body.number("presence_penalty", RANGES["presence_penalty"]) or 0.0,
        frequency_penalty=body.number("frequency_penalty", RANGES["frequency_penalty"]) or 0.0,
        logit_bias=_logit_bias(body, vocabulary),
        seed=body.integer("seed", SEED_RANGE),
        top_logprobs=top_logprobs,
        adapter=body.text("adapter") or "",
    )


def read_limit(body: Fields, *names: str, prewarming: Collection[str] = _PREWARMING_LIMITS) -> int | None:
    """Return the limit of the reply, from the first of these fields that is given; None for no limit.

    It is 0 if `prompt_cache_options.prewarm` asks for no reply, as openai 3.57 has it.

    Args:
        prewarming: fields that may be 0, which asks for the same.

    Raises:
        InvalidRequest: names the first field that is neither a number of tokens nor -1, or no boolean.
    """
    limits = [_limit(body, name, prewarming) for name in names if body.value(name) is not None]
    options = body.object("prompt_cache_options")
    if options and options.boolean("prewarm"):
        return 0
    return limits[0] if limits and limits[0] != NO_LIMIT else None


def _limit(body: Fields, name: str, prewarming: Collection[str]) -> int | None:
    limit = body.integer(name, _LIMIT)
    if limit == 0 and name not in prewarming:
        raise body.fail(name, f"must be {TOKEN_COUNT}, or {NO_LIMIT} for no limit")
    return limit


def _sampling(body: Fields) -> SamplingChoice:
    curve = _tone_curve(body)
    return SamplingChoice(
        temperature=body.number("temperature", RANGES["temperature"]),
        top_p=body.number("top_p", RANGES["top_p"]),
        top_k=body.integer("top_k", RANGES["top_k"]),
        min_p=body.number("min_p", RANGES["min_p"]),
        repetition_penalty=body.number("repetition_penalty", RANGES["repetition_penalty"]),
        repetition_context_size=body.integer("repetition_context_size", RANGES["repetition_context_size"]),
        hlg=_switch(curve, "enabled"),
        hlg_width=curve.number("width", RANGES["hlg_width"]),
        hlg_shoulder=curve.number("shoulder", RANGES["hlg_shoulder"]),
        hlg_toe=curve.number("toe", RANGES["hlg_toe"]),
        hlg_pivot_offset=curve.number("pivot_offset", RANGES["hlg_pivot_offset"]),
    )


def _tone_curve(body: Fields) -> Fields:
    """Return the members of `hlg`: an object, or a boolean for its `enabled` alone."""
    value = body.value("hlg")
    if isinstance(value, bool):
        return Fields({"enabled": value}, body.path_of("hlg"))
    return body.object("hlg") or Fields({})


def _switch(fields: Fields, name: str) -> bool | None:
    """Return a boolean; None if it is absent."""
    return fields.boolean(name) if fields.value(name) is not None else None


def _stops(body: Fields, name: str) -> tuple[str, ...]:
    stops = body.texts(name)
    if len(stops) > _MAX_STOPS:
        raise body.fail(name, f"has {len(stops)} strings; at most {_MAX_STOPS} are accepted")
    if any(not stop or len(stop) > _LONGEST_STOP for stop in stops):
        raise body.fail(name, f"must hold strings of 1 to {_LONGEST_STOP} characters")
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
class UnsupportedField:
    """A field that may ask for an unsupported feature. Only the value `accepted` does not; None: all do."""

    name: str
    accepted: Json
    problem: str


def refuse_unsupported(body: Fields, rows: tuple[UnsupportedField, ...]) -> None:
    """Refuse unsupported values. Ignoring them would return a wrong reply.

    Raises:
        InvalidRequest: names the first such field.
    """
    for row in rows:
        value = body.value(row.name)
        is_accepted = value == row.accepted and isinstance(value, bool) == isinstance(row.accepted, bool)
        if not (_says_nothing(value) or is_accepted):
            raise body.fail(row.name, row.problem)


def _says_nothing(value: Json) -> bool:
    """Return whether a field is as good as absent: null, or an object whose members say nothing either."""
    return value is None or (isinstance(value, dict) and not any(value.values()))


def refuse_demands(body: Fields, instead: Mapping[str, str], harmless: Collection[str] = ()) -> None:
    """Refuse fields that demand a form of the reply that they would not get.

    Args:
        instead: for each of their names what a client may send in place of it.
        harmless: names of fields whose value demands nothing here.

    Raises:
        InvalidRequest: names the field, and what to send.
    """
    for name, field in instead.items():
        value = body.value(name)
        if isinstance(value, dict):
            value = {member: inner for member, inner in value.items() if inner}
        if value and value != FREE_TEXT and name not in harmless:
            raise body.fail(name, f"is not supported; send {field}")


FREE_TEXT: Json = {"type": "text"}
"""The form of a reply that has none."""
FORMS_ELSEWHERE = ("guided_choice", "guided_regex", "structured_outputs", "json_schema")
"""Fields that demand a form of the reply from vLLM and llama.cpp, and that mean nothing here."""
GRAMMARS_ELSEWHERE = ("guided_grammar", "grammar")
"""Those that demand it in the notation of a grammar."""
UNSUPPORTED_FIELDS = (UnsupportedField("n", 1, "must be 1: one reply is made for each request"),)


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
