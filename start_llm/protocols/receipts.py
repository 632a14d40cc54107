"""Reports on its prompt for a client that asks: where its tokens came from, and how far it is read."""

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.core.events import Prefilling
from start_llm.core.prompt_report import Receipt
from start_llm.protocols.fields import Fields

RECEIPT_HEADER = "x-start-llm-receipt"
_YES = ("1", "true")


def wants_receipt(body: Fields, headers: Mapping[str, str]) -> bool:
    """Return whether a receipt is asked for, by the field or the header.

    Raises:
        InvalidRequest: the field is no boolean.
    """
    return body.boolean("return_receipt") or headers.get(RECEIPT_HEADER, "").strip().lower() in _YES


def receipt_json(receipt: Receipt) -> dict[str, Json]:
    """Return a receipt. The first five members behind `prompt_tokens` sum to it, and the ranges cover it.

    Where the request marks places to be kept, they follow: `tokens` is null for one that is not kept.
    """
    counts: dict[str, Json] = {
        "prompt_tokens": receipt.prompt,
        "from_memory": receipt.from_memory,
        "from_disk": receipt.from_disk,
        "read": receipt.read,
        "told": receipt.note_tokens,
        "unread": receipt.unread,
        "read_ahead": receipt.read_ahead,
        "drafted": receipt.drafted,
        "ranges": [part._asdict() for part in receipt.ranges],
    }
    breakpoints: list[Json] = [
        {"tokens": (receipt.is_kept and part.tokens) or None, "ttl_s": part.seconds} for part in receipt.kept
    ]
    return {**counts, "breakpoints": breakpoints} if breakpoints else counts


def warmed_body(receipts: Sequence[Receipt]) -> Mapping[str, Json]:
    """Return a receipt for each beginning that is in memory now, but for its last token."""
    beginnings: list[Json] = [receipt_json(receipt) for receipt in receipts]
    return {"object": "cache.warmed", "beginnings": beginnings}


def progress_json(progress: Prefilling) -> dict[str, Json]:
    """Return `prompt_progress` as llama.cpp's server has it (its pull request 15827)."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.done,
        "time_ms": round(1000 * progress.seconds),
    }
