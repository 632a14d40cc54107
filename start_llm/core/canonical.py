"""What is compared, and never shown to a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

_SIZE = 16


type Kind = Literal["space", "own", "live", "block"]
"""White space at an end; what a client says of its message; what says how things are now, and that of one
project or chat."""


class Omitted(NamedTuple):
    """A piece of a message that its key leaves out.

    Attributes:
        name: in words, for notes; several pieces may have one.
        kind: what it means if it differs.
        place: how many characters stand in front of it, of those that the key has.
        text: as it stands.
        said: what a note tells of it; a clock to the minute.
        is_clock: it is a date, a clock or a zone, and nothing else.
    """

    name: str
    kind: Kind
    place: int
    text: str
    said: str = ""
    is_clock: bool = False


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """A message without what clients change when they send it again. Not text: no tokenizer takes it.

    Attributes:
        omitted: what `data` does not have, in the order in which it stands, but for what is no content.
        left_out: characters of its text that `data` does not have.
    """

    data: bytes
    omitted: tuple[Omitted, ...] = field(default=(), compare=False)
    left_out: int = field(default=0, compare=False)


class CanonicalKey(NamedTuple):
    """Names a beginning of a conversation: the same for all that differ in nothing but drift."""

    digest: bytes

    @classmethod
    def of(cls, *parts: bytes) -> CanonicalKey:
        """Each part with its length in front, so that no two sequences of parts are the same bytes."""
        told = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
        return cls(_digest(b"".join(told)))

    def with_message(self, message: CanonicalMessage) -> CanonicalKey:
        """The key of this beginning with one message more. A digest's length is always the same."""
        return CanonicalKey(_digest(self.digest + message.data))


def chain(root: CanonicalKey, messages: Iterable[CanonicalMessage]) -> tuple[CanonicalKey, ...]:
    """A key for each prefix: the first message, the first two, and so on."""
    keys: list[CanonicalKey] = []
    for message in messages:
        root = root.with_message(message)
        keys.append(root)
    return tuple(keys)


def thought_digest(thought: str | None) -> bytes | None:
    """Names a thought, however much white space is around it; None for none."""
    return text_digest(thought) if thought and thought.strip() else None


def text_digest(text: str) -> bytes:
    """Names a text, however much white space is around it."""
    return _digest(text.strip().encode(errors="surrogatepass"))


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_SIZE).digest()


class Field(NamedTuple):
    """Where something stands that a message says beside its words.

    Attributes:
        name: in words, for notes.
        message: index of the message that it stands in.
        kind: what it means if it differs.
    """

    name: str
    message: int
    kind: Kind


class Ignored(NamedTuple):
    """What a rule leaves out of a message, or of all of it, when conversations are compared.

    Attributes:
        rule, drift: its name and its class.
        digest: of what is left out.
    """

    rule: str
    drift: str
    digest: bytes


class Root(NamedTuple):
    """What stands in front of the first message."""

    options: CanonicalKey
    tools: CanonicalKey

    def key(self, tenant: bytes) -> CanonicalKey:
        """Where a chain begins: whoever differs in any of these shares nothing."""
        return CanonicalKey.of(tenant, self.options.digest, self.tools.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request, as it is compared.

    Attributes:
        tenant: whose it is.
        root: what stands in front of it.
        roles: of the messages.
        messages: as they are compared.
        keys: of its prefixes: one for each message.
        exact: names each prefix with all that its key leaves out, thoughts that were sent included.
        echoed: for each message the digest of the thought that the client sent; None: it sent none.
        shown: for each message the digest of the thought that the model is shown, if all is rendered fresh.
        ids: for each message the random names that the client sends of it: in the ids of its calls, and in
            what says which reply it is (`core.ids`).
        notable: for each message whether a note may stand behind it.
        name: of the one conversation that the client says this is; None: it says nothing.
        session: what its requests have in common, for statistics: a name, or its first messages.
        ignored: for each message what of it is no content.
        transient: messages behind these, which the next request will not have.
    """

    tenant: bytes
    root: Root
    roles: Sequence[str]
    messages: Sequence[CanonicalMessage]
    keys: Sequence[CanonicalKey]
    exact: Sequence[bytes]
    echoed: Sequence[bytes | None]
    shown: Sequence[bytes | None]
    ids: Sequence[frozenset[str]]
    notable: Sequence[bool]
    name: str | None
    session: str
    ignored: Sequence[tuple[Ignored, ...]]
    transient: tuple[Ignored, ...] = ()

    @property
    def names(self) -> dict[str, None]:
        """Its name, if it has one."""
        return {self.name: None} if self.name else {}


def exact_keys(
    keys: Sequence[CanonicalKey], messages: Sequence[CanonicalMessage], echoed: Sequence[bytes | None]
) -> list[bytes]:
    """A name for each prefix: equal ones are equal byte for byte, but for what is no content."""
    exact, beside = list[bytes](), bytes(_SIZE)
    for key, message, thought in zip(keys, messages, echoed, strict=True):
        if message.omitted or thought:
            beside = _with_beside(beside, key, message, thought)
        exact.append(key.digest + beside)
    return exact


def exact_after(conversation: Conversation, reply: CanonicalMessage) -> bytes:
    """The name of a conversation with its reply, as a client sends that back without a thought."""
    key, beside = conversation.keys[-1].with_message(reply), conversation.exact[-1][_SIZE:]
    return key.digest + (_with_beside(beside, key, reply, None) if reply.omitted else beside)


def _with_beside(beside: bytes, key: CanonicalKey, message: CanonicalMessage, thought: bytes | None) -> bytes:
    """Names all that keys leave out of a conversation, with that of one message more."""
    told = repr([(one.name, one.place, one.text) for one in message.omitted])
    return CanonicalKey.of(beside, key.digest, told.encode(errors="surrogatepass"), thought or b"").digest
