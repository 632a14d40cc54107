"""Which of the tokens that were computed for a key a conversation may go on from.

A key leaves things out, so several conversations have the same one. Tokens may be taken if all that their
key leaves out is equal to what this conversation says, byte for byte, or if they are *proven* to be its own
earlier ones: it shows something, behind them or at their end, that only who was told it can have. Without a
proof only the line of a clock may differ, in tokens that hold nothing else of another conversation.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from start_llm.core.canonical import CanonicalKey, Conversation, Field, Omitted, text_digest

type Told = tuple[Field, str | None]
"""What a field was said to be; None: that it applies no longer."""

_CERTAIN_BITS = 64.0
"""Of chance: nobody else draws the same reply by accident, however many are drawn."""
_MOST_CLAIMS = 64
_MOST_BEGINNINGS = 32_000
_NONE, _ALWAYS = -1, 2**62


class Reading(NamedTuple):
    """What tokens say of a message beside what its key has.

    Attributes:
        omitted: as they read it.
        thought: digest of the one that they hold.
        is_ours: the model had that thought; if not, a client sent it.
        told: what a note behind it says.
        noted: tokens of that note.
    """

    omitted: tuple[Omitted, ...]
    thought: bytes | None = None
    is_ours: bool = False
    told: tuple[Told, ...] = ()
    noted: int = 0


@dataclass(slots=True)
class Claims:
    """What shows whose tokens are.

    Attributes:
        names: of the conversations that they were computed in.
        is_told: they end with a reply that was written here, and told: who sends it back may be its owner.
        ids: that were made for its calls.
        told_bits, thought_bits: of chance in what was told, and in its thought.
    """

    names: dict[str, None] = field(default_factory=dict[str, None])
    is_told: bool = False
    ids: dict[str, None] = field(default_factory=dict[str, None])
    told_bits: float = 0.0
    thought_bits: float = 0.0

    def add(self, others: Claims) -> None:
        """The same tokens were computed once more. Of very many the first are forgotten."""
        self.is_told |= others.is_told
        for mine, new in ((self.names, others.names), (self.ids, others.ids)):
            mine.update(new)
            while len(mine) > _MOST_CLAIMS:
                del mine[next(iter(mine))]
        self.told_bits = max(self.told_bits, others.told_bits)
        self.thought_bits = max(self.thought_bits, others.thought_bits)

    def is_elsewhere(self, name: str | None) -> bool:
        """They were computed in conversations of other names alone: an equal reply here is an accident."""
        return name is not None and bool(self.names) and name not in self.names

    def are_shown(
        self, name: str | None, ids: Iterable[str], *, sends_thought: bool, asked_as: str | None
    ) -> bool:
        """Whether a conversation that sends this reply shows that it was told it.

        Args:
            name: of the conversation, if that proves anything.
            ids: of the calls that it sends with the reply.
            sends_thought: it sends the thought too.
            asked_as: what the conversation calls itself, whatever that proves.
        """
        if (name is not None and name in self.names) or not self.ids.keys().isdisjoint(ids):
            return True
        bits = self.told_bits + (self.thought_bits if sends_thought else 0)
        return bits >= _CERTAIN_BITS and not self.is_elsewhere(asked_as)


class Recorded(Protocol):
    """Tokens up to the end of a message, as what follows those that they build on."""

    @property
    def depth(self) -> int: ...
    @property
    def parent(self) -> Recorded | None: ...
    @property
    def readings(self) -> Sequence[Reading]: ...
    @property
    def claims(self) -> Claims: ...


class _Begun(NamedTuple):
    """What a conversation says behind what is proven to be its own.

    Attributes:
        proven: the last message that is.
        said: what keys leave out of the messages behind it, but for clocks and white space.
    """

    proven: int
    said: frozenset[tuple[int, bytes]]

    @classmethod
    def of(cls, conversation: Conversation, proven: int) -> _Begun:
        return cls(
            proven,
            frozenset(
                (depth, text_digest(repr(one)))
                for depth, message in enumerate(conversation.messages[proven + 1 :], proven + 1)
                for one in message.omitted
                if one.kind != "space" and not one.is_clock
            ),
        )

    def is_one_with(self, other: _Begun) -> bool:
        """Whether both say the same of the messages that neither has proven."""
        proven = max(self.proven, other.proven)
        mine, others = ({one for one in begun.said if one[0] > proven} for begun in (self, other))
        return mine == others


class Names:
    """Whether the name of a conversation means one. Safe to use from any thread.

    A client may call all of its conversations the same. Two that begin with the same words, and differ in
    what their keys leave out, show it: from then on that name proves nothing of what begins so.
    """

    def __init__(self, most: int = _MOST_BEGINNINGS) -> None:
        self._most = most
        self._begun: dict[tuple[str, CanonicalKey], _Begun | None] = {}
        self._of_several: dict[str, set[CanonicalKey]] = {}
        self._lock = threading.Lock()

    def note(self, conversation: Conversation, proven: int) -> None:
        """A conversation was answered of which so much is proven to be its own: the rest begins here."""
        if conversation.name is None:
            return
        beginning = conversation.name, conversation.keys[-1]
        begun = _Begun.of(conversation, proven)
        with self._lock:
            known = self._begun.pop(beginning, begun)
            self._begun[beginning] = known if known and known.is_one_with(begun) else None
            if self._begun[beginning] is None:
                self._of_several.setdefault(conversation.name, set()).add(beginning[1])
            while len(self._begun) > self._most:
                self._forget(next(iter(self._begun)))

    def _forget(self, beginning: tuple[str, CanonicalKey]) -> None:
        name, key = beginning
        if self._begun.pop(beginning) is None:
            self._of_several[name].remove(key)
            if not self._of_several[name]:
                del self._of_several[name]

    def proving(self, conversation: Conversation) -> str | None:
        """The name, if it means this conversation alone as far as anybody knows."""
        name = conversation.name
        if name is None:
            return None
        with self._lock:
            is_one = self._of_several.get(name, frozenset()).isdisjoint(conversation.keys)
        return name if is_one else None


class _Path(NamedTuple):
    """What is known of tokens. Each number is an index of a message; -1: there is none.

    Attributes:
        proven: the last reply that the conversation shows to be its own.
        differs: the last message with what only a proof allows.
        thought: the last reply with a thought that the conversation did not send.
        clock: the last message whose clock says something else.
        note: the last message with a note of nothing but what this conversation's own clocks say.
        earlier_note: the one before it.
    """

    proven: int = _NONE
    differs: int = _NONE
    thought: int = _NONE
    clock: int = _NONE
    note: int = _NONE
    earlier_note: int = _NONE


class Guard:
    """Looks at recorded tokens for one conversation, at each message once.

    Args:
        name: of the conversation, if that proves anything.
        takes_proof: what differs may be proven; if not, nothing may differ.
        keeps_thoughts: tokens may hold thoughts that the fresh rendering no longer shows.
    """

    def __init__(
        self, conversation: Conversation, name: str | None, *, takes_proof: bool, keeps_thoughts: bool
    ) -> None:
        self._conversation = conversation
        self._name = name
        self._takes_proof = takes_proof
        self._keeps_thoughts = keeps_thoughts
        self._paths: dict[Recorded, _Path] = {}
        self._clocks: dict[Field, str] = {}
        for depth, message in enumerate(conversation.messages):
            if message.omitted:
                self._clocks |= said_of(depth, [one for one in message.omitted if one.is_clock])

    def admits(self, recorded: Recorded) -> bool:
        """Whether the conversation may go on from these tokens."""
        path = self._path(recorded)
        proven = path.proven if self._takes_proof else _NONE
        is_clock_another = max(path.clock, path.note) > proven
        if path.differs > proven or path.earlier_note > proven:
            return False
        if is_clock_another and not self._takes_proof:
            return False
        return path.thought <= proven or not is_clock_another

    def is_equal(self, recorded: Recorded) -> bool:
        """Whether these tokens say all that the conversation says, and nothing else but thoughts."""
        path = self._path(recorded)
        return max(path.differs, path.clock, path.note) == _NONE

    def proven(self, recorded: Recorded) -> int:
        """The last message of these tokens that the conversation shows to be its own; -1: none."""
        return self._path(recorded).proven

    def _path(self, recorded: Recorded) -> _Path:
        known = self._paths.get(recorded)
        return self._walked(recorded) if known is None else known

    def _walked(self, recorded: Recorded) -> _Path:
        new: list[Recorded] = []
        one: Recorded | None = recorded
        while one is not None and one not in self._paths:
            new.append(one)
            one = one.parent
        path = self._paths[one] if one is not None else _Path()
        for one in reversed(new):
            path = self._with(path, one)
            self._paths[one] = path
        return path

    def _with(self, path: _Path, recorded: Recorded) -> _Path:
        asked, first = self._conversation, recorded.depth + 1 - len(recorded.readings)
        for depth, reading in enumerate(recorded.readings, first):
            if reading.told or reading.omitted != asked.messages[depth].omitted:
                path = self._with_omitted(path, depth, reading)
            if reading.thought is not None or asked.shown[depth] is not None:
                path = self._with_thought(path, depth, reading, recorded.claims)
        if recorded.claims.is_told and self._is_shown(recorded):
            path = path._replace(proven=recorded.depth)
        return path

    def _is_shown(self, recorded: Recorded) -> bool:
        """Whether the conversation shows that it was told the reply that these tokens end with."""
        asked, depth, thought = self._conversation, recorded.depth, recorded.readings[-1].thought
        sends_thought = thought is not None and asked.echoed[depth] == thought
        return recorded.claims.are_shown(
            self._name, asked.ids[depth], sends_thought=sends_thought, asked_as=asked.name
        )

    def _with_omitted(self, path: _Path, depth: int, reading: Reading) -> _Path:
        match difference(reading.omitted, self._conversation.messages[depth].omitted):
            case "place":
                path = path._replace(differs=_ALWAYS)
            case "value":
                path = path._replace(differs=max(path.differs, depth))
            case "clock":
                path = path._replace(clock=depth)
            case None:
                pass
        if not reading.told:
            return path
        if all(told in self._clocks and self._clocks[told] == value for told, value in reading.told):
            return path._replace(note=depth, earlier_note=path.note)
        return path._replace(differs=max(path.differs, depth))

    def _with_thought(self, path: _Path, depth: int, reading: Reading, claims: Claims) -> _Path:
        held = reading.thought
        sent, shown = self._conversation.echoed[depth], self._conversation.shown[depth]
        is_hidden = held is None and shown is not None
        is_another = held is not None and sent not in (None, held)
        is_too_much = held is not None and shown is None and not self._keeps_thoughts
        if is_hidden or is_another or is_too_much:
            return path._replace(differs=_ALWAYS)
        if held is None or held in (sent, shown):
            return path
        if not reading.is_ours or claims.is_elsewhere(self._conversation.name):
            return path._replace(differs=max(path.differs, depth))
        return path._replace(thought=depth)


def said_of(depth: int, omitted: Iterable[Omitted]) -> dict[Field, str]:
    """What a message says beside its words, for notes."""
    said: dict[Field, str] = {}
    for one in omitted:
        if one.kind != "space":
            field = Field(one.name, depth, one.kind)
            said[field] = f"{said[field]}\n{one.said}" if field in said else one.said
    return said


def difference(
    read: tuple[Omitted, ...], now: tuple[Omitted, ...]
) -> Literal["place", "value", "clock"] | None:
    """How what was read of a message differs from what it says now.

    `place`: something has moved, which no note can tell. `clock`: nothing but clocks, each in its place.
    """
    if read == now:
        return None
    shared = {one.name for one in read} & {one.name for one in now}
    if _places(read, shared) != _places(now, shared):
        return "place"
    old, new = _texts(read), _texts(now)
    changed = [one for one in (*read, *now) if old.get(one.name) != new.get(one.name)]
    are_clocks = all(one.is_clock and one.name in shared for one in changed)
    return "clock" if are_clocks else "value"


def _places(omitted: Sequence[Omitted], names: Collection[str]) -> list[tuple[str, int]]:
    return [(one.name, one.place) for one in omitted if one.name in names]


def _texts(omitted: Sequence[Omitted]) -> Mapping[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for one in omitted:
        texts.setdefault(one.name, []).append(one.text)
    return texts
