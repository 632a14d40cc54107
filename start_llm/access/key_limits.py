"""What one API key may ask for: requests at once, and tokens a minute."""

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from start_llm.core.errors import RateLimited

_MINUTE_S = 60.0
_OPENAIS = tuple(f"x-ratelimit-{what}-tokens" for what in ("limit", "remaining", "reset"))
_ANTHROPICS = tuple(f"anthropic-ratelimit-tokens-{what}" for what in ("limit", "remaining", "reset"))
LIMIT_HEADERS = (*_OPENAIS, *_ANTHROPICS)
"""Headers that tell what is left of a key's tokens."""


@dataclass(frozen=True, slots=True)
class TokensLeft:
    """What a key may have computed now.

    Attributes:
        limit: tokens a minute.
        left: of these.
        full_in_s: seconds until all of them are left again, if nothing is computed meanwhile.
    """

    limit: int
    left: int
    full_in_s: float

    def openai_headers(self) -> Mapping[str, str]:
        """Return the headers of https://platform.openai.com/docs/guides/rate-limits."""
        return dict(zip(_OPENAIS, (str(self.limit), str(self.left), f"{self.full_in_s:.3f}s"), strict=True))

    def anthropic_headers(self) -> Mapping[str, str]:
        """Return the headers of https://docs.anthropic.com/en/api/rate-limits."""
        reset = datetime.now(UTC) + timedelta(seconds=self.full_in_s)
        moment = reset.strftime("%Y-%m-%dT%H:%M:%SZ")
        return dict(zip(_ANTHROPICS, (str(self.limit), str(self.left), moment), strict=True))


@dataclass(slots=True)
class _Use:
    """What one key has taken.

    Attributes:
        running: its requests that are being answered.
        tokens: computed for it, less those that a minute's limit has given back since.
        at: when `tokens` was true.
    """

    running: int = 0
    tokens: float = 0.0
    at: float = 0.0


class KeyLimits:
    """Keeps each API key within limits, by its digest. Thread-safe.

    Tokens are those that were computed: of prompts without what the cache had, and of replies. The
    number is known only after a reply. So a request is admitted while any are left; what it uses beyond the
    limit delays later ones.

    Args:
        requests: at once; 0: any.
        tokens_per_minute: of the model; 0: any.
        patience_s: seconds that a request beyond the limit waits for room. A client that has read a reply to
            its end may send the next request before the server has done with the first.
        clock: in seconds.
    """

    def __init__(
        self,
        requests: int = 0,
        tokens_per_minute: int = 0,
        *,
        patience_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._tokens_per_minute = tokens_per_minute
        self._patience_s = patience_s
        self._clock = clock
        self._uses: dict[bytes, _Use] = {}
        self._changed = threading.Condition()

    @contextmanager
    def request(self, key: bytes) -> Generator[TokensLeft | None]:
        """Let a request be answered in the block. Yields what is left, None if tokens have no limit.

        Raises:
            RateLimited: the key has as many requests or tokens as it may have.
        """
        left = self._admit(key)
        try:
            yield left
        finally:
            with self._changed:
                self._uses[key].running -= 1
                self._changed.notify_all()

    def count_tokens(self, key: bytes, count: int) -> None:
        """Count tokens that were computed for a key."""
        if self._tokens_per_minute:
            with self._changed:
                self._use(key).tokens += count

    def _admit(self, key: bytes) -> TokensLeft | None:
        with self._changed:
            self._forget_unused()
            if not self._changed.wait_for(lambda: self._has_room(key), self._patience_s):
                raise RateLimited(f"This key has {self._requests} requests that are being answered.")
            use = self._use(key)
            left = self._tokens_left(use) if self._tokens_per_minute else None
            use.running += 1
            return left

    def _has_room(self, key: bytes) -> bool:
        return not self._requests or self._use(key).running < self._requests

    def _tokens_left(self, use: _Use) -> TokensLeft:
        limit = self._tokens_per_minute
        if limit - use.tokens < 1:
            wait_s = math.ceil((use.tokens - limit + 1) * _MINUTE_S / limit)
            problem = f"This key has had its {limit:,} tokens a minute computed."
            raise RateLimited(problem, retry_after_s=wait_s)
        return TokensLeft(limit, int(limit - use.tokens), use.tokens * _MINUTE_S / limit)

    def _use(self, key: bytes) -> _Use:
        """Return what a key has taken until now."""
        use, now = self._uses.setdefault(key, _Use()), self._clock()
        use.tokens = max(use.tokens - (now - use.at) * self._tokens_per_minute / _MINUTE_S, 0.0)
        use.at = now
        return use

    def _forget_unused(self) -> None:
        """Forget keys that have all of their limits left: anybody can send any number of keys."""
        for key in [*self._uses]:
            use = self._use(key)
            if not use.running and not use.tokens:
                del self._uses[key]
