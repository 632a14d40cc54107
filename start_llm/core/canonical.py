"""Types for comparing conversations. A model never reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

_SIZE = 16


type Kind = Literal["space", "own", "live", "block"]
"""The kind of an omitted text, which decides what a difference means.

`space` is white space at an end. `own` is client data that belongs to its message. `live` is a current value,
such as the time, and `block` is a current value of one project or chat.
"""


class OmittedText(NamedTuple):
    """A piece of a message that its key leaves out.

    Attributes:
        name: in words, for notes; several pieces may share one.
        kind: what a difference means.
        place: number of characters before it that the key does not leave out; for dates that the
            template writes, their index.
        text: the exact text.
        note_text: how a note states it.
        is_clock: it is a date, a clock or a time zone, and nothing else.
    """

    name: str
    kind: Kind
    place: int
    text: str
    note_text: str = ""
    is_clock: bool = False


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """A message without what clients change when they resend it. Bytes, so that no tokenizer takes it.

    Attributes:
        omitted: the pieces that `data` leaves out, in the order of the text, except those that are not
            content.
        omitted_chars: number of characters of its text that `data` leaves out.
    """

    data: bytes
    omitted: tuple[OmittedText, ...] = field(default=(), compare=False)
    omitted_chars: int = field(default=0, compare=False)


class CanonicalKey(NamedTuple):
    """The key of a conversation prefix. Prefixes that differ only by drift have the same key."""

    digest: bytes

    @classmethod
    def of(cls, *parts: bytes) -> CanonicalKey:
        """Return the key of these parts.

        The length of each part precedes it, so that different parts never give the same bytes.
        """
        pieces = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
        return cls(_digest(b"".join(pieces)))

    def with_message(self, message: CanonicalMessage) -> CanonicalKey:
        """Return the key of this prefix with one more message. A digest has a fixed length: none is added."""
        return CanonicalKey(_digest(self.digest + message.data))


def chain(root: CanonicalKey, messages: Iterable[CanonicalMessage]) -> tuple[CanonicalKey, ...]:
    """Return a key for each prefix: the first message, the first two, and so on."""
    keys: list[CanonicalKey] = []
    for message in messages:
        root = root.with_message(message)
        keys.append(root)
    return tuple(keys)


def reasoning_digest(reasoning: str | None) -> bytes | None:
    """Return the digest of reasoning, without white space around it; None if there is none."""
    return text_digest(reasoning) if reasoning and reasoning.strip() else None


def text_digest(text: str) -> bytes:
    """Return the digest of a text, without white space around it."""
    return _digest(text.strip().encode(errors="surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SIZE).digest()


class Field(NamedTuple):
    """The place of an omitted piece.

    Attributes:
        name: in words, for notes.
        message: index of its message.
        kind: what a difference means.
    """

    name: str
    message: int
    kind: Kind


class Ignored(NamedTuple):
    """A part of a message, or a whole message, that a rule ignores when conversations are compared.

    Attributes:
        rule, drift: the rule's name and drift class.
        digest: of the ignored text.
    """

    rule: str
    drift: str
    digest: bytes


class Root(NamedTuple):
    """The options and tools, which precede the first message."""

    options: CanonicalKey
    tools: CanonicalKey

    def key(self, tenant: bytes) -> CanonicalKey:
        """Return the key at which a chain starts. Different tenants, options or tools share nothing."""
        return CanonicalKey.of(tenant, self.options.digest, self.tools.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """A message of a conversation, and the prefix that ends with it.

    Attributes:
        canonical: as it is compared.
        key: of the prefix.
        exact: a name of the prefix that also covers what its key leaves out, and the reasoning that was sent.
        echoed: digest of the reasoning that the client sent; None if it sent none.
        shown: digest of the reasoning that the model sees if everything is rendered fresh.
        ids: the random names that the client sends with it: in the ids of its calls, and in the id of the
            reply that it says the message is (`core.ids`).
        can_hold_note: whether a note may follow it.
        ignored: what of it is not content.
    """

    role: str
    canonical: CanonicalMessage
    key: CanonicalKey
    exact: bytes
    echoed: bytes | None = None
    shown: bytes | None = None
    ids: frozenset[str] = frozenset()
    can_hold_note: bool = True
    ignored: tuple[Ignored, ...] = ()

    @property
    def omitted(self) -> tuple[OmittedText, ...]:
        """The pieces that its key leaves out."""
        return self.canonical.omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request in the form in which it is compared.

    Attributes:
        tenant: whose request it is.
        root: what precedes the first message.
        name: the client's name for this one conversation; None if it gives none.
        session: what its requests have in common, for statistics: a name, or the first messages.
        transient: messages after these that the next request will not have.
    """

    tenant: bytes
    root: Root
    messages: tuple[MessageRecord, ...]
    name: str | None
    session: str
    transient: tuple[Ignored, ...] = ()

    def without_last(self) -> Conversation:
        """Return the conversation as it was before its last message."""
        return replace(self, messages=self.messages[:-1])

    def with_shown(self, digests: Sequence[bytes | None]) -> Conversation:
        """Return the conversation with the digest of the reasoning that the model sees of each message."""
        pairs = zip(self.messages, digests, strict=True)
        return replace(self, messages=tuple(replace(message, shown=shown) for message, shown in pairs))

    @property
    def keys(self) -> tuple[CanonicalKey, ...]:
        """The keys of its prefixes, one for each message."""
        return tuple(message.key for message in self.messages)

    @property
    def canonical(self) -> tuple[CanonicalMessage, ...]:
        """Its messages as they are compared."""
        return tuple(message.canonical for message in self.messages)

    @property
    def names(self) -> dict[str, None]:
        """Its name as a set that keeps its order; empty if it has none."""
        return {self.name: None} if self.name else {}


def exact_keys(
    keys: Sequence[CanonicalKey], messages: Sequence[CanonicalMessage], echoed: Sequence[bytes | None]
) -> list[bytes]:
    """Return a name for each prefix: equal names mean equal bytes, except for what is not content."""
    exact, beside = list[bytes](), bytes(_SIZE)
    for key, message, reasoning in zip(keys, messages, echoed, strict=True):
        if message.omitted or reasoning:
            beside = _with_beside(beside, key, message, reasoning)
        exact.append(key.digest + beside)
    return exact


def exact_after(conversation: Conversation, reply: CanonicalMessage) -> bytes:
    """Return the exact name of a conversation with its reply, which clients resend without reasoning.

    A reply behind transient messages was drawn from words that no later request has: none is equal.
    """
    last = conversation.messages[-1]
    key, beside = last.key.with_message(reply), last.exact[_SIZE:]
    if conversation.transient:
        beside = CanonicalKey.of(beside, *(message.digest for message in conversation.transient)).digest
    return key.digest + (_with_beside(beside, key, reply, None) if reply.omitted else beside)


def _with_beside(
    beside: bytes, key: CanonicalKey, message: CanonicalMessage, reasoning: bytes | None
) -> bytes:
    """Return the digest of everything that keys leave out of a conversation, with one message more."""
    omitted = repr([(piece.name, piece.place, piece.text) for piece in message.omitted])
    return CanonicalKey.of(
        beside, key.digest, omitted.encode(errors="surrogatepass"), reasoning or b""
    ).digest
