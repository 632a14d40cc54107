"""Decides which recorded tokens a conversation may go on from.

A key leaves things out, so several conversations can have the same key. A conversation may take recorded
tokens if everything that their key leaves out is equal, byte for byte, to what this conversation says. It may
also take them if they are *proven* to be its own earlier tokens. The proof is a reply in these very tokens,
of which it shows something that only its receiver can have. It counts for what stands before that reply, and
for a question behind it that was asked under its name and answered. Without a proof only a clock line may
differ, and only in tokens that hold nothing else of another conversation. See ADR 13.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from start_llm.core.canonical import CanonicalKey, Conversation, Field, OmittedText, text_digest
from start_llm.storage.database import NO_TABLE, DatabaseRow, DatabaseTable
from start_llm.storage.database_file import decode_json, encode_json

type NotedValue = tuple[Field, str | None]
"""A field and the value that a note gave for it; None: the note said that the field no longer applies."""

_CERTAIN_BITS = 64.0
"""Surprisal in bits from which a reply counts as a proof: nobody else samples the same reply by accident."""
_MAX_CLAIMS = 64
_MAX_BEGINNINGS = 32_000
_NONE, _BEYOND_PROOF = -1, 2**62
_OF_SEVERAL = b""
"""In the database, a beginning of several conversations."""


class MessageDetails(NamedTuple):
    """Values of a message in recorded tokens that its key leaves out.

    Attributes:
        omitted: the omitted texts as the tokens have them.
        reasoning: digest of the reasoning in the tokens.
        is_ours: the model wrote that reasoning, behind these very tokens; if false, a client sent it, the
            model read transient messages in front of it, or a proof restored it behind other words.
        noted: values that notes after the message tell.
        note_tokens: number of tokens of those notes.
    """

    omitted: tuple[OmittedText, ...]
    reasoning: bytes | None = None
    is_ours: bool = False
    noted: tuple[NotedValue, ...] = ()
    note_tokens: int = 0


@dataclass(slots=True)
class Claims:
    """Evidence of whose tokens these are.

    Attributes:
        names: names of the conversations that computed them.
        is_delivered: they end with a reply that was generated here and sent to a client, which may send it
            back.
        ids: random names that were made for the reply and its calls.
        reply_surprisal_bits, reasoning_surprisal_bits: surprisal in bits of the visible reply and of its
            reasoning.
    """

    names: dict[str, None] = field(default_factory=dict[str, None])
    is_delivered: bool = False
    ids: dict[str, None] = field(default_factory=dict[str, None])
    reply_surprisal_bits: float = 0.0
    reasoning_surprisal_bits: float = 0.0

    def copy(self) -> Claims:
        """Return the same claims, to be changed on their own."""
        return replace(self, names=dict(self.names), ids=dict(self.ids))

    def add(self, others: Claims) -> None:
        """Add the claims of another computation of the same tokens. Keep the newest 64 names and ids."""
        self.is_delivered |= others.is_delivered
        for mine, new in ((self.names, others.names), (self.ids, others.ids)):
            mine.update(new)
            while len(mine) > _MAX_CLAIMS:
                del mine[next(iter(mine))]
        self.reply_surprisal_bits = max(self.reply_surprisal_bits, others.reply_surprisal_bits)
        self.reasoning_surprisal_bits = max(self.reasoning_surprisal_bits, others.reasoning_surprisal_bits)

    def from_other_names(self, name: str | None) -> bool:
        """Return whether only conversations of other names computed these tokens.

        A reply that is equal to theirs is then an accident.
        """
        return name is not None and bool(self.names) and name not in self.names

    def proves_receipt(
        self, name: str | None, ids: Iterable[str], *, sends_reasoning: bool, asked_as: str | None
    ) -> bool:
        """Return whether a conversation that sends this reply proves that it received it.

        Args:
            name: name of the conversation, if it proves anything.
            ids: ids that the conversation sends with the reply.
            sends_reasoning: the conversation sends the reply's reasoning too.
            asked_as: name that the conversation gives itself, whether or not it proves anything.
        """
        if (name is not None and name in self.names) or not self.ids.keys().isdisjoint(ids):
            return True
        bits = self.reply_surprisal_bits + (self.reasoning_surprisal_bits if sends_reasoning else 0)
        return bits >= _CERTAIN_BITS and not self.from_other_names(asked_as)


class RecordedDetails(Protocol):
    """Recorded tokens up to the end of a message, as a link of a chain."""

    @property
    def depth(self) -> int: ...
    @property
    def parent(self) -> RecordedDetails | None: ...
    @property
    def details(self) -> Sequence[MessageDetails]: ...
    @property
    def claims(self) -> Claims: ...


class _UnprovenPart(NamedTuple):
    """The part of a conversation after its last proven message.

    Attributes:
        proven: index of the last message that is proven to be its own.
        digests: depth and digest of each omitted text after it, without clocks and white space; where nothing
            is proven, of the transient messages too, with depth 0: the next request will not have them, but
            nothing else may tell two conversations apart that begin with the same words.
    """

    proven: int
    digests: frozenset[tuple[int, bytes]]

    @classmethod
    def of(cls, conversation: Conversation, proven: int) -> _UnprovenPart:
        digests = {
            (depth, text_digest(repr(text)))
            for depth, message in enumerate(conversation.messages[proven + 1 :], proven + 1)
            for text in message.omitted
            if text.kind != "space" and not text.is_clock
        }
        if proven == _NONE:
            digests |= {(0, message.digest) for message in conversation.transient}
        return cls(proven, frozenset(digests))

    @classmethod
    def decode(cls, data: bytes) -> _UnprovenPart:
        """Read what `encode` has written."""
        proven, digests = decode_json(data)
        return cls(proven, frozenset((depth, bytes.fromhex(digest)) for depth, digest in digests))

    def encode(self) -> bytes:
        """Return it as a value of a database row."""
        return encode_json((self.proven, sorted(self.digests)))

    def is_one_with(self, other: _UnprovenPart) -> bool:
        """Return whether both say the same in the messages that neither has proven."""
        proven = max(self.proven, other.proven)
        mine, others = (
            {(depth, digest) for depth, digest in part.digests if depth > proven} for part in (self, other)
        )
        return mine == others


class ConversationNames:
    """Knows which conversation names stand for a single conversation. Safe to use from any thread.

    A client may give all its conversations the same name. This shows when two conversations of one name have
    equal keys, but differ in what the keys leave out. From then on the name proves nothing for conversations
    with that beginning.

    Args:
        most: number of beginnings that are remembered.
        table: keeps them for the next process.
    """

    def __init__(self, most: int = _MAX_BEGINNINGS, *, table: DatabaseTable = NO_TABLE) -> None:
        self._most = most
        self._table = table
        self._begun: dict[tuple[str, CanonicalKey], _UnprovenPart | None] = {}
        self._of_several: dict[str, set[CanonicalKey]] = {}
        self._lock = threading.Lock()
        for _, (beginning, begun) in table.read(_decoded):
            self._remember(beginning, begun)
        self._forget_some()

    def note(self, conversation: Conversation, proven: int) -> None:
        """Note an answered conversation whose messages up to index `proven` are proven to be its own."""
        if conversation.name is None:
            return
        beginning = conversation.name, conversation.messages[-1].key
        begun = _UnprovenPart.of(conversation, proven)
        with self._lock:
            known = self._begun.pop(beginning, begun)
            kept = known if known and known.is_one_with(begun) else None
            self._remember(beginning, kept)
            self._table.put(_row_key(beginning), kept.encode() if kept else _OF_SEVERAL)
            self._forget_some()

    def _remember(self, beginning: tuple[str, CanonicalKey], begun: _UnprovenPart | None) -> None:
        self._begun[beginning] = begun
        if begun is None:
            self._of_several.setdefault(beginning[0], set()).add(beginning[1])

    def _forget_some(self) -> None:
        while len(self._begun) > self._most:
            self._forget(next(iter(self._begun)))

    def _forget(self, beginning: tuple[str, CanonicalKey]) -> None:
        name, key = beginning
        self._table.delete(_row_key(beginning))
        if self._begun.pop(beginning) is None:
            self._of_several[name].remove(key)
            if not self._of_several[name]:
                del self._of_several[name]

    def proving(self, conversation: Conversation) -> str | None:
        """Return the conversation's name if, as far as is known, it stands for this conversation alone."""
        name = conversation.name
        if name is None:
            return None
        with self._lock:
            is_one = self._of_several.get(name, frozenset()).isdisjoint(conversation.keys)
        return name if is_one else None


def _decoded(row: DatabaseRow) -> tuple[tuple[str, CanonicalKey], _UnprovenPart | None]:
    name, digest = decode_json(row.key)
    if not isinstance(name, str):
        raise TypeError("a name is a text")
    begun = None if row.value == _OF_SEVERAL else _UnprovenPart.decode(row.value)
    return (name, CanonicalKey(bytes.fromhex(digest))), begun


def _row_key(beginning: tuple[str, CanonicalKey]) -> bytes:
    name, key = beginning
    return encode_json((name, key.digest))


class _PathFindings(NamedTuple):
    """Findings about recorded tokens. Each number is an index of a message; -1: none.

    Attributes:
        reply: the last reply that was generated here and sent to a client.
        proven: the last message that the conversation proves to be its own.
        differs: the last message with a difference that only a proof allows.
        reasoning: the last reply with reasoning that the conversation did not send.
        clock: the last message with another clock.
        note: the last message whose note tells only what this conversation's own clocks say.
        earlier_note: the one before it.
    """

    reply: int = _NONE
    proven: int = _NONE
    differs: int = _NONE
    reasoning: int = _NONE
    clock: int = _NONE
    note: int = _NONE
    earlier_note: int = _NONE


class Guard:
    """Checks recorded tokens for one conversation, each recorded message once.

    Args:
        name: name of the conversation, if it proves anything.
        takes_proof: differences are allowed where they are proven; if false, nothing may differ.
        keeps_reasoning: tokens may hold reasoning that the fresh rendering no longer shows.
    """

    def __init__(
        self, conversation: Conversation, name: str | None, *, takes_proof: bool, keeps_reasoning: bool
    ) -> None:
        self._conversation = conversation
        self._name = name
        self._takes_proof = takes_proof
        self._keeps_reasoning = keeps_reasoning
        self._paths: dict[RecordedDetails, _PathFindings] = {}
        self._last_reply = max(
            (depth for depth, message in enumerate(conversation.messages) if message.role == "assistant"),
            default=_NONE,
        )
        self._clocks: dict[Field, str] = {}
        for depth, message in enumerate(conversation.messages):
            if message.omitted:
                self._clocks |= omitted_values(depth, [text for text in message.omitted if text.is_clock])

    def admits(self, recorded: RecordedDetails) -> bool:
        """Return whether the conversation may go on from these tokens."""
        path = self._path(recorded)
        proven = path.proven if self._takes_proof else _NONE
        is_clock_another = max(path.clock, path.note) > proven
        if path.differs > proven or path.earlier_note > proven:
            return False
        if is_clock_another and not self._takes_proof:
            return False
        return path.reasoning <= proven or not is_clock_another

    def is_equal(self, recorded: RecordedDetails) -> bool:
        """Return whether these tokens say exactly what the conversation says.

        Reasoning is left aside that the model wrote after these tokens and the client left out.
        """
        path = self._path(recorded)
        return max(path.differs, path.clock, path.note) == _NONE

    def is_foreign(self, recorded: RecordedDetails) -> bool:
        """Return whether these tokens say what the conversation does not, and are not proven its own."""
        path = self._path(recorded)
        return max(path.differs, path.clock, path.note) > path.proven

    def is_own(self, recorded: RecordedDetails) -> bool:
        """Return whether these tokens are known to be the conversation's own.

        They are if it proves that it received a reply in them; or if they say exactly what it says and were
        computed under its name, or hold a reply from this server where it has no name.
        """
        path, name = self._path(recorded), self._conversation.name
        if self.is_foreign(recorded):
            return False
        is_named = name in recorded.claims.names if name else path.reply != _NONE
        return path.proven != _NONE or is_named

    def proven(self, recorded: RecordedDetails) -> int:
        """Return the index of the last message that is proven to be the conversation's own; -1: none."""
        return self._path(recorded).proven

    def _path(self, recorded: RecordedDetails) -> _PathFindings:
        known = self._paths.get(recorded)
        return self._walked(recorded) if known is None else known

    def _walked(self, recorded: RecordedDetails) -> _PathFindings:
        new: list[RecordedDetails] = []
        link: RecordedDetails | None = recorded
        while link is not None and link not in self._paths:
            new.append(link)
            link = link.parent
        path = self._paths[link] if link is not None else _PathFindings()
        for link in reversed(new):
            path = self._with(path, link)
            self._paths[link] = path
        return path

    def _with(self, path: _PathFindings, recorded: RecordedDetails) -> _PathFindings:
        asked, first = self._conversation, recorded.depth + 1 - len(recorded.details)
        for depth, reading in enumerate(recorded.details, first):
            if reading.noted or reading.omitted != asked.messages[depth].omitted:
                path = self._with_omitted(path, depth, reading)
            if reading.reasoning is not None or asked.messages[depth].shown is not None:
                path = self._with_reasoning(path, depth, reading, recorded.claims)
        if recorded.claims.is_delivered:
            path = path._replace(reply=recorded.depth)
            is_proven = self._is_shown(recorded)
        else:
            is_proven = path.proven != _NONE and self._has_asked(recorded)
        return path._replace(proven=recorded.depth) if is_proven else path

    def _is_shown(self, recorded: RecordedDetails) -> bool:
        """Return whether the conversation proves that it received the reply that these tokens end with."""
        asked, depth, reasoning = self._conversation, recorded.depth, recorded.details[-1].reasoning
        sends_reasoning = reasoning is not None and asked.messages[depth].echoed == reasoning
        return recorded.claims.proves_receipt(
            self._name, asked.messages[depth].ids, sends_reasoning=sends_reasoning, asked_as=asked.name
        )

    def _has_asked(self, recorded: RecordedDetails) -> bool:
        """Return whether the conversation asked this before, under its name, and has a reply behind it."""
        return recorded.depth < self._last_reply and self._name in recorded.claims.names

    def _with_omitted(self, path: _PathFindings, depth: int, reading: MessageDetails) -> _PathFindings:
        match difference(reading.omitted, self._conversation.messages[depth].omitted):
            case "place":
                path = path._replace(differs=_BEYOND_PROOF)
            case "value":
                path = path._replace(differs=max(path.differs, depth))
            case "clock":
                path = path._replace(clock=depth)
            case None:
                pass
        if not reading.noted:
            return path
        if all(field in self._clocks and self._clocks[field] == value for field, value in reading.noted):
            return path._replace(note=depth, earlier_note=path.note)
        return path._replace(differs=max(path.differs, depth))

    def _with_reasoning(
        self, path: _PathFindings, depth: int, reading: MessageDetails, claims: Claims
    ) -> _PathFindings:
        held = reading.reasoning
        message = self._conversation.messages[depth]
        sent, shown = message.echoed, message.shown
        is_hidden = held is None and shown is not None
        is_another = held is not None and sent not in (None, held)
        is_too_much = held is not None and shown is None and not self._keeps_reasoning
        if is_hidden or is_another or is_too_much:
            return path._replace(differs=_BEYOND_PROOF)
        if held is None or held in (sent, shown):
            return path
        if not reading.is_ours or claims.from_other_names(self._conversation.name):
            return path._replace(differs=max(path.differs, depth))
        return path._replace(reasoning=depth)


def omitted_values(depth: int, omitted: Iterable[OmittedText]) -> dict[Field, str]:
    """Return what a message says in its omitted texts, white space aside, by field."""
    values: dict[Field, str] = {}
    for text in omitted:
        if text.kind != "space":
            field = Field(text.name, depth, text.kind)
            values[field] = f"{values[field]}\n{text.note_text}" if field in values else text.note_text
    return values


def difference(
    read: tuple[OmittedText, ...], now: tuple[OmittedText, ...]
) -> Literal["place", "value", "clock"] | None:
    """Classify how the omitted texts of a message differ from those that were recorded.

    `place`: a text has moved, which no note can tell. `clock`: only clocks differ, each in its place.
    `value`: any other difference. None: no difference.
    """
    if read == now:
        return None
    shared = {text.name for text in read} & {text.name for text in now}
    if _places(read, shared) != _places(now, shared):
        return "place"
    old, new = _texts(read), _texts(now)
    changed = [text for text in (*read, *now) if old.get(text.name) != new.get(text.name)]
    are_clocks = all(text.is_clock and text.name in shared for text in changed)
    return "clock" if are_clocks else "value"


def _places(omitted: Sequence[OmittedText], names: Collection[str]) -> list[tuple[str, int]]:
    return [(text.name, text.place) for text in omitted if text.name in names]


def _texts(omitted: Sequence[OmittedText]) -> Mapping[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for text in omitted:
        texts.setdefault(text.name, []).append(text.text)
    return texts
