"""Write the trace: a JSON line for each request, in a file for each session; see `docs/trace.md`."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from start_llm.core.errors import SettingsError
from start_llm.telemetry.metrics import CacheMetrics
from start_llm.telemetry.trace_files import TraceFiles

SCHEMA = 1
_DIGEST_BYTES = 8

type Texts = Callable[[], tuple[str, str]]
"""Returns the prompt that the model read and the reply that it wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """The facts about a request before it runs. Each field is a field of the trace line."""

    request_id: str
    session: str
    session_source: Literal["client", "conversation", "none"]
    parent_session: str | None
    branch: str | None
    endpoint: str
    model: str
    adapter: str | None
    messages: int
    mended: tuple[str, ...] = ()
    images: int
    prompt_tokens: int
    stable_prefix_msg_count: int
    cache_key_delta_chars: int
    bound_messages: int
    bound_tokens: int
    replaced_tokens: int
    binding_refusal: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedReply:
    """The outcome of a request. Each field is a field of the trace line."""

    ending: str
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    ttft_seconds: float | None
    total_seconds: float
    cache_hit: bool | None
    miss_reason: str | None
    kept_tokens: int
    lost_tokens: int
    disk_tokens: int
    disk_seconds: float
    divergent_message: int | None
    divergent_token: int | None
    drift_class: str | None
    drift_rule: str | None
    cache_metrics_bumped_this_request: Mapping[str, int]


def session_digest(tenant: bytes, session: str) -> str:
    """Return 16 hexadecimal digits that name a session of a tenant and reveal nothing about either."""
    digest = hashlib.blake2b(len(tenant).to_bytes(8, "little") + tenant, digest_size=_DIGEST_BYTES)
    digest.update(session.encode(errors="surrogatepass"))
    return digest.hexdigest()


class Trace:
    """Writes the trace. Safe to use from any thread. A disk error is reported once and fails no request.

    Args:
        cache: the counters that every line shows.
        say: prints a line on the terminal.
        with_prompts: lines include the prompt and the reply in clear text.
        now: returns a time with a time zone.
    """

    def __init__(
        self,
        files: TraceFiles,
        cache: CacheMetrics,
        say: Callable[[str], None],
        *,
        with_prompts: bool = False,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._files = files
        self._cache = cache
        self._say = say
        self._with_prompts = with_prompts
        self._now = now
        self._has_complained = False
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self._files.root}{', with prompts and replies in clear' if self._with_prompts else ''}"

    def of(self, cache: CacheMetrics) -> Trace:
        """Return a trace into the same files, whose lines show the counters of another cache."""
        other = copy.copy(self)
        other._cache = cache
        return other

    def start(self) -> None:
        """Check that the trace can be written, and report it if not.

        Raises:
            SettingsError: LOG_ROOT is not a folder.
        """
        try:
            self._files.prepare(self._day(self._now()))
        except OSError as error:
            is_in_the_way = isinstance(error, FileExistsError | NotADirectoryError)
            if is_in_the_way and not self._files.root.is_dir():
                raise SettingsError(f"LOG_ROOT={str(self._files.root)!r}: expected a folder.") from error
            self._complain(error)

    def write(self, asked: TracedRequest, ended: TracedReply, texts: Texts) -> None:
        """Write the line of a request that has ended.

        Args:
            texts: called only if lines include them.
        """
        now = self._now()
        fields = {
            "schema": SCHEMA,
            "time": now.isoformat(timespec="milliseconds"),
            **asdict(asked),
            **asdict(ended),
            "cache_metrics_snapshot": self._cache.correctness,
        }
        if self._with_prompts:
            fields["prompt"], fields["reply"] = texts()
        try:
            self._files.append(self._day(now), asked.session, json.dumps(fields).encode() + b"\n")
        except OSError as error:
            self._complain(error)

    @staticmethod
    def _day(moment: datetime) -> str:
        return moment.strftime("%Y-%m-%d")

    def _complain(self, error: OSError) -> None:
        with self._lock:
            is_news, self._has_complained = not self._has_complained, True
        if is_news:
            self._say(f"The trace cannot be written ({error}). Requests are answered all the same.")


def start_trace(root: Path, cache: CacheMetrics, say: Callable[[str], None], *, with_prompts: bool) -> Trace:
    """Start a trace in this folder.

    Raises:
        SettingsError: it is not a folder.
    """
    trace = Trace(TraceFiles(root), cache, say, with_prompts=with_prompts)
    trace.start()
    return trace
