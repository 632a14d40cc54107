"""The speed and the memory of the prompt cache, beside its marks.

Everything runs in this process, on random float32 models, with pages of 256 tokens. `--lengths` replaces the
prompt lengths of every part but the random runs, for a quick look.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import cache_memory, cache_speed
from benchmarks.cache_engine import (
    MAX_STEPS,
    REPLY_TOKENS,
    SMALL,
    CachedEngine,
    Families,
    Model,
    mark,
    marks,
    models,
    prompt,
)
from benchmarks.harness import Part
from benchmarks.networks import FAMILIES
from start_llm.core.common_beginning import common_length
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
        self.engine = CachedEngine(model)
        self._ledger: list[tuple[int, ...]] = []
        self.computed: dict[str, list[int]] = {}
        self.unavoidable: dict[str, list[int]] = {}

    def read(self, what: str, ids: Sequence[int]) -> tuple[int, ...]:
        """Read a prompt and return the reply."""
        watched = self.engine.submit(engine_request(ids, REPLY_TOKENS))
        self.engine.finish(watched, max_steps=MAX_STEPS)
        if not isinstance(watched.ending, Finished):
            raise SystemExit(f"The engine failed: {watched.ending}")
        known = max((common_length(tuple(ids), earlier) for earlier in self._ledger), default=0)
        self._ledger.append((*ids, *watched.tokens))
        usage = watched.ending.usage
        self.computed.setdefault(what, []).append(usage.prompt - usage.cached)
        self.unavoidable.setdefault(what, []).append(len(ids) - min(known, len(ids) - 1))
        return tuple(watched.tokens)


@marks
def texts(
    folder: Path, *, family: Families = tuple(FAMILIES), lengths: Sequence[int] = (1024, 2048, 4096)
) -> None:
    """Prompts without messages are repeated, extended and edited: unavoidable tokens over computed ones.

    What is unavoidable is counted here: what lies after the longest prefix that was computed before, and at
    least one token.
    """
    for model in models(folder, family, SMALL):
        for length in lengths:
            _repeated_extended_edited(model, length)


def _repeated_extended_edited(model: Model, length: int) -> None:
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
    size = f"{length:,} tokens"
    for what, computed in reader.computed.items():
        _text_mark(model, what, size, sum(computed), sum(reader.unavoidable[what]))
    computed = sum(map(sum, reader.computed.values()))
    unavoidable = sum(map(sum, reader.unavoidable.values()))
    cached = reader.engine.cached
    if (cached.computed_tokens, cached.unavoidable_tokens) != (computed, unavoidable):
        raise SystemExit(f"The cache counts {cached} where {(computed, unavoidable)} is.")
    _text_mark(model, "all of it", size, computed, unavoidable, ">= 0.97")
    states = f"{cached.checkpoint_bytes / model.bytes_of().of(length):.2f}"
    mark("text, states of all of it / KV of one prompt", model, size, states)


def _text_mark(model: Model, what: str, size: str, computed: int, unavoidable: int, limit: str = "") -> None:
    measured = f"{unavoidable / computed:.3f} ({unavoidable:,} of {computed:,})"
    mark(f"text, {what}: unavoidable / computed", model, size, measured, limit)


PARTS: Mapping[str, Part] = {
    "ttft": cache_speed.ttft,
    "restore": cache_speed.restore,
    "lookup": cache_speed.lookup,
    "sessions": cache_speed.sessions,
    "stored": cache_memory.stored,
    "peak": cache_memory.peak,
    "budget": cache_memory.budget,
    "texts": texts,
}
