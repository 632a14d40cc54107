"""Explain why less of a prompt is cached than of its conversation."""

from dataclasses import dataclass

from start_llm.core.events import Restored

_SEVEREST_FIRST = ("content", "block", "live", "own", "transient", "transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference between a request and what was last computed of its conversation.

    Attributes:
        message: its index; None: before all messages.
        drift: a class of `prompt.drift`, or `content`, which ends the common prefix.
        rule: the name of the rule for it; None if there is none.
        what: in words.
        token: index into the computed tokens where the request's own rendering first differs; None if it does
            not.
        computed, asked: decoded text around that token, as computed and as requested.
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
    """The size of what was computed last of a conversation, a reply included."""

    messages: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The cached part of a prompt, and the reasons why it is not longer.

    Attributes:
        prompt_tokens: tokens that the model reads.
        bound_messages, bound_tokens: length of the prefix that was taken as recorded.
        refusal: why recorded tokens were not used; None if they were, or if there were none.
        restored: what the cache has of the prompt. If non-trimmable state limits where it can resume,
            `restored.tokens` is the nearest such position and `restored.stored` may be more.
        again: tokens of messages that were computed last and are computed again.
        against: None if nothing of this conversation is known.
        differences: in the order of the messages; none follows one of the class `content`.
        is_shown_otherwise: the template writes messages that stayed the same in other tokens than before.
    """

    prompt_tokens: int
    bound_messages: int
    bound_tokens: int
    refusal: str | None
    restored: Restored
    again: int = 0
    against: Against | None = None
    differences: tuple[Difference, ...] = ()
    is_shown_otherwise: bool = False

    @property
    def cause(self) -> Difference | None:
        """The most severe difference: of those after the bound prefix if there are any, else of all."""
        after = [
            difference
            for difference in self.differences
            if difference.message is None or difference.message >= self.bound_messages
        ]
        candidates = after or self.differences
        return min(candidates, key=lambda difference: _SEVEREST_FIRST.index(difference.drift), default=None)

    @property
    def lost(self) -> int:
        """Tokens that were computed before and have to be computed again."""
        return max(self.restored.lost, self.again)

    @property
    def reason(self) -> str:
        """The reason why tokens are lost, in words."""
        of_cache = _REASONS.get(self.restored.miss or "")
        return of_cache or (str(self.cause) if self.cause else self.reason_without_cause)

    @property
    def reason_without_cause(self) -> str:
        """The reason why tokens are lost although the request repeats what came before."""
        if self.is_shown_otherwise:
            return "the template shows earlier messages otherwise than they were computed"
        return "what was recorded of them is gone"

    @property
    def line(self) -> str:
        """The explanation in one line, for the terminal."""
        kept = f"{self.restored.tokens:,} of {counted_tokens(self.prompt_tokens)} are kept"
        lost = f"{counted_tokens(self.lost)} again: {self.reason}"
        return f"{lost}; {kept}" if self.lost else f"nothing again: {kept}"


def counted_tokens(count: int) -> str:
    """Return a number of tokens in words: `1 token`, `2,000 tokens`."""
    return f"{count:,} token" if count == 1 else f"{count:,} tokens"


_REASONS = {
    "evicted": "they had to make room",
    "no_state": "no state was kept nearer to their end",
    "off": "there is no cache",
}
