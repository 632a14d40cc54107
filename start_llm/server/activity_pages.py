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

    Attributes:
        asks_key: the server asks for keys.
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
        version = self.activity.version  # before the records: those that come meanwhile are told twice
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
        mine = [one for one in running if self._is_shown(one.facts, tenant)]
        hour, day = activity.savings()
        return {
            "now": round(now, 3),
            "device": self.machine.device,
            "started_at": self.models.started_at,
            "shows_all_keys": not self.asks_key,
            "running": [_running(one, tenant, now) for one in mine[:_MAX_SHOWN]],
            "running_of_others": len(running) - len(mine),
            "saved": {"hour": _saving(hour), "day": _saving(day)},
            "memory": _memory(self.machine.budget_bytes, memory_parts(listed)),
            "speculation": _speculation(listed),
            "ssd": _ssd(self.machine.disk),
            "models": [_model(one) for one in listed],
        }

    def difference(self, request: PageRequest) -> Page:
        """Return the words that differ, if this is why a request of this tenant was read again.

        Raises:
            NotFound: there is no such request, it is of another tenant, or no words differ.
        """
        for one in self.activity.finished():
            if (one.facts.id, one.facts.tenant) == (request.name, request.tenant) and one.has_difference:
                return 200, {
                    "id": request.name,
                    "reason": one.reason,
                    "computed": one.computed_text,
                    "asked": one.asked_text,
                }
        raise NotFound("There is no such request, or no text of it differs.")

    def _is_shown(self, facts: RequestFacts, tenant: bytes) -> bool:
        return not self.asks_key or facts.tenant == tenant

    def _recent(self, tenant: bytes, last: int) -> list[Json]:
        newer = takewhile(lambda one: one.number > last, self.activity.finished())
        shown = [one for one in newer if self._is_shown(one.facts, tenant)]
        return [_finished(one, tenant) for one in shown[:_MAX_SHOWN]]

    def _conversations(self, tenant: bytes, last: int) -> list[Json]:
        newer = takewhile(lambda one: one[1][-1].number > last, self.activity.conversations())
        return [
            {**_session(facts, tenant), "turns": [_turn(turn) for turn in turns if turn.number > last]}
            for facts, turns in newer
            if self._is_shown(facts, tenant)
        ]

    def _refused(self, tenant: bytes, last: int) -> list[Json]:
        return [
            _refusal(one, has_texts=one.tenant in (None, tenant))
            for one in takewhile(lambda one: one.number > last, self.activity.refused())
            if not self.asks_key or one.tenant in (None, tenant)
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


def _running(one: RequestRecord, tenant: bytes, now: float) -> Json:
    return {
        **_who(one.facts, tenant),
        "endpoint": one.facts.endpoint,
        "phase": one.phase,
        "prompt_tokens": one.facts.prompt_tokens,
        **members(one, "cached_tokens=cached done_tokens=done written_tokens=written"),
        "tokens_per_second": _rounded(one.tokens_per_s),
        "seconds": round(max(now - one.began, 0.0), 1),
    }


def _finished(one: RequestRecord, tenant: bytes) -> Json:
    return {
        **_who(one.facts, tenant),
        "endpoint": one.facts.endpoint,
        "ended_at": round(one.ended, 3),
        "ending": one.ending,
        "prompt_tokens": one.facts.prompt_tokens,
        **members(one, "cached_tokens=cached computed_tokens=computed written_tokens=written"),
        "ttft_seconds": None if one.ttft_s is None else round(one.ttft_s, 3),
        "seconds": round(one.seconds, 3),
        "read_per_second": _rounded(one.read_per_s),
        "written_per_second": _rounded(one.written_per_s),
        "again_tokens": one.again,
        "reason": one.reason,
        "has_difference": one.has_difference and one.facts.tenant == tenant,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _turn(turn: ConversationTurn) -> Json:
    return {
        "ended_at": round(turn.ended, 3),
        **members(turn, "cached_tokens=cached new_tokens=new again_tokens=again reason"),
    }


def _refusal(one: Refusal, *, has_texts: bool) -> Json:
    return {
        "last_at": round(one.last, 3),
        "times": one.times,
        "method": one.method if has_texts else "",
        "path": one.path if has_texts else "",
        "status": one.status,
        "reason": one.reason if has_texts else HTTPStatus(one.status).phrase,
    }


def _saving(saving: Saving) -> Json:
    return {
        "cached_tokens": saving.cached,
        "prompt_tokens": saving.cached + saving.computed,
        "saved_seconds": None if saving.saved_s is None else round(saving.saved_s, 1),
    }


def memory_parts(listed: Sequence[ListedModel]) -> Mapping[str, int]:
    """Return the bytes of loaded models and of their caches, by what they are for."""
    statuses = [one.status for one in listed if one.status]
    caches = [one.metrics.cache for one in statuses]
    return {
        "weights": sum(one.card.weights_bytes for one in statuses),
        "pages": sum(one.page_bytes for one in caches),
        "checkpoints": sum(one.checkpoint_bytes for one in caches),
        "sequence_caches": sum(one.seq_cache_bytes for one in caches),
        "live": sum(one.live_bytes for one in caches),
        "images": sum(one.metrics.engine.image_bytes for one in statuses),
    }


def _memory(budget_bytes: int, parts: Mapping[str, int]) -> Json:
    free_bytes = max(budget_bytes - sum(parts.values()), 0)
    return {"budget_bytes": budget_bytes, "parts": {**parts}, "free_bytes": free_bytes}


def _speculation(listed: Sequence[ListedModel]) -> Json:
    """Return what drafts have done in all loaded models."""
    drafts = [one.status.metrics.engine.drafts for one in listed if one.status]
    return {
        "pays": any(one.pays for one in drafts),
        "drafted_tokens": sum(one.drafted_tokens for one in drafts),
        "accepted_tokens": sum(one.accepted_tokens for one in drafts),
        "saved_seconds": round(sum(one.saved_s for one in drafts), 1),
    }


def _ssd(disk: DiskMetrics) -> Json:
    return {
        **members(disk, "state files bytes=nbytes max_bytes hits restored_tokens"),
        "restored_seconds": round(disk.restored_s, 3),
        **members(disk, "written_today_bytes queue errors"),
    }


def _model(one: ListedModel) -> Json:
    return {
        **members(one, "id state in_flight"),
        "aliases": list(one.aliases),
        "context_window": one.card.context_window if one.card else None,
    }
