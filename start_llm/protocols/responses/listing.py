"""Implements GET /v1/responses/{id}/input_items: the input of a stored response, in pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound
from start_llm.protocols.base import KeptResponses
from start_llm.protocols.fields import Fields

type Item = Mapping[str, Json]

_MOST, _USUAL = 100, 20
_PARTS = {"assistant": "output_text"}


def input_items(context: KeptResponses, name: str, asked: Fields) -> dict[str, Json]:
    """Return a page of input items, newest first unless the query asks for another order.

    Args:
        asked: `limit`, `order` and `after` of the query, all of them text.

    Raises:
        NotFound: no such response, or `after` is not one of its items.
        InvalidRequest: names a member of the query.
    """
    limit, is_ascending = _limit(asked), _is_ascending(asked)
    items = [_as_listed(item) for item in context.responses.get(context.tenant, name).input]
    ordered = items if is_ascending else items[::-1]
    rest = ordered[_start(ordered, asked) :]
    page = rest[:limit]
    return {
        "object": "list",
        "data": [*page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > limit,
    }


def _limit(asked: Fields) -> int:
    text = asked.text("limit") or str(_USUAL)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= _MOST:
        raise asked.fail("limit", f"must be a whole number from 1 to {_MOST}")
    return limit


def _is_ascending(asked: Fields) -> bool:
    order = asked.text("order") or "desc"
    if order not in ("asc", "desc"):
        raise asked.fail("order", "must be 'asc' or 'desc'")
    return order == "asc"


def _start(items: Sequence[Item], asked: Fields) -> int:
    after = asked.text("after")
    if after is None:
        return 0
    at = next((at for at, item in enumerate(items) if item["id"] == after), None)
    if at is None:
        raise NotFound(f"There is no item {after!r} in the input of this response.", param="after")
    return at + 1


def _as_listed(item: Item) -> dict[str, Json]:
    """Return an item for a list, in which a plain text becomes one part."""
    content = item.get("content")
    if not isinstance(content, str):
        return {**item}
    kind = _PARTS.get(str(item.get("role")), "input_text")
    return {"type": "message", **item, "content": [{"type": kind, "text": content}]}
