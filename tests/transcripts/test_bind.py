"""Recorded tokens take the place of fresh ones, exactly up to where a message ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, CanonicalMessage, Conversation, chain
from start_llm.core.prompt import Boundary
from start_llm.transcripts.bind import Bound, bind, record_prompt
from start_llm.transcripts.lineage import Lineages
from start_llm.transcripts.store import Held, Limits, TranscriptStore
from tests.transcripts.fakes import ROOT

CLOSER, TAIL = 0, 99


def store() -> TranscriptStore:
    return TranscriptStore(Limits(most_bytes=10**9), clock=itertools.count(1).__next__)


def rendered(messages: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[Boundary, ...]]:
    """Each message's own tokens, its closer, and a tail that makes the model answer."""
    ids: list[int] = []
    ends: list[Boundary] = []
    for index, message in enumerate(messages):
        ids += message
        ends.append(Boundary(index, len(ids)))
        ids.append(CLOSER)
    return (*ids, TAIL), tuple(ends)


def conversation(messages: Sequence[Sequence[int]], visible: Sequence[bytes] | None = None) -> Conversation:
    said = visible or [bytes(message) for message in messages]
    keys = chain(CanonicalKey.of(b""), [CanonicalMessage(text) for text in said])
    nothing = [None] * len(keys)
    return Conversation(
        tenant=b"",
        root=ROOT,
        roles=["user"] * len(keys),
        messages=(),
        keys=keys,
        echoed=nothing,
        shown=nothing,
        own=nothing,
        live=[()] * len(keys),
        notable=[False] * len(keys),
        ignored=[()] * len(keys),
        session="",
    )


def served(
    kept: TranscriptStore, messages: Sequence[Sequence[int]], visible: Sequence[bytes] | None = None
) -> Bound:
    asked = conversation(messages, visible)
    bound = bind(kept, asked, *rendered(messages), lineages=Lineages())
    record_prompt(kept, asked, bound)
    return bound


MESSAGES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=5)


@given(MESSAGES, st.data())
def test_without_drift_what_is_bound_is_the_fresh_rendering(messages, data):
    kept = store()
    served(kept, messages[: data.draw(st.integers(1, len(messages)))])
    again = served(kept, messages)
    assert (again.ids, again.boundaries) == rendered(messages)
    assert again.prefix is not None


def test_a_reply_goes_on_with_its_thought_although_the_client_took_it_out():
    kept, question, thought, answer = store(), [1, 2], [7, 7], [3]
    first = served(kept, [question])
    reply = conversation([question, answer])
    said = (*first.ids, *thought, *answer)  # the tail, then what the model wrote, without its stop token
    prompt = bind(kept, reply, *rendered([question, answer]), lineages=Lineages()).prefix
    kept.add(
        reply.keys[1],
        1,
        said,
        Held((None, b"a thought"), (None, None), ((), ()), (0, 0), replied=1),
        parent=prompt,
    )
    second = served(kept, [question, answer, [5]])
    assert second.ids == (*said, CLOSER, 5, CLOSER, TAIL)
    assert second.boundaries == (Boundary(0, 2), Boundary(1, len(said)), Boundary(2, len(said) + 2))


def test_what_drifted_is_read_as_it_was_first_and_the_rest_as_it_is_now():
    kept = store()
    served(kept, [[1, 1], [2]], [b"system", b"question"])
    bound = served(kept, [[8, 8, 8], [2], [4]], [b"system", b"question", b"more"])
    assert bound.ids == (1, 1, CLOSER, 2, CLOSER, 4, CLOSER, TAIL)
    assert bound.boundaries == (Boundary(0, 2), Boundary(1, 4), Boundary(2, 6))


def test_what_is_new_is_never_bound():
    kept = store()
    served(kept, [[1], [2]])
    bound = served(kept, [[1], [3]])
    assert bound.ids == rendered([[1], [3]])[0]
    assert bound.prefix is not None and bound.prefix.depth == 0


def test_a_message_whose_end_is_not_known_ends_no_prefix():
    kept, messages = store(), [[1, 1], [2], [3]]
    served(kept, messages)
    ids, boundaries = rendered(messages)
    bound = bind(kept, conversation(messages), ids, boundaries[:1], lineages=Lineages())
    assert bound.prefix is not None and bound.prefix.depth == 0
    assert bound.ids == ids


@given(st.lists(MESSAGES, min_size=1, max_size=6))
def test_whatever_was_served_before_a_prompt_holds_what_the_request_says(requests):
    """Without drift no history changes what a model reads."""
    kept = store()
    for messages in requests:
        assert served(kept, messages).ids == rendered(messages)[0]


def test_a_thought_that_would_be_shown_is_not_hidden():
    """It was dropped when these messages were read last; now it stands in the rendering."""
    kept, messages = store(), [[1], [2], [3]]
    served(kept, messages)
    asked = replace(conversation(messages), shown=[None, b"a thought", None])
    bound = bind(kept, asked, *rendered(messages), lineages=Lineages())
    assert bound.prefix is not None and bound.prefix.depth == 0


OWN = ([b"first", None, None], [b"second", None, None])


def test_what_a_message_has_of_its_own_is_read_as_it_is_sent():
    kept, messages = store(), [[1], [2], [3]]
    first, second = (replace(conversation(messages), own=own) for own in OWN)
    record_prompt(kept, first, bind(kept, first, *rendered(messages), lineages=Lineages()))
    assert bind(kept, second, *rendered(messages), lineages=Lineages()).prefix is None


def test_once_it_was_replied_to_it_stays_as_it_was():
    kept, messages = store(), [[1], [2], [3]]
    first, second = (replace(conversation(messages), own=own) for own in OWN)
    held = Held(tuple(first.shown[:2]), tuple(first.own[:2]), ((), ()), (0, 0), replied=1)
    kept.add(first.keys[1], 1, [9, CLOSER, 2], held)
    assert bind(kept, second, *rendered(messages), lineages=Lineages()).ids[:2] == (9, CLOSER)
