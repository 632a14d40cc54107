"""Write the trace: a JSON line for each request, in a file for each session; see `docs/trace.md`."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from start_llm.core.errors import SettingsError
from start_llm.core.events import Restored
from start_llm.core.explanation import Explanation
from start_llm.telemetry.metrics import CacheMetrics
from start_llm.telemetry.request_record import RequestRecord
from start_llm.telemetry.trace_files import TraceFiles

SCHEMA = 1
_DIGEST_BYTES = 8
_OF_FACTS = (
    *("session", "session_source", "parent_session", "branch", "endpoint", "model", "adapter", "messages"),
    *("mended", "images", "prompt_tokens", "stable_prefix_msg_count", "cache_key_delta_chars"),
    *("bound_messages", "bound_tokens", "replaced_tokens", "binding_refusal"),
)
"""Facts of a request that a line has under their own names."""

type Texts = Callable[[], tuple[str, str]]
"""Returns the prompt that the model read and the reply that it wrote."""


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

    def write(self, record: RequestRecord, explanation: Explanation, texts: Texts) -> None:
        """Write the line of a request that has ended.

        Args:
            explanation: of the cache's part.
            texts: called only if lines include them.
        """
        now = self._now()
        fields = {
            "schema": SCHEMA,
            "time": now.isoformat(timespec="milliseconds"),
            **fields_of(record, explanation),
            "cache_metrics_snapshot": self._cache.correctness,
        }
        if self._with_prompts:
            fields["prompt"], fields["reply"] = texts()
        try:
            self._files.append(self._day(now), record.facts.session, json.dumps(fields).encode() + b"\n")
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


def fields_of(record: RequestRecord, explanation: Explanation) -> dict[str, Any]:
    """Return the fields of a line that are about its request alone."""
    facts, restored, cause = record.facts, record.restored or Restored(0), explanation.cause
    return {
        "request_id": facts.id,
        **{name: getattr(facts, name) for name in _OF_FACTS},
        "ending": record.ending,
        "cached_tokens": record.cached,
        "computed_tokens": record.computed,
        "completion_tokens": record.written,
        "ttft_seconds": None if record.ttft_s is None else round(record.ttft_s, 4),
        "total_seconds": round(record.seconds, 4),
        "cache_hit": record.cached > 0 if record.restored else None,
        "miss_reason": restored.miss,
        "kept_tokens": restored.stored,
        "lost_tokens": explanation.lost,
        "disk_tokens": restored.disk_tokens,
        "disk_seconds": round(restored.disk_s, 4),
        "divergent_message": cause.message if cause else None,
        "divergent_token": cause.token if cause else None,
        "drift_class": cause.drift if cause else None,
        "drift_rule": cause.rule if cause else None,
        "cache_metrics_bumped_this_request": {
            "vlm_retreat": int(restored.image_was_cut),
            "hybrid_trim_miss": int(restored.miss == "no_state"),
            "exact_key_rejected_by_model_lcp": restored.rejected_keys,
        },
    }
