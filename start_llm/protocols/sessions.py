"""The session that a client named, wherever it put that. First found wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json, Lineage
from start_llm.protocols.fields import Fields, parse_embedded

BODY_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id", "prompt_cache_key")
PARENT_KEYS = ("parent_session_id", "parent_id", "source_session_id", "origin_session_id")
BRANCH_KEYS = ("branch_id", "branch", "subsession_id", "subagent_id")
NESTED_OBJECTS = ("metadata", "extra_body")
HEADERS = (
    "x-claude-code-session-id",
    "x-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
    "x-client-request-id",
)
_BACKGROUND_CLASSES = ("subagent", "auxiliary")
_LONGEST = 200


def session_id(body: Fields, headers: Mapping[str, str]) -> str | None:
    """The explicit session id of a request, or None. Never an error: it is only a hint."""
    claude = _claude_session(_object(body.data.get("metadata")).get("user_id"))
    return _first([*_under(BODY_KEYS, body), claude, *(headers.get(name) for name in HEADERS)])


def lineage(body: Fields) -> Lineage:
    """Where the session comes from, if the request says so. Never an error."""
    return Lineage(parent=_first(_under(PARENT_KEYS, body)), branch=_first(_under(BRANCH_KEYS, body)))


def background(headers: Mapping[str, str]) -> bool:
    """Claude Code says of its requests which of them its user looks at, if it is asked to. Never an error."""
    return headers.get("x-claude-code-request-class", "").strip().lower() in _BACKGROUND_CLASSES


def _under(keys: Sequence[str], body: Fields) -> list[Json]:
    places = [body.data, *(_object(body.data.get(name)) for name in NESTED_OBJECTS)]
    return [place.get(key) for place in places for key in keys]


def _first(candidates: Sequence[Json]) -> str | None:
    for value in candidates:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()[:_LONGEST]
    return None


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _claude_session(user_id: Json) -> Json:
    """`metadata.user_id` is a JSON string in current clients, `..._session_<id>` in older ones."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        return _object(parse_embedded(user_id)).get("session_id")
    return user_id.partition("_session_")[2] or None
