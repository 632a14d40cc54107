"""Reads the generation fields that have (nearly) the same name in every protocol."""

from __future__ import annotations

from start_llm.core.chat import GenerationOptions
from start_llm.core.sampling import BIAS_RANGE, RANGES, SEED_RANGE, Range, SamplingChoice
from start_llm.protocols.fields import Fields

TOKEN_COUNT = Range(1, 2**31 - 1)
_LIMIT = Range(-1, TOKEN_COUNT.high)
NO_LIMIT = -1
"""What LM Studio and llama.cpp, and clients made for them, call no limit."""
_MAX_STOPS = 16
_LONGEST_STOP = 1000


def read_generation(
    body: Fields, *, max_tokens: int | None, stop: str, vocabulary: int, top_logprobs: int | None = None
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


def read_limit(body: Fields, *names: str) -> int | None:
    """Return the limit of the reply, from the first of these fields that is given; None for no limit.

    Raises:
        InvalidRequest: names the first of them that is neither a number of tokens nor -1.
    """
    limits = [_limit(body, name) for name in names if body.value(name) is not None]
    return limits[0] if limits and limits[0] != NO_LIMIT else None


def _limit(body: Fields, name: str) -> int | None:
    limit = body.integer(name, _LIMIT)
    if limit == 0:
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
