"""Finds the session id that a client sent, in any of its usual places. The first one found wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json, Lineage
from start_llm.protocols.fields import Fields, parse_embedded

CONVERSATION_KEYS = ("session_id", "conversation_id", "thread_id", "chat_id")
BODY_KEYS = (*CONVERSATION_KEYS, "prompt_cache_key")
"""`prompt_cache_key`, like some of the headers, may be shared by many conversations."""
PARENT_KEYS = ("parent_session_id", "parent_id", "source_session_id", "origin_session_id")
BRANCH_KEYS = ("branch_id", "branch", "subsession_id", "subagent_id")
NESTED_OBJECTS = ("metadata", "extra_body")
_OF_CLAUDE_CODE, _OF_ITS_AGENT = "x-claude-code-session-id", "x-claude-code-agent-id"
CONVERSATION_HEADERS = (_OF_CLAUDE_CODE, "thread-id", "x-session-id", "session_id", "session-id")
HEADERS = (
    _OF_CLAUDE_CODE,
    "x-session-id",
    "session_id",
    "session-id",
    "x-session-affinity",
    "x-client-request-id",
)
_CLASS_OF_CLAUDE_CODE = "x-claude-code-request-class"
READ_HEADERS = frozenset((*CONVERSATION_HEADERS, *HEADERS, _OF_ITS_AGENT, _CLASS_OF_CLAUDE_CODE))
"""Every header that is looked at here."""
_BACKGROUND_CLASSES = ("subagent", "auxiliary")
_LONGEST = 200


def session_id(body: Fields, headers: Mapping[str, str]) -> str | None:
    """Return the explicit session id of a request, or None. Never raises, because it is only a hint."""
    claude = _claude_session(_object(body.data.get("metadata")).get("user_id"))
    return _first([*_under(BODY_KEYS, body), claude, *(headers.get(name) for name in HEADERS)])


def conversation_id(body: Fields, headers: Mapping[str, str]) -> str | None:
    """Return the client's id for exactly this conversation, or None.

    Sub-agents of Claude Code send the session of their parent agent, and an agent id of their own.
    """
    claude = _claude_session(_object(body.data.get("metadata")).get("user_id"))
    named = [headers.get(name) for name in CONVERSATION_HEADERS]
    found = _first([*_under(CONVERSATION_KEYS, body), claude, *named])
    agent = _first([headers.get(_OF_ITS_AGENT)])
    return f"{found} {agent}" if found and agent else found


def lineage(body: Fields) -> Lineage:
    """Return the parent and the branch of the session, if the request states them. Never raises."""
    return Lineage(parent=_first(_under(PARENT_KEYS, body)), branch=_first(_under(BRANCH_KEYS, body)))


def background(headers: Mapping[str, str]) -> bool:
    """Return True for a background request. Claude Code can send the class of each request. Never raises."""
    return headers.get(_CLASS_OF_CLAUDE_CODE, "").strip().lower() in _BACKGROUND_CLASSES


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
    """Return the session in `metadata.user_id`: a JSON string now, `..._session_<id>` in older clients."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        return _object(parse_embedded(user_id)).get("session_id")
    return user_id.partition("_session_")[2] or None
