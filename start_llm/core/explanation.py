"""Why a prompt is not known as far as its conversation is."""

from __future__ import annotations

from dataclasses import dataclass

from start_llm.core.events import Restored

_SEVEREST_FIRST = ("content", "block", "live", "own", "transient", "transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that a request has otherwise than what was computed last of its conversation.

    Attributes:
        message: its index; None: in front of all messages.
        role: of the message.
        drift: a class of `prompt.drift`, or `content`, at which nothing goes on.
        rule: the name of the rule that knows it; None: none does.
        what: in words.
        token: index into the tokens that were computed, at which the request's own rendering differs first;
            None: it does not.
        computed, asked: decoded text around that token, in what was computed and in the request.
    """

    message: int | None
    role: str | None
    drift: str
    rule: str | None
    what: str
    token: int | None = None
    computed: str = ""
    asked: str = ""

    def __str__(self) -> str:
        place = "tools and options" if self.message is None else f"message {self.message} ({self.role})"
        rule = f" {self.rule!r}" if self.rule else ""
        token = "" if self.token is None else f", from token {self.token:,}"
        return f"{place} {self.what}{token}; {self.drift}{rule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What was computed last of a conversation.

    Attributes:
        messages: a reply to it included.
        tokens: the same.
    """

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What is known of a prompt, and what stands in the way of knowing more.

    Attributes:
        prompt_tokens: that the model reads.
        bound_messages, bound_tokens: at its beginning that are as they were recorded.
        refusal: why what was recorded was not taken, if it was not.
        restored: what the cache has of it. Where state can only be taken up at places where it was kept,
            `restored.tokens` is the nearest of them, and `restored.kept` may be more.
        again: tokens of it that stand for messages which were computed last, and are computed again.
        against: None: nothing of this conversation is known.
        differences: in the order of the messages; behind one of the class `content` there are no more.
    """

    prompt_tokens: int
    bound_messages: int
    bound_tokens: int
    refusal: str | None
    restored: Restored
    again: int = 0
    against: Against | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def cause(self) -> Difference | None:
        """The difference that counts: behind what was bound, and the severest of those."""
        behind = [
            one for one in self.differences if one.message is None or one.message >= self.bound_messages
        ]
        found = behind or self.differences
        return min(found, key=lambda one: _SEVEREST_FIRST.index(one.drift), default=None)

    @property
    def lost(self) -> int:
        """Tokens that were computed before, and have to be computed again."""
        return max(self.restored.lost, self.again)

    @property
    def is_miss(self) -> bool:
        """A conversation that is known has to be read again, in part at least."""
        return self.against is not None and self.lost > 0

    @property
    def reason(self) -> str:
        """Why tokens are lost, in words."""
        of_cache = _REASONS.get(self.restored.miss or "")
        return of_cache or (str(self.cause) if self.cause else "what was recorded of them is gone")

    @property
    def line(self) -> str:
        """One line for a person."""
        kept = f"{self.restored.tokens:,} of {self.prompt_tokens:,} tokens are kept"
        return f"{self.lost:,} tokens again: {self.reason}; {kept}" if self.lost else f"nothing again: {kept}"


_REASONS = {
    "evicted": "they had to make room",
    "no_state": "no state was kept nearer to their end",
    "off": "there is no cache",
}
