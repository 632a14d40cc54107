"""Decides whether anybody waits for a request. If not, it gives way to others (`engine.schedule`).

What a request says of itself counts first: a header, then its service tier. Else known clients tell in
headers of their own, or their side requests have a shape that no other request has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from start_llm.core.chat import ChatRequest, GenerationRequest
from start_llm.protocols.fields import Fields
from start_llm.protocols.sessions import CLASS_OF_CLAUDE_CODE, PRIORITY_HEADER, SUBAGENT_OF_CODEX

_TITLE_MEMBERS = frozenset({"title", "branch"})


@dataclass(frozen=True, slots=True)
class SideRequest:
    """What a client sends beside the conversation, and nobody waits for.

    Attributes:
        what: the request, in words.
        source: where this was seen.
        is_it: whether a request is one, by its lower-case headers and what it asks.
    """

    what: str
    source: str
    is_it: Callable[[Mapping[str, str], ChatRequest], bool]


def is_background(body: Fields, headers: Mapping[str, str], request: GenerationRequest) -> bool:
    """Return whether a request gives way to all that somebody waits for. Never raises: it is only a hint."""
    priority = _word(headers, PRIORITY_HEADER)
    if priority in ("background", "normal"):
        return priority == "background"
    tier = body.value("service_tier")
    if tier in ("flex", "priority", "fast"):
        return tier == "flex"
    return isinstance(request, ChatRequest) and any(side.is_it(headers, request) for side in SIDE_REQUESTS)


def service_tier(body: Fields, headers: Mapping[str, str]) -> str | None:
    """Return how a request of OpenAI's protocols is served, in their words; None if it does not ask for that.

    There is nothing faster than `default`, so a reply to `priority` says this.
    """
    asked = body.value("service_tier")
    if not isinstance(asked, str):
        return None
    return "flex" if asked == "flex" and _word(headers, PRIORITY_HEADER) != "normal" else "default"


def _word(headers: Mapping[str, str], name: str) -> str:
    return headers.get(name, "").strip().lower()


def _begins(beginning: str) -> Callable[[Mapping[str, str], ChatRequest], bool]:
    """Return a check whether the first message, the client's own instructions, begins like this."""

    def begins_so(_: Mapping[str, str], request: ChatRequest) -> bool:
        first = request.messages[0]
        return first.role == "system" and first.content.lstrip().startswith(beginning)

    return begins_so


def _has(header: str, word: str) -> Callable[[Mapping[str, str], ChatRequest], bool]:
    return lambda headers, _: _word(headers, header) == word


def _asks_for_a_title(_: Mapping[str, str], request: ChatRequest) -> bool:
    """Return whether the reply is an object with a title, and a branch perhaps, and no tool is offered."""
    answer = request.form.answer
    members = answer.schema.get("properties") if answer and not request.tools else None
    return isinstance(members, dict) and "title" in members and members.keys() <= _TITLE_MEMBERS


SIDE_REQUESTS = (
    SideRequest(
        "Claude Code says that it is auxiliary: a title, a topic, a summary for its own use",
        "Claude Code 2.1.329 under CLAUDE_CODE_GATEWAY_HINT_HEADERS=1",
        _has(CLASS_OF_CLAUDE_CODE, "auxiliary"),
    ),
    SideRequest(
        "the title of a session: Claude Code, Qwen Code",
        "Claude Code 2.1.329, a recorded session in a terminal; Qwen Code 0.24.4, TITLE_SCHEMA",
        _asks_for_a_title,
    ),
    SideRequest(
        "the title of a session: opencode",
        "opencode 1.18.33: anomalyco/opencode, packages/opencode/src/agent/prompt/title.txt",
        _begins("You are a title generator."),
    ),
    SideRequest(
        "the title of a session: Qwen Code, where the form is a tool",
        "Qwen Code 0.24.4, TITLE_SYSTEM_PROMPT",
        _begins("Generate a concise, sentence-case title"),
    ),
    SideRequest(
        "memories of earlier sessions: Codex",
        "Codex 0.171.0, SubAgentSource",
        _has(SUBAGENT_OF_CODEX, "memory_consolidation"),
    ),
)
"""The side requests that are known. A wrong row costs a request the wait of one that nobody waits for."""
