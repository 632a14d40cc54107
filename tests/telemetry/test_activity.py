"""The records of what requests do and did: what they say, and that they stay small."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest

from start_llm.core.events import Finished, Restored, Usage
from start_llm.core.explanation import Against, Difference, Explanation
from start_llm.telemetry import activity as module
from start_llm.telemetry.account import Reports, RequestAccount
from start_llm.telemetry.activity import Activity, Refusal, plain_reason
from start_llm.telemetry.metrics import RequestMetrics
from start_llm.telemetry.request_record import RequestFacts, RequestRecord
from start_llm.telemetry.terminal import Terminal

LONG = "ä" * 100_000


def facts(tenant: bytes = b"", session: str = "s", **changes: Any) -> RequestFacts:
    fields: dict[str, Any] = {
        "id": "req_1",
        "tenant": tenant,
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "session": session,
        "name": "",
        "session_source": "client",
        "prompt_tokens": 100,
    }
    return RequestFacts(**fields | changes)


def explanation(lost: int = 0, miss: Any = "drift", cause: Difference | None = None) -> Explanation:
    return Explanation(
        prompt_tokens=100,
        bound_messages=0,
        bound_tokens=0,
        refusal=None,
        restored=Restored(40, miss),
        again=lost,
        against=Against(messages=3, tokens=90),
        differences=(cause,) if cause else (),
    )


def difference(**changes: Any) -> Difference:
    fields: dict[str, Any] = {
        "message": 2,
        "role": "user",
        "drift": "content",
        "rule": None,
        "what": "says something else",
        "token": 40,
        "computed": "was",
        "asked": "is",
    }
    return Difference(**fields | changes)


def ended(activity: Activity, asked: RequestFacts, explained: Explanation | None = None) -> None:
    """Let a request run of which 40 tokens were cached."""
    record = RequestRecord(asked)
    activity.begin(record)
    record.note_restored(Restored(40))
    record.explanation = explained or explanation()
    record.note_text(7, time.perf_counter())
    activity.end(record)


def test_a_request_runs_in_phases_and_then_is_finished():
    activity = Activity(lambda: 1000.0)
    running = RequestRecord(facts())
    activity.begin(running)
    assert [(record.phase, record.began) for record in activity.running()] == [("waiting", 1000.0)]
    running.note_restored(Restored(40))
    assert (running.phase, running.cached, running.done) == ("reading", 40, 40)
    running.note_text(2, time.perf_counter())
    running.note_text(1, time.perf_counter())
    assert (running.phase, running.done, running.written) == ("writing", 100, 3)
    running.note_finished(Finished("stop", Usage(prompt=100, cached=40, completion=7)))
    activity.end(running)
    assert activity.running() == ()
    (finished,) = activity.finished()
    assert (finished.ended, finished.ending, finished.written, finished.again) == (1000.0, "stop", 7, 0)


def test_tokens_that_were_read_again_have_a_reason_and_the_words_that_differ():
    activity = Activity()
    ended(activity, facts(), explanation(30, cause=difference()))
    (finished,) = activity.finished()
    assert (finished.again, finished.reason) == (30, "message 3 (user) says something else")
    assert (finished.computed_text, finished.asked_text) == ("was", "is")
    ((_, (turn,)),) = activity.conversations()
    assert (turn.cached, turn.new, turn.again, turn.reason) == (40, 30, 30, finished.reason)


def test_words_that_are_not_the_reason_are_not_kept():
    activity = Activity()
    ended(activity, facts(), explanation(30, "evicted", difference()))
    ended(activity, facts(), explanation(0, cause=difference()))
    assert [record.has_difference for record in activity.finished()] == [False, False]


@pytest.mark.parametrize(
    ("explained", "words"),
    [
        (explanation(1, "evicted"), "they had been dropped to make room for others"),
        (explanation(1, "off"), "the cache is off"),
        (explanation(1, "drift"), "what was recorded of them is gone"),
        (
            explanation(1, cause=difference(message=None, role=None, what="have other tools")),
            "the request has other tools",
        ),
        (
            explanation(1, cause=difference(rule="date", drift="live", what="has changed")),
            "'date' in message 3 (user) has changed",
        ),
    ],
)
def test_reasons_are_plain_words(explained: Explanation, words: str):
    assert plain_reason(explained) == words


def test_what_never_began_to_be_read_is_no_turn():
    activity = Activity()
    never = RequestRecord(facts())
    activity.begin(never)
    activity.end(never)
    ended(activity, facts(session_source="none"))
    assert activity.conversations() == ()
    assert len(activity.finished()) == 2


def test_a_prewarm_is_no_turn():
    activity = Activity()
    ended(activity, facts(is_prewarm=True))
    assert (activity.conversations(), len(activity.finished())) == ((), 1)


def test_a_request_that_cannot_be_explained_ends_all_the_same():
    def explain(_: Restored) -> Explanation:
        raise ZeroDivisionError

    activity, terminal = Activity(), Terminal(io.StringIO())
    account = RequestAccount(
        Reports(RequestMetrics(), terminal, activity=activity), RequestRecord(facts()), explain
    )
    account.begin()
    account.note(Restored(40))
    with pytest.raises(ZeroDivisionError):
        account.end(lambda: ("", ""))
    assert (activity.running(), len(activity.finished())) == ((), 1)


def test_equal_refusals_are_counted_as_one():
    clock = iter(range(1000)).__next__
    activity = Activity(clock)
    scan = Refusal(tenant=None, method="GET", path="/admin", status=404, reason="nothing")
    for _ in range(5):
        activity.refuse(scan)
    activity.refuse(Refusal(tenant=b"a", method="GET", path="/admin", status=404, reason="nothing"))
    assert [(row.tenant, row.times, row.last) for row in activity.refused()] == [(b"a", 1, 5), (None, 5, 4)]


def test_conversations_of_two_tenants_with_one_name_are_apart():
    activity = Activity()
    ended(activity, facts(b"a"))
    ended(activity, facts(b"b"))
    ended(activity, facts(b"a"))
    assert [(talk.tenant, len(turns)) for talk, turns in activity.conversations()] == [(b"a", 2), (b"b", 1)]


def test_the_version_changes_with_the_records_alone():
    activity, other = Activity(), Activity()
    versions = [activity.version]
    running = RequestRecord(facts())
    activity.begin(running)
    running.note_text(1, time.perf_counter())
    assert activity.version == versions[0]
    activity.end(running)
    versions.append(activity.version)
    activity.refuse(Refusal(tenant=None, method="GET", path="/", status=403, reason="no"))
    versions.append(activity.version)
    assert len({*versions, other.version}) == 4
    assert [activity.last_number_in(version) for version in (*versions, other.version, None)] == [
        0,
        1,
        2,
        None,
        None,
    ]


@pytest.mark.thorough
def test_records_stay_small_whatever_clients_send():
    activity = Activity()
    cause = difference(computed=LONG, asked=LONG, what=LONG)
    for number in range(3000):
        asked = facts(session=f"s{number % 300}", id=f"{number}{LONG}", name=LONG, model=LONG)
        ended(activity, asked, explanation(30, cause=cause))
        activity.refuse(
            Refusal(tenant=None, method=LONG, path=f"/{number}{LONG}", status=400, reason=f"{number}{LONG}")
        )
    for _ in range(100):
        ended(activity, facts())
    assert len(activity.finished()) == module._MAX_FINISHED
    assert len(activity.refused()) == module._MAX_REFUSED
    assert len(activity.conversations()) == module._MAX_CONVERSATIONS
    assert len(activity.conversations()[0][1]) == module._MAX_TURNS
    assert _size(activity.finished(), activity.refused(), activity.conversations()) < 2_000_000


def _size(*values: Any) -> int:
    """Bytes of all texts in records, each counted once."""
    texts: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, str | bytes):
            texts[id(value)] = sys.getsizeof(value)
        elif isinstance(value, tuple | list):
            for item in value:
                walk(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                walk(getattr(value, name))

    walk(values)
    return sum(texts.values())
