"""Compares a request with the last computed one of its conversation. Pure functions."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from start_llm.core.canonical import Conversation, Ignored, OmittedText
from start_llm.core.common_beginning import common_length
from start_llm.core.explanation import Difference
from start_llm.core.prompt import Boundary
from start_llm.transcripts.recent import ComputedRequest

type Decode = Callable[[Sequence[int]], str]
"""Decodes tokens to text."""

_SPELLING = "space"
"""White space is reported as another spelling."""
_BEFORE, _BEHIND = 16, 32
"""Numbers of tokens that are shown before a difference and from it on."""


class _TokenSpan(NamedTuple):
    """The tokens of a message. If its own end is not known, the span covers several messages."""

    start: int
    end: int
    is_exact: bool = True


class _Where(NamedTuple):
    """First position at which computed and asked tokens differ; `token` is None if they are equal."""

    token: int | None
    computed: str = ""
    asked: str = ""


@dataclass(frozen=True, slots=True)
class ExplainedPrompt:
    """A request as tokens."""

    conversation: Conversation
    ids: tuple[int, ...]
    boundaries: Sequence[Boundary]


def count_recomputed(computed: ComputedRequest, asked: ExplainedPrompt, restored: int) -> int:
    """Return how many tokens belong to messages that were computed last time and are computed again.

    Return 0 if fewer than half of those messages are in the request: titles and sub-agents share the session
    of a conversation, but at most one of its questions. Messages whose ends are not known share a span. It
    counts if all of them were computed: a template that cuts long prompts shows nothing of the newest ones.

    Args:
        asked: the request with the tokens that the model will read.
        restored: number of tokens that the cache has.
    """
    unmatched = Counter((*computed.conversation.canonical, *computed.reply))
    spans = _spans(asked.boundaries, len(asked.conversation.messages), len(asked.ids))
    known = Counter[_TokenSpan]()
    for span, message in zip(spans, asked.conversation.canonical, strict=True):
        if unmatched[message] > 0:
            unmatched[message] -= 1  # the same words a second time are new
            known[span] += 1
    if 2 * known.total() < computed.messages:
        return 0
    shared = Counter(spans)
    wholly_known = [span for span, count in known.items() if count == shared[span]]
    return sum(max(span.end - max(span.start, restored), 0) for span in wholly_known)


def is_shown_otherwise(computed: ComputedRequest, asked: Sequence[int]) -> bool:
    """Return whether the tokens to read leave those that were computed before these end."""
    return common_length(computed.ids, array("I", asked)) < min(len(computed.ids), len(asked))


def differences(computed: ComputedRequest, asked: ExplainedPrompt, decode: Decode) -> list[Difference]:
    """Return the differences in the order of the messages, up to the first one in content."""
    return list(_Comparison(computed, asked, decode).run())


class _Comparison:
    def __init__(self, computed: ComputedRequest, asked: ExplainedPrompt, decode: Decode) -> None:
        self._computed, self._asked, self._decode = computed, asked, decode
        self._was, self._now = computed.conversation, asked.conversation
        self._old_spans = _spans(computed.boundaries, computed.messages, len(computed.ids))
        self._new_spans = _spans(asked.boundaries, len(asked.conversation.messages), len(asked.ids))

    def run(self) -> Iterator[Difference]:
        for name, was, now in zip(("options", "tools"), self._was.root, self._now.root, strict=True):
            if was != now:
                yield self._in_front(f"have other {name}")
                return
        for index in range(min(len(self._was.messages), len(self._now.messages))):
            of_message = list(self._of_message(index))
            yield from of_message
            if of_message and of_message[-1].drift == "content":
                return
        yield from self._of_reply()
        yield from self._of_transient()

    def _in_front(self, what: str) -> Difference:
        where = self._apart(_TokenSpan(0, len(self._computed.ids)), _TokenSpan(0, len(self._asked.ids)))
        return Difference(message=None, role=None, drift="content", rule=None, what=what, **where._asdict())

    def _of_message(self, index: int) -> Iterator[Difference]:
        if self._was.messages[index].canonical != self._now.messages[index].canonical:
            yield self._at(index, "content", None, "says something else")
            return
        reasoning = self._of_reasoning(index)
        if reasoning:
            yield reasoning
            return
        known = [*self._of_omitted(index), *self._of_ignored(index)]
        yield from known
        if not known and not self._computed.note_tokens[index] and self._is_alone(index):
            spelled = self._at(index, "transport", None, "is spelled otherwise")
            if spelled.token is not None:
                yield spelled

    def _is_alone(self, index: int) -> bool:
        """Return whether both token spans hold this message only, so that a difference in them is its own."""
        return self._old_spans[index].is_exact and self._new_spans[index].is_exact

    def _of_reasoning(self, index: int) -> Difference | None:
        """Report reasoning from the client that is neither in the tokens nor what it sent last time."""
        was, now = self._computed.reasoning_digests[index], self._now.messages[index].echoed
        if now in (None, was) or (was is None and self._was.messages[index].echoed == now):
            return None
        return self._at(index, "content", None, "has other reasoning")

    def _of_omitted(self, index: int) -> Iterator[Difference]:
        was, now = self._was.messages[index].omitted, self._now.messages[index].omitted
        for name in dict.fromkeys(text.name for text in (*was, *now) if text.kind != _SPELLING):
            old, new = _named(was, name), _named(now, name)
            if old != new:
                yield self._at(index, (new or old)[0].kind, name, _became(bool(old), bool(new)))

    def _of_ignored(self, index: int) -> Iterator[Difference]:
        was, now = _by_rule(self._was.messages[index].ignored), _by_rule(self._now.messages[index].ignored)
        for rule in dict.fromkeys((*was, *now)):
            if was.get(rule) != now.get(rule):
                drift = (now.get(rule) or was[rule]).drift
                yield self._at(index, drift, rule, _became(rule in was, rule in now))

    def _of_reply(self) -> Iterator[Difference]:
        """Compare the last reply with the form in which the client sends it back."""
        index = len(self._was.messages)
        if not self._computed.reply or index >= len(self._now.messages):
            return
        if self._now.messages[index].canonical not in self._computed.reply:
            yield self._at(index, "content", None, "is not the reply that was given")
        elif self._now.messages[index].echoed not in (None, self._computed.reasoning_digests[index]):
            yield self._at(index, "content", None, "has other reasoning")

    def _of_transient(self) -> Iterator[Difference]:
        was, now = self._was.transient, self._now.transient
        if was == now:
            return
        place = len(self._was.messages if was else self._now.messages)
        where = self._after(len(self._was.messages)) if was else _Where(None)
        for rule in dict.fromkeys(message.rule for message in (*was, *now)):
            what = _became(bool(was), bool(now))
            yield Difference(
                message=place, role="user", drift="transient", rule=rule, what=what, **where._asdict()
            )

    def _after(self, messages: int) -> _Where:
        """Compare the tokens after the first `messages` messages on both sides."""
        start = max(
            (boundary.tokens for boundary in self._computed.boundaries if boundary.message < messages),
            default=0,
        )
        end = max(
            (boundary.tokens for boundary in self._asked.boundaries if boundary.message < messages), default=0
        )
        return self._apart(_TokenSpan(start, len(self._computed.ids)), _TokenSpan(end, len(self._asked.ids)))

    def _at(self, index: int, drift: str, rule: str | None, what: str) -> Difference:
        is_read = rule is None or drift != "transport"
        where = self._apart(self._old_spans[index], self._new_spans[index]) if is_read else _Where(None)
        role = self._now.messages[index].role
        return Difference(message=index, role=role, drift=drift, rule=rule, what=what, **where._asdict())

    def _apart(self, old: _TokenSpan, new: _TokenSpan) -> _Where:
        was, now = self._computed.ids[old.start : old.end], array("I", self._asked.ids[new.start : new.end])
        same = common_length(was, now)
        if same == len(was) == len(now):
            return _Where(None)
        token = old.start + same
        return _Where(
            token, self._text(self._computed.ids, token), self._text(self._asked.ids, new.start + same)
        )

    def _text(self, ids: Sequence[int], token: int) -> str:
        return self._decode(ids[max(token - _BEFORE, 0) : token + _BEHIND])


def _spans(boundaries: Sequence[Boundary], messages: int, end: int) -> list[_TokenSpan]:
    """Return the span of each message. Messages share a span if the end of the first of them is not known."""
    spans, start = list[_TokenSpan](), 0
    for boundary in (*boundaries, Boundary(messages - 1, end)):
        more = boundary.message + 1 - len(spans)
        if more > 0:
            spans += [_TokenSpan(start, boundary.tokens, is_exact=more == 1)] * more
            start = boundary.tokens
    return spans


def _named(omitted: Sequence[OmittedText], name: str) -> list[OmittedText]:
    return [text for text in omitted if text.name == name]


def _by_rule(ignored: Sequence[Ignored]) -> Mapping[str, Ignored]:
    return {value.rule: value for value in ignored}


def _became(was: bool, now: bool) -> str:
    if was and now:
        return "has changed"
    return "is gone" if was else "is new"
