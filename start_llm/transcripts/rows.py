"""How transcripts are written as rows of a database (`storage.database`)."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from start_llm.core.canonical import CanonicalKey, Field, OmittedText
from start_llm.storage.database_file import decode_json, encode_json
from start_llm.transcripts.guard import Claims, MessageDetails

_KEY_BYTES = 16


class VariantRow(NamedTuple):
    """A variant as it is written.

    Attributes:
        parent: number of the parent; None if it has none.
        delta: the tokens after the parent's.
    """

    key: CanonicalKey
    depth: int
    length: int
    parent: int | None
    session: str
    claims: Claims
    details: tuple[MessageDetails, ...]
    delta: array[int]

    def encode(self) -> bytes:
        """Return the value: length of the JSON, the JSON, the key, and the tokens in this machine's order."""
        described = encode_json(
            (self.depth, self.length, self.parent, self.session, claims_json(self.claims), self.details)
        )
        size = len(described).to_bytes(4, "little")
        return b"".join((size, described, self.key.digest, self.delta.tobytes()))

    @classmethod
    def decode(cls, data: bytes) -> VariantRow:
        """Read a row.

        Raises:
            ValueError, TypeError: it is none (see `UNREADABLE`).
        """
        end = 4 + int.from_bytes(data[:4], "little")
        depth, length, parent, session, claims, details = decode_json(data[4:end])
        key, delta = CanonicalKey(data[end : end + _KEY_BYTES]), array("I")
        delta.frombytes(data[end + _KEY_BYTES :])
        read = tuple(map(_details, details))
        return cls(key, depth, length, parent, session, claims_of(claims), read, delta)


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


def _details(value: Any) -> MessageDetails:
    omitted, reasoning, is_ours, noted, note_tokens = value
    return MessageDetails(
        omitted=tuple(OmittedText(*item) for item in omitted),
        reasoning=None if reasoning is None else bytes.fromhex(reasoning),
        is_ours=is_ours,
        noted=tuple((Field(*item), text) for item, text in noted),
        note_tokens=note_tokens,
    )
