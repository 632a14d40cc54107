"""Print the prompt cache of a running server from its /stats: sizes, hits, misses by reason.

    python scripts/inspect_mlx_cache.py [--base-url http://127.0.0.1:8080]

Numbers that the server does not report are left out. The exit status is 1 if vlm_retreat or
exact_key_rejected_by_model_lcp is not 0, and 2 if there is no /stats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from probing import Counters, Table, parser_of, run, server_of, verdict

Section = Mapping[str, Any]
_KINDS = {
    "pages": "shared pages",
    "sequence_caches": "conversations at rest",
    "checkpoints": "states",
    "live": "running rows",
}
_REASONS = {
    "new": "new: never seen",
    "evicted": "evicted: no longer kept",
    "no_state": "no_state: kept, but for the state at its end",
    "drift": "drift: computed in other words",
    "off": "off: no cache",
}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else "–"


def _bytes(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    for unit in ("B", "KB", "MB"):
        if abs(value) < 1000:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.2f} GB"


def _share(part: Any, whole: Any) -> str:
    return f"{part / whole:.1%}" if isinstance(part, int | float) and whole else "–"


def memory(cache: Section) -> Iterator[tuple[str, str, str]]:
    """Yield bytes by kind, with their shares of the budget. The budget includes running sequences."""
    budget, kinds = cache.get("max_bytes"), cache.get("bytes_by_kind") or {}
    for kind, label in _KINDS.items():
        if kind in kinds:
            yield label, _bytes(kinds[kind]), _share(kinds[kind], budget)
    total = sum(kinds.values()) or cache.get("bytes")
    yield "together", _bytes(total), _share(total, budget)
    yield "budget", _bytes(budget), ""


def things(cache: Section) -> Iterator[tuple[str, str, str]]:
    names = {"entries": "pages", "sequence_caches": "conversations at rest", "checkpoints": "checkpoints"}
    names |= {"arrays": "arrays", "evictions": "evictions"}
    for name, label in names.items():
        if name in cache:
            yield label, _count(cache[name]), ""


def lookups(cache: Section) -> Iterator[tuple[str, str, str]]:
    """Yield the lookups by result. A prompt that was only partly restored also has a miss reason."""
    total = cache.get("lookups")
    for name in ("lookups", "hits", "misses", "reused_in_place"):
        yield name.replace("_", " "), _count(cache.get(name)), _share(cache.get(name), total)
    for reason, number in (cache.get("misses_by_reason") or {}).items():
        yield f"  {_REASONS.get(reason, reason)}", _count(number), _share(number, total)


def tokens(cache: Section) -> Iterator[tuple[str, str, str]]:
    counts = [cache.get(f"{name}_tokens") for name in ("reused", "computed", "unavoidable")]
    labels = ("reused", "computed", "  of them unavoidable")
    prompts = sum(count or 0 for count in counts[:2])
    for name, count in zip(labels, counts, strict=True):
        yield name, _count(count), _share(count, prompts)
    efficiency = cache.get("efficiency")
    yield "efficiency (unavoidable / computed)", "–" if efficiency is None else f"{efficiency:.4f}", ""


def counters(cache: Section) -> Iterator[tuple[str, str, str]]:
    for name in (*Counters.STAY, Counters.COLD):
        yield name, _count(cache.get(name)), "0 is healthy" if name in Counters.STAY else ""


def session_turns(transcripts: Section) -> Iterator[tuple[str, str, str]]:
    """Yield the counters of the transcripts (the session turn store)."""
    requests = sum(transcripts.get(name) or 0 for name in ("bound", "fresh"))
    for name, value in transcripts.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}: {reason}", _count(number), "") for reason, number in value.items())
        elif name == "bytes":
            yield name, _bytes(value), ""
        else:
            share = _share(value, requests) if name in ("bound", "fresh") else ""
            yield name.replace("_", " "), _count(value), share


TABLES: Mapping[str, tuple[str, Callable[[Section], Iterator[tuple[str, str, str]]]]] = {
    "memory": ("prompt_cache", memory),
    "kept": ("prompt_cache", things),
    "prompts": ("prompt_cache", lookups),
    "prompt tokens": ("prompt_cache", tokens),
    "counters": ("prompt_cache", counters),
    "session turn store": ("transcripts", session_turns),
}


def print_tables(stats: Mapping[str, Any]) -> None:
    for title, (section, rows_of) in TABLES.items():
        rows = list(rows_of(stats.get(section) or {}))
        if not rows:
            continue
        heading = "share" if any(row[2].endswith("%") for row in rows) else ""
        table = Table((title, "", heading), (row[0] for row in rows), width=12)
        for row in rows:
            table.row(row)
        print()


def main() -> int:
    server = server_of(parser_of(__doc__).parse_args())
    stats = server.stats()
    described = stats.get("server") or {}
    print(f"{described.get('model', 'a server')} at {server.stats_url}\n")
    print_tables(stats)
    cache = stats["prompt_cache"]
    return verdict([f"{name} is {cache[name]:,}, 0 is healthy" for name in Counters.STAY if cache.get(name)])


if __name__ == "__main__":
    run(main)
