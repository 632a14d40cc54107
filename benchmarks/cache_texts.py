"""What prompts without messages cost when they are repeated, extended and edited: a part of `cache.py`.

What is unavoidable is counted here, from the prompts: what lies after the longest prefix that was computed
before, and at least one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.cache_engine import MAX_STEPS, REPLY_TOKENS, CachedEngine, Model, Row, prompt
from start_llm.cache.pages import common_length
from start_llm.core.events import Finished
from tests.engine.harness import engine_request

NEW_TOKENS = 40
EDITED_TOKENS = 5
EDITS = 4
PLACES = {"the middle": 0.55, "three quarters": 0.8}
"""Where texts are edited, as shares of them: at no multiple of anything."""


class _Reader:
    """Reads prompts, and keeps the ledger."""

    def __init__(self, model: Model) -> None:
        self._engine = CachedEngine(model)
        self._ledger: list[tuple[int, ...]] = []
        self.computed: dict[str, list[int]] = {}
        self.unavoidable: dict[str, list[int]] = {}

    def read(self, what: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Read a prompt and return the reply."""
        watched = self._engine.submit(engine_request(ids, REPLY_TOKENS))
        self._engine.finish(watched, max_steps=MAX_STEPS)
        if not isinstance(watched.ending, Finished):
            raise SystemExit(f"The engine failed: {watched.ending}")
        known = max((common_length(tuple(ids), one) for one in self._ledger), default=0)
        self._ledger.append((*ids, *watched.tokens))
        usage = watched.ending.usage
        self.computed.setdefault(what, []).append(usage.prompt - usage.cached)
        self.unavoidable.setdefault(what, []).append(len(ids) - min(known, len(ids) - 1))
        return tuple(watched.tokens)

    @property
    def told(self) -> tuple[int, int]:
        """Tokens computed and unavoidable, as the cache itself counts them."""
        return self._engine.cached.computed_tokens, self._engine.cached.unavoidable_tokens

    @property
    def checkpoint_bytes(self) -> int:
        return self._engine.cached.checkpoint_bytes


def texts(model: Model, length: int) -> Iterator[Row]:
    """A text is read, repeated, extended three times, and edited at two places."""
    reader, text = _Reader(model), prompt(length)
    reader.read("new", text)
    reader.read("repeated", text)
    for seed in range(3):
        text = (*text, *reader.read("repeated", text), *prompt(NEW_TOKENS, seed + 1))
        reader.read("extended", text)
    for name, share in PLACES.items():
        place = int(share * length)
        for edit in range(EDITS):
            text = (*text[:place], *prompt(EDITED_TOKENS, 100 + edit), *text[place + EDITED_TOKENS :])
            reader.read(f"{'edited again' if edit else 'edited'} in {name}", text)
    told = f"{length:,} tokens; {model.size}"
    for what, computed in reader.computed.items():
        yield _row(model, what, told, sum(computed), sum(reader.unavoidable[what]))
    computed = sum(map(sum, reader.computed.values()))
    unavoidable = sum(map(sum, reader.unavoidable.values()))
    if reader.told != (computed, unavoidable):
        raise SystemExit(f"The cache counts {reader.told} where {(computed, unavoidable)} is.")
    yield _row(model, "all of it", told, computed, unavoidable, ">= 0.97")
    states = f"{reader.checkpoint_bytes / model.bytes_of().of(length):.2f}"
    yield Row("text, states of all of it / KV of one prompt", model.family, told, states)


def _row(model: Model, what: str, told: str, computed: int, unavoidable: int, limit: str = "") -> Row:
    measured = f"{unavoidable / computed:.3f} ({unavoidable:,} of {computed:,})"
    return Row(f"text, {what}: unavoidable / computed", model.family, told, measured, limit)
