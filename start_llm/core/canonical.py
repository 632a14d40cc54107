"""What is compared, and never shown to a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_SIZE = 16


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """A message without what clients change when they send it again. Not text: no tokenizer takes it.

    Attributes:
        left_out: characters of its text that `data` does not have.
    """

    data: bytes
    left_out: int = field(default=0, compare=False)


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

    def with_message(self, message: CanonicalMessage) -> CanonicalKey:
        """The key of this beginning with one message more."""
        return CanonicalKey.of(self.digest, message.data)


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
    return hashlib.blake2b(text.strip().encode(), digest_size=_SIZE).digest()


class LiveField(NamedTuple):
    """Where something stands that says what is so now.

    Attributes:
        name: in words, for notes.
        message: index of the message that it stands in.
        is_block: it tells of one project or one chat, and belongs to the conversation that it stands in.
    """

    name: str
    message: int
    is_block: bool


@dataclass(frozen=True, slots=True)
class LiveValue:
    """What a field says, as it stands in its message; the clock of a line to the minute."""

    field: LiveField
    text: str


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
        echoed: for each message the digest of the thought that the client sent; None: it sent none.
        shown: for each message the digest of the thought that the model is shown, if all is rendered fresh.
        own: for each message the digest of a text with lines of its own, which its key leaves out.
        live: for each message what it says of now, which its key leaves out too.
        notable: for each message whether a note may stand behind it.
        session: whose it is, as the client says, or as its first messages say.
        ignored: for each message what else its key leaves out.
        transient: messages behind these, which the next request will not have.
    """

    tenant: bytes
    root: Root
    roles: Sequence[str]
    messages: Sequence[CanonicalMessage]
    keys: Sequence[CanonicalKey]
    echoed: Sequence[bytes | None]
    shown: Sequence[bytes | None]
    own: Sequence[bytes | None]
    live: Sequence[tuple[LiveValue, ...]]
    notable: Sequence[bool]
    session: str
    ignored: Sequence[tuple[Ignored, ...]]
    transient: tuple[Ignored, ...] = ()

    def words(self, depth: int, *more: CanonicalMessage) -> CanonicalKey:
        """Names what was said up to a message, and then, whatever tools and options there were."""
        said = (*self.messages[: depth + 1], *more)
        return CanonicalKey.of(self.tenant, *(message.data for message in said))
