"""Finds the places in a prompt up to which its client asks to keep it."""

from collections import deque
from collections.abc import Sequence

from start_llm.core.chat import KeptPlace, Message

MOST_KEPT = 4
"""Places of a request: Anthropic refuses more, and OpenAI takes the last ones."""


def marked_places(messages: Sequence[Message]) -> list[tuple[int, KeptPlace]]:
    """Return the last places of a request that are marked, in its order, with their messages' indices."""
    marked = [(at, place) for at, message in enumerate(messages) for place in message.kept]
    return marked[-MOST_KEPT:]


def is_at_end(place: KeptPlace, message: Message) -> bool:
    """Return whether a place is at the end of its message."""
    is_behind_text = place.characters >= len(message.content.rstrip()) and not message.tool_calls
    return place.characters < 0 or is_behind_text


def places_in_order(sent: Sequence[Message], ordered: Sequence[Message], at: int) -> list[int]:
    """Return the indices in the template's order of a message, last, and of the results sent in front of it.

    Neighbouring results are shown in the order of their calls; every other message stays where it is.

    Args:
        ordered: the messages in the template's order. Transient ones at the end are not among them.
    """
    first = at
    while first > 0 and sent[first - 1].role == sent[at].role == "tool":
        first -= 1
    free: dict[str, deque[int]] = {}
    for place in range(first, len(ordered)):
        free.setdefault(ordered[place].content, deque()).append(place)
    alike = (free.get(message.content) for message in sent[first : at + 1])
    return [places.popleft() if places else at for places in alike]


def beginning_of(place: KeptPlace, asked: str, shown: str) -> str | None:
    """Return what is in front of a place inside a message.

    Args:
        asked: the message's content as the client sent it.
        shown: the same without what is removed from its beginning.

    Returns:
        None if more was changed, or if the place is in what was removed.
    """
    inside = place.characters - (len(asked) - len(shown))
    return shown[:inside] if asked.endswith(shown) and inside > 0 else None


def offset_in_text(beginning: str, content: str, written: str) -> int | None:
    """Return the character of a rendered text behind the beginning of a content.

    Args:
        written: the text up to the end of the message with this content.

    Returns:
        None if the template writes it otherwise.
    """
    body, end = content.strip(), len(written.rstrip())
    if not (content.startswith(beginning) and written.endswith(body, 0, end)):
        return None
    trimmed = len(content) - len(content.lstrip())
    return end - len(body) + min(max(len(beginning) - trimmed, 0), len(body))
