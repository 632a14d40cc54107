"""Reads the places up to which clients ask to keep a prompt, in the fields of both vendors.

Anthropic's `cache_control` (anthropic 2.14) and OpenAI's `prompt_cache_breakpoint` (openai 3.57) mark a part
of a message, `cache_control` also a tool or the whole request. A mark that is damaged marks nothing:
everything is cached anyway.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from start_llm.core.chat import Json, KeptPlace, Message
from start_llm.protocols.fields import Fields

_SECONDS: Mapping[Json, int] = {"5m": 300, "30m": 1800, "1h": 3600, "12h": 43_200}
_OF_ANTHROPIC, _OF_OPENAI = "5m", "30m"
"""How long a place is kept if its mark does not say."""
_LONG_RETENTION_S = 86_400
WHOLE = -1
"""Characters of a place at the end of its message."""


def seconds_of(part: Mapping[str, Json], default_s: int | None = None) -> int | None:
    """Return for how long the prompt up to the end of a part is to be kept; None if it is not marked.

    Args:
        default_s: what holds for OpenAI's marks that do not say; None: half an hour.
    """
    control, mark = part.get("cache_control"), part.get("prompt_cache_breakpoint")
    if isinstance(control, dict) and control.get("type") == "ephemeral":
        return _seconds(control.get("ttl"), _SECONDS[_OF_ANTHROPIC])
    if isinstance(mark, dict) and mark.get("mode") == "explicit":
        return _seconds(mark.get("ttl"), default_s or _SECONDS[_OF_OPENAI])
    return None


def _seconds(ttl: Json, default_s: int) -> int:
    return _SECONDS.get(ttl, default_s) if isinstance(ttl, str) else default_s


def places(texts: Sequence[str], seconds: Sequence[int | None]) -> tuple[KeptPlace, ...]:
    """Return the marked places of a content.

    Args:
        texts: its parts, one behind the other.
        seconds: for each part, how long to keep the prompt up to its end; None: it is not marked.
    """
    ends = accumulate(map(len, texts))
    return tuple(KeptPlace(end, kept) for end, kept in zip(ends, seconds, strict=True) if kept)


def with_end_kept(messages: Sequence[Message], seconds: int | None) -> tuple[Message, ...]:
    """Return the messages, the end of the last of which is to be kept, if it is for any time."""
    if not seconds:
        return tuple(messages)
    *others, last = messages
    return (*others, replace(last, kept=(*last.kept, KeptPlace(WHOLE, seconds))))


def with_tools_kept(messages: Sequence[Message], tools: Iterable[Fields]) -> tuple[Message, ...]:
    """Return the messages with a place behind the tools, if one of these is marked.

    Templates show tools beside the system text or, without one, in front of the first message.
    """
    seconds = max((seconds_of(tool.data) or 0 for tool in tools), default=0)
    if not seconds:
        return tuple(messages)
    first, *others = messages
    place = KeptPlace(WHOLE if first.role == "system" else 0, seconds)
    return (replace(first, kept=(place, *first.kept)), *others)


def seconds_of_request(body: Fields) -> int | None:
    """Return for how long the end of a request's prompt is to be kept at least; None if it does not say.

    OpenAI's `prompt_cache_options.ttl` and, older, `prompt_cache_retention`; Anthropic's `cache_control` of
    the request.
    """
    options = body.value("prompt_cache_options")
    ttl = options.get("ttl") if isinstance(options, dict) else None
    if isinstance(ttl, str) and ttl in _SECONDS:
        return _SECONDS[ttl]
    if body.value("prompt_cache_retention") == "24h":
        return _LONG_RETENTION_S
    return seconds_of({"cache_control": body.value("cache_control")})


def applied_options(body: Fields) -> Json:
    """Return `prompt_cache_options` as a response tells them; None if the request has none.

    Breakpoints that nobody asked for are always set, whatever `mode` says.
    """
    options = body.value("prompt_cache_options")
    if not isinstance(options, dict):
        return None
    ttl = options.get("ttl")
    applied: dict[str, Json] = {
        "mode": "implicit",
        "ttl": ttl if ttl in ("30m", "12h") else _OF_OPENAI,
    }
    compared = options.get("comparison_response_id")
    return {**applied, "comparison_response_id": compared} if isinstance(compared, str) else applied
