"""What is compared, and never shown to a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

_SIZE = 16


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """A message without what clients change when they send it again. Not text: no tokenizer takes it."""

    data: bytes


@dataclass(frozen=True, slots=True)
class CanonicalKey:
    """Names a beginning of a conversation: the same for all that differ in nothing but drift."""

    digest: bytes

    @classmethod
    def of(cls, *parts: bytes) -> CanonicalKey:
        """Each part with its length in front, so that no two sequences of parts are the same bytes."""
        digest = hashlib.blake2b(digest_size=_SIZE)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return cls(digest.digest())


def chain(root: CanonicalKey, messages: Iterable[CanonicalMessage]) -> tuple[CanonicalKey, ...]:
    """A key for each prefix: the first message, the first two, and so on."""
    keys: list[CanonicalKey] = []
    for message in messages:
        root = CanonicalKey.of(root.digest, message.data)
        keys.append(root)
    return tuple(keys)
