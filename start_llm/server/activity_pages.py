"""Renders `/activity`: what the server does now and did lately, for the status page."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import takewhile

from start_llm.core.chat import Json
from start_llm.core.errors import NotFound
from start_llm.server.page_request import Page, PageRequest, members
from start_llm.server.served_models import ListedModel, ServedModels
from start_llm.telemetry.activity import Activity, ConversationTurn, Refusal
from start_llm.telemetry.metrics import DiskMetrics
from start_llm.telemetry.request_record import RequestFacts, RequestRecord
from start_llm.telemetry.savings import Saving

_MAX_SHOWN = 50
_NOTHING_NEWER: Mapping[str, Json] = {"recent": [], "conversations": [], "refused": []}


@dataclass(frozen=True, slots=True)
class ServingMachine:
    """Where the models compute, the memory that they may use, and the disk tier."""

    device: str = ""
    budget_bytes: int = 0
    disk: DiskMetrics = field(default_factory=DiskMetrics)


@dataclass(frozen=True, slots=True)
class ActivityPages:
    """Answers requests about activity. Never waits for the engine.

    If the server asks for keys, each key sees its own requests only. If it does not, everybody sees the
    numbers of all, since clients send any key that they like; names of sessions and texts are still those of
    the caller's own key alone.
    """

    models: ServedModels
    activity: Activity
    machine: ServingMachine
    asks_key: bool

    def overview(self, request: PageRequest) -> Page:
        """Return what happens now, and the records of what has happened.

        If `since` is the `version` of an earlier answer, only records that are newer are among them, so that
        a page that asks every two seconds costs little.
        """
        version = self.activity.version  # before the records: those that come meanwhile are sent twice
        since = request.fields.text("since")
        last = self.activity.last_number_in(since)
        return 200, {
            "version": version,
            **self._present(request.tenant),
            "is_whole": last is None,
            **(_NOTHING_NEWER if since == version else self._records(request.tenant, last or 0)),
        }

    def _records(self, tenant: bytes, last: int) -> Mapping[str, Json]:
        return {
            "recent": self._recent(tenant, last),
            "conversations": self._conversations(tenant, last),
            "refused": self._refused(tenant, last),
        }

    def _present(self, tenant: bytes) -> dict[str, Json]:
        activity, listed = self.activity, self.models.listed()
        now, running = activity.now, activity.running()
        mine = [record for record in running if self._is_shown(record.facts, tenant)]
        hour, day = activity.savings()
        return {
            "now": round(now, 3),
            "device": self.machine.device,
            "started_at": self.models.started_at,
            "shows_all_keys": not self.asks_key,
            "running": [_running(record, tenant, now) for record in mine[:_MAX_SHOWN]],
            "running_of_others": len(running) - len(mine),
            "saved": {"hour": _saving(hour), "day": _saving(day)},
            "memory": _memory(self.machine.budget_bytes, memory_parts(listed)),
            "speculation": _speculation(listed),
            "ssd": _ssd(self.machine.disk),
            "models": [_model(model) for model in listed],
        }

    def difference(self, request: PageRequest) -> Page:
        """Return the words that differ, if this is why a request of this tenant was read again.

        Raises:
            NotFound: there is no such request, it is of another tenant, or no words differ.
        """
        wanted = request.name, request.tenant
        for record in self.activity.finished():
            if (record.facts.id, record.facts.tenant) == wanted and record.has_difference:
                return 200, {
                    "id": request.name,
                    "reason": record.reason,
                    "computed": record.computed_text,
                    "asked": record.asked_text,
                }
        raise NotFound("There is no such request, or no text of it differs.")

    def _is_shown(self, facts: RequestFacts, tenant: bytes) -> bool:
        return not self.asks_key or facts.tenant == tenant

    def _recent(self, tenant: bytes, last: int) -> list[Json]:
        newer = takewhile(lambda record: record.number > last, self.activity.finished())
        shown = [record for record in newer if self._is_shown(record.facts, tenant)]
        return [_finished(record, tenant) for record in shown[:_MAX_SHOWN]]

    def _conversations(self, tenant: bytes, last: int) -> list[Json]:
        newer = takewhile(
            lambda conversation: conversation[1][-1].number > last, self.activity.conversations()
        )
        return [
            {**_session(facts, tenant), "turns": [_turn(turn) for turn in turns if turn.number > last]}
            for facts, turns in newer
            if self._is_shown(facts, tenant)
        ]

    def _refused(self, tenant: bytes, last: int) -> list[Json]:
        return [
            _refusal(refusal, has_texts=refusal.tenant in (None, tenant))
            for refusal in takewhile(lambda refusal: refusal.number > last, self.activity.refused())
            if not self.asks_key or refusal.tenant in (None, tenant)
        ]


def _session(facts: RequestFacts, tenant: bytes) -> dict[str, Json]:
    """Return what identifies a session. Its key alone sees the name that the client gave it."""
    name = facts.name if facts.tenant == tenant else ""
    return {
        "session": facts.session,
        "name": name or facts.session[:6],
        "client": facts.client,
        "model": facts.model,
    }


def _who(facts: RequestFacts, tenant: bytes) -> dict[str, Json]:
    """Return what identifies a request. Its id proves who has received the reply: others get a digest."""
    digest = hashlib.blake2b(facts.id.encode(), digest_size=8).hexdigest()
    return {"id": facts.id if facts.tenant == tenant else digest, **_session(facts, tenant)}


def _running(record: RequestRecord, tenant: bytes, now: float) -> Json:
    return {
        **_who(record.facts, tenant),
        "endpoint": record.facts.endpoint,
        "phase": record.phase,
        "prompt_tokens": record.facts.prompt_tokens,
        **members(record, "cached_tokens=cached done_tokens=done written_tokens=written"),
        "tokens_per_second": _rounded(record.tokens_per_s),
        "seconds": round(max(now - record.began, 0.0), 1),
    }


def _finished(record: RequestRecord, tenant: bytes) -> Json:
    return {
        **_who(record.facts, tenant),
        "endpoint": record.facts.endpoint,
        "ended_at": round(record.ended, 3),
        "ending": record.ending,
        "prompt_tokens": record.facts.prompt_tokens,
        **members(record, "cached_tokens=cached computed_tokens=computed written_tokens=written"),
        "ttft_seconds": None if record.ttft_s is None else round(record.ttft_s, 3),
        "seconds": round(record.seconds, 3),
        "read_per_second": _rounded(record.read_per_s),
        "written_per_second": _rounded(record.written_per_s),
        "again_tokens": record.again,
        "reason": record.reason,
        "has_difference": record.has_difference and record.facts.tenant == tenant,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _turn(turn: ConversationTurn) -> Json:
    return {
        "ended_at": round(turn.ended, 3),
        **members(turn, "cached_tokens=cached new_tokens=new again_tokens=again reason"),
    }


def _refusal(refusal: Refusal, *, has_texts: bool) -> Json:
    return {
        "last_at": round(refusal.last, 3),
        "times": refusal.times,
        "method": refusal.method if has_texts else "",
        "path": refusal.path if has_texts else "",
        "status": refusal.status,
        "reason": refusal.reason if has_texts else HTTPStatus(refusal.status).phrase,
    }


def _saving(saving: Saving) -> Json:
    return {
        "cached_tokens": saving.cached,
        "prompt_tokens": saving.cached + saving.computed,
        "saved_seconds": None if saving.saved_s is None else round(saving.saved_s, 1),
    }


def memory_parts(listed: Sequence[ListedModel]) -> Mapping[str, int]:
    """Return the bytes of loaded models and of their caches, by what they are for."""
    statuses = [model.status for model in listed if model.status]
    caches = [status.cache for status in statuses]
    return {
        "weights": sum(status.card.weights_bytes for status in statuses),
        "pages": sum(cache.page_bytes for cache in caches),
        "checkpoints": sum(cache.checkpoint_bytes for cache in caches),
        "sequence_caches": sum(cache.seq_cache_bytes for cache in caches),
        "live": sum(cache.live_bytes for cache in caches),
        "images": sum(status.engine.image_bytes for status in statuses),
    }


def _memory(budget_bytes: int, parts: Mapping[str, int]) -> Json:
    free_bytes = max(budget_bytes - sum(parts.values()), 0)
    return {"budget_bytes": budget_bytes, "parts": {**parts}, "free_bytes": free_bytes}


def _speculation(listed: Sequence[ListedModel]) -> Json:
    """Return what drafts have done in all loaded models."""
    drafts = [model.status.engine.drafts for model in listed if model.status]
    return {
        "pays": any(metrics.pays for metrics in drafts),
        "drafted_tokens": sum(metrics.drafted_tokens for metrics in drafts),
        "accepted_tokens": sum(metrics.accepted_tokens for metrics in drafts),
        "saved_seconds": round(sum(metrics.saved_s for metrics in drafts), 1),
    }


def _ssd(disk: DiskMetrics) -> Json:
    return {
        **members(disk, "state files bytes=nbytes max_bytes hits restored_tokens"),
        "restored_seconds": round(disk.restored_s, 3),
        **members(disk, "written_today_bytes queue errors"),
    }


def _model(model: ListedModel) -> Json:
    return {
        **members(model, "id state in_flight"),
        "aliases": list(model.aliases),
        "context_window": model.card.context_window if model.card else None,
    }
