"""Returns stored responses and their input items, and deletes them."""

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound
from start_llm.protocols.fields import Fields
from start_llm.protocols.response_store import ResponseStore
from start_llm.protocols.responses.input import Item

_MOST, _USUAL = 100, 20
_PARTS = {"assistant": "output_text"}


def stored_body(responses: ResponseStore, tenant: bytes, name: str) -> Mapping[str, Json]:
    """Return the body of GET /v1/responses/{id}."""
    return responses.get(tenant, name).body


def deletion_body(responses: ResponseStore, tenant: bytes, name: str) -> Mapping[str, Json]:
    """Delete a response and return the body of DELETE /v1/responses/{id}."""
    responses.delete(tenant, name)
    return {"id": name, "object": "response", "deleted": True}


def input_items(responses: ResponseStore, tenant: bytes, name: str, query: Fields) -> dict[str, Json]:
    """Return a page of input items, newest first unless the query asks for another order.

    Args:
        query: `limit`, `order` and `after`, all of them text.

    Raises:
        NotFound: no such response, or `after` is not one of its items.
        InvalidRequest: names a member of the query.
    """
    limit, is_ascending = _limit(query), _is_ascending(query)
    items = [_as_listed(item) for item in responses.get(tenant, name).input]
    ordered = items if is_ascending else items[::-1]
    rest = ordered[_start(ordered, query) :]
    page = rest[:limit]
    return {
        "object": "list",
        "data": [*page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > limit,
    }


def _limit(query: Fields) -> int:
    text = query.text("limit") or str(_USUAL)
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= _MOST:
        raise query.fail("limit", f"must be a whole number from 1 to {_MOST}")
    return limit


def _is_ascending(query: Fields) -> bool:
    order = query.text("order") or "desc"
    if order not in ("asc", "desc"):
        raise query.fail("order", "must be 'asc' or 'desc'")
    return order == "asc"


def _start(items: Sequence[Item], query: Fields) -> int:
    after = query.text("after")
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
