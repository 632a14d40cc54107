"""Claims and details as they are written in rows of the database, and read from them."""

from __future__ import annotations

from typing import Any

from start_llm.core.canonical import Field, OmittedText
from start_llm.transcripts.recorded_details import Claims, MessageDetails


def claims_json(claims: Claims) -> list[object]:
    """Return claims as JSON."""
    return [
        list(claims.names),
        claims.is_delivered,
        list(claims.ids),
        claims.reply_surprisal_bits,
        claims.reasoning_surprisal_bits,
    ]


def claims_of(value: Any) -> Claims:
    """Return the claims of `claims_json`."""
    names, is_delivered, ids, reply_bits, reasoning_bits = value
    return Claims(dict.fromkeys(names), is_delivered, dict.fromkeys(ids), reply_bits, reasoning_bits)


def details_of(value: Any) -> MessageDetails:
    omitted, reasoning, is_ours, noted, note_tokens = value
    return MessageDetails(
        omitted=tuple(OmittedText(*item) for item in omitted),
        reasoning=None if reasoning is None else bytes.fromhex(reasoning),
        is_ours=is_ours,
        noted=tuple((Field(*item), text) for item, text in noted),
        note_tokens=note_tokens,
    )
