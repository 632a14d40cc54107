"""Implements POST /v1/cache/warm: which programs' beginnings are to be read, and what became of them."""

from collections.abc import Mapping, Sequence

from start_llm.core.chat import Json
from start_llm.core.prompt_report import Receipt
from start_llm.protocols.fields import Fields
from start_llm.protocols.receipts import receipt_json


def programs_of(body: Fields) -> tuple[str, ...]:
    """Return the names of the programs; none: all that the key has.

    Raises:
        InvalidRequest: they are no list of texts.
    """
    return body.texts("programs")


def warmed_body(receipts: Sequence[Receipt]) -> Mapping[str, Json]:
    """Return a receipt for each beginning that is in memory now, but for its last token."""
    beginnings: list[Json] = [receipt_json(receipt) for receipt in receipts]
    return {"object": "cache.warmed", "beginnings": beginnings}
