"""Finds the session id that a client sent, in any of its usual places. The first one found wins.

Different ids give different names, however long they are. A word that clients send where an id should be
(`default`, `null`) groups requests, but says nothing about which conversation they belong to.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence

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
PRIORITY_HEADER = "x-start-llm-priority"
CLASS_OF_CLAUDE_CODE, SUBAGENT_OF_CODEX = "x-claude-code-request-class", "x-openai-subagent"
READ_HEADERS = frozenset(
    (*CONVERSATION_HEADERS, *HEADERS, _OF_ITS_AGENT, PRIORITY_HEADER, CLASS_OF_CLAUDE_CODE, SUBAGENT_OF_CODEX)
)
"""Every header that is read here and in `protocols.urgency`."""
_LONGEST = 200
_OF_JSON, _OF_DIGEST = "[", "#"
"""A name that begins so is a JSON array of ids, or the digest of one; any other is an id as it was sent."""
_PLACEHOLDERS = frozenset(
    "-1 agent anonymous assistant chat conversation default empty false global guest id local main n/a nan "
    "new nil none null [object_object] root session shared string temp test thread true undefined unknown "
    "user uuid".split()
)


def session_id(body: Fields, headers: Mapping[str, str]) -> str | None:
    """Return the explicit session id of a request, or None. Never raises, because it is only a hint."""
    sent_id = next(_ids([*_under(BODY_KEYS, body), _claude_session(body), *_in(HEADERS, headers)]), None)
    return sent_id and _name(sent_id)


def conversation_id(body: Fields, headers: Mapping[str, str]) -> str | None:
    """Return the client's id for exactly this conversation, or None. A placeholder is no such id.

    Sub-agents of Claude Code send the session of their parent agent, and an agent id of their own.
    """
    sent = [*_under(CONVERSATION_KEYS, body), _claude_session(body), *_in(CONVERSATION_HEADERS, headers)]
    chosen = next((sent_id for sent_id in _ids(sent) if not _is_placeholder(sent_id)), None)
    return chosen and _name(chosen, *_ids([headers.get(_OF_ITS_AGENT)]))


def lineage(body: Fields) -> Lineage:
    """Return the parent and the branch of the session, if the request states them. Never raises."""
    parent, branch = (next(_ids(_under(keys, body)), None) for keys in (PARENT_KEYS, BRANCH_KEYS))
    return Lineage(parent=parent and _name(parent), branch=branch and _name(branch))


def _under(keys: Sequence[str], body: Fields) -> list[Json]:
    places = [body.data, *(_object(body.data.get(name)) for name in NESTED_OBJECTS)]
    return [place.get(key) for place in places for key in keys]


def _in(names: Sequence[str], headers: Mapping[str, str]) -> list[Json]:
    return [headers.get(name) for name in names]


def _ids(candidates: Sequence[Json]) -> Iterator[str]:
    """Yield the candidates that are ids, without blanks around them."""
    for value in candidates:
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            yield str(value).strip()


def _name(*ids: str) -> str:
    """Return a name for these ids that no other ids have, of at most 200 characters.

    It is the id itself where it is one short id. Several are written as JSON, which keeps them apart; of what
    is too long a digest is taken.
    """
    is_plain = len(ids) == 1 and not ids[0].startswith((_OF_JSON, _OF_DIGEST))
    name = ids[0] if is_plain else json.dumps(ids)
    if len(name) <= _LONGEST:
        return name
    return _OF_DIGEST + hashlib.blake2b(json.dumps(ids).encode(), digest_size=32).hexdigest()


def _is_placeholder(sent_id: str) -> bool:
    """Return whether clients send this where they have no id: such a word, or zeros alone (a nil UUID)."""
    word = sent_id.casefold().replace(" ", "_")
    return word in _PLACEHOLDERS or not word.strip("0-_.")


def _object(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def _claude_session(body: Fields) -> Json:
    """Return the session in `metadata.user_id`: a JSON string now, `..._session_<id>` in older clients."""
    user_id = _object(body.data.get("metadata")).get("user_id")
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        return _object(parse_embedded(user_id)).get("session_id")
    return user_id.partition("_session_")[2] or None
