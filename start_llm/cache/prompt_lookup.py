"""Match prompts in memory, and say why no more of them is restored. Owned by the engine thread."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from start_llm.cache.computed_prefixes import ComputedPrefixIndex
from start_llm.cache.page_store import PageStore
from start_llm.cache.pages import Page
from start_llm.cache.plan import RestorePlan, plan_restore, stored_length
from start_llm.core.events import Miss, Restored
from start_llm.core.thread_owners import ENGINE, owned_by


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """What memory has of a prompt.

    Attributes:
        root: of the prompt's salt.
        ids: all tokens of the prompt.
        matched: the longest path of full pages with the prompt's tokens, as far as their KV is stored.
        plan: restores as much as memory can.
        rejected_keys: number of pages with the right key but other tokens.
    """

    root: Page
    ids: tuple[int, ...]
    matched: list[Page]
    plan: RestorePlan
    rejected_keys: int

    @property
    def end_page(self) -> Page:
        """The last matching page, or the root."""
        return self.matched[-1] if self.matched else self.root


@owned_by(ENGINE)
class PromptLookup:
    """Finds the stored pages of prompts.

    Attributes:
        identity: fingerprint of all that KV depends on, and of the format in which it is kept.
        computed_prefixes: tokens that were ever computed, and perhaps evicted since.
    """

    def __init__(self, store: PageStore, identity: bytes) -> None:
        self.computed_prefixes = ComputedPrefixIndex(store.tree.page_size)
        self.identity = identity
        self._tree = store.tree
        self._has_state = store.layers.has_state

    def match(self, ids: tuple[int, ...], salt: bytes, most: int | None = None) -> PromptMatch:
        """Match a prompt in memory.

        Args:
            most: tokens to restore at most; None: as many as there are.
        """
        rejected, root = self._tree.rejected_keys, self.root(salt)
        matched = self._tree.match(root, ids[:-1])
        plan = plan_restore(root, matched, ids, has_state=self._has_state)
        if most is not None and most < plan.length:
            within = [page for page in matched if page.end <= most]
            plan = plan_restore(root, within, ids[: most + 1], has_state=self._has_state)
        return PromptMatch(root, ids, matched, plan, self._tree.rejected_keys - rejected)

    def root(self, salt: bytes) -> Page:
        """Return the root for a salt. Two digests of equal length keep identity and salt apart."""
        parts = (hashlib.blake2b(part, digest_size=16).digest() for part in (self.identity, salt))
        return self._tree.root(b"".join(parts))

    def explain(
        self, match: PromptMatch, boundaries: Sequence[int], repeated_tokens: int
    ) -> tuple[Restored, int]:
        """Return what is restored and why no more, and how many tokens were computed once as these very ones.

        Four lengths of a prompt's beginning, in tokens, decide what to say about it:

        plan.length         can be restored now
        stored              has KV in the cache, though perhaps no state to continue from
        ever_computed       was computed once as these very tokens, and perhaps evicted since
        repeated_tokens     belongs to messages that were computed once, perhaps rendered as other tokens

        Args:
            boundaries: ends of the messages.
        """
        ids, plan = match.ids, match.plan
        stored = plan.length if plan.is_cut else stored_length(match.root, match.matched, ids)
        known = self.computed_prefixes.known(match.end_page, ids[:-1])
        ever_computed = max(known, stored, plan.length)
        last_end = max(self._last_end(ids, boundaries, ever_computed), plan.length)
        repeated_tokens = max(last_end, min(repeated_tokens, len(ids) - 1))
        restored = Restored(
            plan.length,
            _miss(plan, repeated_tokens=repeated_tokens, stored=stored, ever_computed=last_end),
            rejected_keys=match.rejected_keys,
            stored=max(stored, plan.length),
            repeated_tokens=repeated_tokens,
            image_was_cut=plan.is_cut,
        )
        return restored, ever_computed

    def _last_end(self, ids: tuple[int, ...], boundaries: Sequence[int], length: int) -> int:
        """Return the last end of a page or of a message within `length`; `length` if there are no messages.

        The few tokens after it, which open a reply, are no news: no report says that they are computed again.
        """
        if not boundaries:
            return length
        page_end = length - length % self._tree.page_size
        return max(page_end, *(end for end in message_ends(ids, boundaries) if end <= length), 0)


def message_ends(ids: tuple[int, ...], boundaries: Sequence[int]) -> tuple[int, ...]:
    """Return the ends of the messages, at least one token before the end of the prompt."""
    return tuple(min(end, len(ids) - 1) for end in boundaries)


def _miss(plan: RestorePlan, *, repeated_tokens: int, stored: int, ever_computed: int) -> Miss | None:
    """Return why no more was restored; None if all that was computed before was restored, "new" if nothing
    was.

    Args:
        repeated_tokens: prompt tokens of messages that were computed before, as these tokens or as others.
        stored, ever_computed: how many of these very tokens are stored, and were ever computed.
    """
    if ever_computed > plan.length:
        return "no_state" if stored >= ever_computed else "evicted"
    if repeated_tokens > plan.length:
        return "drift"
    return None if plan.length else "new"
