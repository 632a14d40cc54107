"""Decides which recorded tokens a conversation may go on from.

A key leaves things out, so several conversations can have the same key. A conversation may take recorded
tokens if everything that their key leaves out is equal, byte for byte, to what this conversation says. It may
also take them if they are *proven* to be its own earlier tokens. The proof is a reply in these very tokens,
of which it shows something that only its receiver can have. It counts for what stands before that reply, and
for a question behind it that was asked under its name and answered. Without a proof one of two things may
differ: the line of a clock, or reasoning that the model wrote behind these very words and the client left
out. See ADR 13.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from start_llm.core.canonical import Conversation, Field, OmittedText
from start_llm.transcripts.recorded_details import Claims, MessageDetails, RecordedDetails

_NONE, _BEYOND_PROOF = -1, 2**62


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

        Reasoning in them that the client left out is not compared.
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
