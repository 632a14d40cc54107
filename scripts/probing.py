"""Shared parts of the probes: the numbers of each turn, tables, options, and the exit status.

All numbers come from each reply's `usage` and from `/stats`. A probe exits with status 0 if they are healthy,
with 1 if one falls short, and with 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from chat_client import Reply, Server, Unmeasured

PROXY = "http://127.0.0.1:4000"
HEALTHY = 0.97
"""The cached share of a text prompt that is healthy from the third turn on."""
_WORDS = """
    the file returns a list of names and each value is set when the module imports path class method object
    string index error raise test data line read write open close call default option argument type key
    result state check update remove add start end first last next from with without before after if not
""".split()


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The numbers of one request.

    Attributes:
        number: counts from 1.
        prompt, cached: prompt tokens, and those of them that were restored.
        known: tokens that were computed before, usually those of the last prompt and its reply.
        first_s: seconds until the first text, reasoning or call.
    """

    number: int
    prompt: int
    cached: int
    known: int
    first_s: float

    @property
    def computed(self) -> int:
        return self.prompt - self.cached

    @property
    def new(self) -> int:
        """About how many tokens had to be computed. The last token of a prompt always has to be."""
        return max(self.prompt - self.known, 1)

    @property
    def hit(self) -> float:
        """Cached tokens / prompt tokens."""
        return self.cached / self.prompt

    @property
    def hit_of_known(self) -> float:
        """Cached tokens / tokens that could have been cached; 1 if none could."""
        return self.cached / (self.prompt - self.new) if self.prompt > self.new else 1.0

    @property
    def efficiency(self) -> float:
        return self.new / max(self.computed, 1)

    def shortfall(self, healthy: float) -> str | None:
        """Return what is wrong with this turn, or None.

        With a long history `hit` is judged, otherwise `hit_of_known`. A history is long if the new tokens are
        at most half of the tokens that may be missing.
        """
        is_long = self.new <= (1 - healthy) / 2 * self.prompt
        share, of = (self.hit, "its prompt") if is_long else (self.hit_of_known, "what could be cached")
        if share >= healthy:
            return None
        return f"turn {self.number}: {share:.1%} of {of} was cached, {healthy:.0%} is healthy"

    def cells(self) -> list[str]:
        """Return cells for `TURN_COLUMNS`. For a first turn it is not known what was computed before."""
        counts = [f"{count:,}" for count in (self.number, self.prompt, self.cached, self.computed)]
        estimates = [f"{self.new:,}", f"{self.hit_of_known:.1%}", f"{self.efficiency:.2f}"]
        new, of_known, efficiency = estimates if self.known else ("–",) * len(estimates)
        return [*counts, new, f"{self.hit:.1%}", of_known, efficiency, f"{self.first_s * 1000:,.0f} ms"]


TURN_COLUMNS = ("turn", "prompt", "cached", "computed", "new", "hit", "of known", "efficiency", "TTFT")
TURN_LEGEND = """\
prompt, cached and computed are tokens of each reply's usage. new: what had to be computed, about: the prompt
without what was known, as a rule the last turn's prompt and reply. hit: cached / prompt. of known: cached /
(prompt - new). efficiency: new / computed. TTFT: time to the first text, reasoning or call. Where a hit is
judged and the history is long (what is new is at most half of what may be missing), it is the hit, else that
of what was known."""


@dataclass
class Session:
    """Requests that continue each other, and their numbers."""

    server: Server
    turns: list[Turn] = field(default_factory=list[Turn])
    replies: list[Reply] = field(default_factory=list[Reply])

    def ask(self, body: Mapping[str, Any], known: int | None = None) -> Reply:
        """Send the next request.

        Args:
            known: tokens that were computed before; None: those of the last prompt and its reply.
        """
        reply = self.server.ask(body)
        if known is None:
            known = self.replies[-1].prompt + self.replies[-1].completion if self.replies else 0
        number = len(self.turns) + 1
        counts = {"prompt": reply.prompt, "cached": reply.cached, "known": known}
        self.turns.append(Turn(number=number, first_s=reply.first_s, **counts))
        self.replies.append(reply)
        return reply

    @property
    def last(self) -> Turn:
        return self.turns[-1]

    def print(self) -> None:
        table = Table(TURN_COLUMNS)
        for turn in self.turns:
            table.row(turn.cells())
        self.print_notes()

    def print_notes(self) -> None:
        """Print which replies were cut at their limit, which may reduce reuse."""
        cut = [turn.number for turn, reply in zip(self.turns, self.replies, strict=True) if reply.is_cut]
        if cut:
            numbers = ", ".join(map(str, cut))
            print(f"Cut off at the limit of a reply, which may cost its reuse: turn {numbers} (--max-tokens)")


class Counters:
    """Readings of the cache's counters. The first is taken at creation. Without `/stats` they are empty."""

    STAY = ("vlm_retreat", "exact_key_rejected_by_model_lcp")
    COLD = "hybrid_trim_miss"
    NAMES = (*STAY, COLD, "lookups", "hits", "computed_tokens", "unavoidable_tokens")

    def __init__(self, server: Server) -> None:
        self._server = server
        self._readings: list[Mapping[str, int]] = []
        self._problem = ""
        self.read()

    def read(self) -> None:
        try:
            counts = self._server.stats()["prompt_cache"]
        except Unmeasured as error:
            counts, self._problem = {}, str(error)
        self._readings.append(
            {name: counts[name] for name in self.NAMES if isinstance(counts.get(name), int)}
        )

    def shortfalls(self, cold: int | None = None) -> list[str]:
        """Return the counters that rose but should not have.

        Args:
            cold: index of the first reading after the cold turn; None: `COLD` is not checked.
        """
        if self._problem:
            return []
        watched = dict.fromkeys(self.STAY, 0) | ({} if cold is None else {self.COLD: cold})
        rises = {name: self._rise(name, since) for name, since in watched.items()}
        return [f"{name} rose by {rise}, 0 is healthy" for name, rise in rises.items() if rise]

    def _rise(self, name: str, since: int) -> int:
        return self._readings[-1].get(name, 0) - self._readings[since].get(name, 0)

    def print(self, *titles: str) -> None:
        """Print a table with one column for each reading."""
        if self._problem:
            print(f"\nThe counters are not judged: {self._problem}\n")
            return
        print()
        table = Table(("counter", *titles), self.NAMES)
        for name in self.NAMES:
            table.row([name, *(f"{reading.get(name, 0):,}" for reading in self._readings)])
        print()


def prose(name: str, characters: int) -> str:
    """Return about this many characters of text that ends with `name` and depends on `name` alone."""
    source = random.Random(name)
    words = [source.choice(_WORDS) for _ in range(characters // 5)]
    return f"{' '.join(words)[: max(characters - len(name) - 2, 0)].rstrip()} ({name})"


# -------------------------------------------------------------------------------------- the ends of a program


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return an argument parser with the options that every probe has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", type=_url, default=PROXY, help="the server (default: %(default)s)")
    stats = "whose /stats counts, if several servers are behind the base URL (default: the base URL)"
    parser.add_argument("--stats-url", type=_url, help=stats)
    parser.add_argument("--model", default="local-model", help="its name there (default: %(default)s)")
    parser.add_argument("--api-key", default="", help="where the server wants one")
    parser.add_argument("--timeout", type=float, default=600, help="longest silence in seconds (%(default)s)")
    return parser


def add_length_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the length of conversations and for their reasoning effort."""
    help_text = (
        "characters of context in the system prompt: how long the history is (%(default)s, of which the demo "
        "model shows all; 24000 is what agents send)"
    )
    parser.add_argument("--context-chars", type=int, default=6_000, help=help_text)
    parser.add_argument("--max-tokens", type=int, default=400, help="of a reply (%(default)s)")
    help_text = "reasoning_effort of the requests: none, low, medium, high (%(default)s)"
    parser.add_argument("--effort", default="medium", help=help_text)


def _url(text: str) -> str:
    place = urlsplit(text)
    if place.scheme not in ("http", "https") or not place.hostname or place.port == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no URL such as {PROXY}")
    return text.rstrip("/").removesuffix("/v1")


def server_of(options: argparse.Namespace) -> Server:
    return Server(
        url=options.base_url,
        stats_url=options.stats_url or options.base_url,
        model=options.model,
        api_key=options.api_key,
        timeout_s=options.timeout,
    )


class Table:
    """Prints each row at once: the first column is aligned to the left, the others to the right."""

    def __init__(self, columns: Sequence[str], first: Iterable[str] = (), *, width: int = 7) -> None:
        """Set the widths and print the headings.

        Args:
            first: the cells of the first column, which set its width.
            width: the smallest width of the other columns.
        """
        widest = max(map(len, (columns[0], *first)))
        self._widths = [widest, *(max(len(column), width) for column in columns[1:])]
        self.row(columns)

    def row(self, cells: Sequence[str]) -> None:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, self._widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip(), flush=True)


def verdict(shortfalls: Sequence[str]) -> int:
    """Print what falls short, and return the exit status."""
    for shortfall in shortfalls:
        print(f"falls short: {shortfall}")
    print(f"{len(shortfalls)} falling short" if shortfalls else "healthy")
    return 1 if shortfalls else 0


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the status of `main`; print one line and use 2 if nothing can be measured."""
    try:
        sys.exit(main())
    except Unmeasured as error:
        sys.stdout.flush()
        print(f"{sys.argv[0].rpartition('/')[2]}: {error}", file=sys.stderr)
        sys.exit(2)
