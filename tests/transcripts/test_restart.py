"""Transcripts that are closed and loaded again answer exactly like those of a server that never stopped."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.core.canonical import CanonicalKey, CanonicalMessage, Conversation, Field, OmittedText, chain
from start_llm.core.chat import Message
from start_llm.core.events import Content, Finished, Usage
from start_llm.storage.database import Database, DatabaseTable
from start_llm.transcripts.conversation_names import ConversationNames
from start_llm.transcripts.prefix_history import PrefixHistory
from start_llm.transcripts.reasoning_store import ReasoningStore, RecordedReasoning
from start_llm.transcripts.recorded_details import Claims, MessageDetails
from start_llm.transcripts.transcript_store import PrefixNode, TranscriptStore, Variant
from start_llm.transcripts.turn import Turn
from tests.databases import Twice, WallClock, opened, pending, twice
from tests.prompt.fakes import reply, user
from tests.slices import examples
from tests.transcripts.fakes import conversation_of, transcripts
from tests.transcripts.test_turn import prompt_of

ROOT = CanonicalKey.of(b"root")
PLENTY = 10**9
REPLY = CanonicalMessage(b"Done.")
SILENT = MessageDetails(())
FEW = examples(30, few=10)

texts = st.text(st.characters() | st.characters(categories=["Cs"]), max_size=5)
"""Lone surrogates among them."""
fields = st.builds(Field, texts, st.integers(0, 9), st.sampled_from(["live", "block"]))
details = st.builds(
    MessageDetails,
    omitted=st.lists(
        st.builds(
            OmittedText,
            name=texts,
            kind=st.sampled_from(["space", "own", "live", "block"]),
            place=st.integers(0, 10**6),
            text=texts,
            note_text=texts,
            is_clock=st.booleans(),
        ),
        max_size=2,
    ).map(tuple),
    reasoning=st.none() | st.binary(min_size=16, max_size=16),
    is_ours=st.booleans(),
    noted=st.lists(st.tuples(fields, st.none() | texts), max_size=2).map(tuple),
    note_tokens=st.integers(0, 99),
)
claims = st.builds(
    Claims,
    names=st.lists(texts, max_size=2).map(dict.fromkeys),
    is_delivered=st.booleans(),
    ids=st.lists(texts, max_size=2).map(dict.fromkeys),
    reply_surprisal_bits=st.floats(0, allow_nan=False),
    reasoning_surprisal_bits=st.floats(0, allow_nan=False),
)


def add(
    store: TranscriptStore,
    key: CanonicalKey,
    tokens: Sequence[int],
    last: MessageDetails = SILENT,
    *,
    parent: Variant | None = None,
    claims: Claims | None = None,
    session: str = "",
) -> Variant:
    """One message more than the parent has."""
    depth = parent.depth + 1 if parent else 0
    silent = [SILENT] * depth
    return store.add(
        PrefixNode(key, depth, len(tokens)),
        array("I", tokens),
        (*silent, last),
        parent=parent,
        claims=claims or Claims(),
        session=session,
    )


def contents(store: TranscriptStore, key: CanonicalKey) -> list[Any]:
    return [
        (
            variant.tokens().tolist(),
            variant.depth,
            variant.all_details(),
            variant.claims,
            list(variant.claims.names),
            variant.session,
            len(variant.path()),
            len(variant.children),
        )
        for variant in store.at(key)
    ]


# ------------------------------------------------------------------------------------------------ transcripts

WORDS = "abc"
ALL_KEYS = [
    chain(ROOT, [CanonicalMessage(word.encode()) for word in words])[-1]
    for words in (
        *WORDS,
        *(a + b for a in WORDS for b in WORDS),
        *(a + b + "c" for a in WORDS for b in WORDS),
    )
]
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.text(WORDS, min_size=1, max_size=3),
            st.integers(0, 2),
            st.lists(details, min_size=3, max_size=3),
            claims,
            texts,
        ),
        st.tuples(st.just("use"), st.integers(0, 99), st.integers(0, 99)),
        st.tuples(st.just("wait"), st.integers(1, 30)),
        st.tuples(st.just("restart")),
    ),
    max_size=20,
)


def make_transcripts(clock: WallClock, table: DatabaseTable) -> TranscriptStore:
    return TranscriptStore(7 * 460, 60, clock=lambda: clock.now - 1_600_000_000, table=table)


def look_over(store: TranscriptStore) -> None:
    """Do what loading does beside loading: parents count as used with their children, and old ones go."""
    for node in sorted(
        (node for known in store._nodes.values() for node in known), key=lambda node: -node.depth
    ):
        if node.parent:
            node.parent.last_used = max(node.parent.last_used, node.last_used)
    store._next_look = 0
    store._forget_some()


def do(stores: Twice[TranscriptStore], step: tuple[Any, ...]) -> None:
    match step:
        case ("add", words, seed, readings, claims, session):
            keys = chain(ROOT, [CanonicalMessage(word.encode()) for word in words])
            lasts: list[Variant | None] = [None, None]
            tokens: list[int] = []
            for key, word, reading in zip(keys, words, readings, strict=False):
                tokens += [ord(word), 2**32 - 1 - seed]
                lasts = [
                    add(store, key, tokens, reading, parent=last, claims=claims, session=session)
                    for store, last in zip(stores, lasts, strict=True)
                ]
        case ("use", place, number):
            for store in stores:
                known = store.at(ALL_KEYS[place % len(ALL_KEYS)])
                if known:
                    store.use(known[number % len(known)])
        case ("wait", seconds):
            stores.clock.now += seconds
        case _:
            stores.restart()
            look_over(stores.steady)


@patch("start_llm.transcripts.transcript_store._MAX_VARIANTS", 3)
@examples(60, few=20)
@given(steps)
def test_transcripts_are_the_same_after_a_restart(steps):
    with twice(make_transcripts) as stores:
        for step in (*steps, ("restart",), ("restart",)):
            do(stores, step)
            for key in ALL_KEYS:
                assert contents(stores.again, key) == contents(stores.steady, key)
            assert stores.again.metrics.nbytes == stores.steady.metrics.nbytes
            assert stores.again.metrics.variants == stores.steady.metrics.variants
        used = [[round(item.last_used, 3) for key in ALL_KEYS for item in store.at(key)] for store in stores]
        assert used[0] == used[1]
        assert stores.database.metrics.loaded == stores.steady.metrics.variants, "what is gone has no row"


KEYS = chain(ROOT, [CanonicalMessage(word.encode()) for word in WORDS])


def record(path: Path, **options: Any) -> None:
    """Three messages, one after the other."""
    with opened(path, **options) as database:
        store, last = TranscriptStore(PLENTY, table=database.table("rows")), None
        for depth, key in enumerate(KEYS):
            last = add(store, key, range(depth + 1), parent=last)


def loaded(
    path: Path, max_bytes: int = PLENTY, cache_ttl_s: float = 0, **options: Any
) -> tuple[list[int], int]:
    """Return the depths that a new process finds, and how many rows it rejects."""
    with opened(path, **options) as database:
        store = TranscriptStore(max_bytes, cache_ttl_s, table=database.table("rows"))
        depths = [variant.depth for key in KEYS for variant in store.at(key)]
        return depths, database.metrics.rejected


def change_row(path: Path, number: int, change: Callable[[bytes], bytes | None]) -> None:
    with opened(path) as database:
        table = database.table("rows")
        row = sorted(table.rows())[number]
        value = change(row.value)
        if value is None:
            table.delete(row.key)
        else:
            table.put(row.key, value)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "change",
    [
        lambda value: None,
        lambda value: b"",
        lambda value: value[:-1],
        lambda value: value[:-4],
        lambda value: value + bytes(4),
        lambda value: value[:20],
        lambda value: value.replace(b"[1,", b"[2,"),
        lambda value: value.replace(b",0,", b",7,"),
        lambda value: value.replace(b"[[],false", b"[[],false,1"),
    ],
)
def test_a_variant_that_does_not_fit_is_dropped_with_all_that_build_on_it(tmp_path, change):
    path = tmp_path / "a.db"
    record(path)
    assert loaded(path) == ([0, 1, 2], 0)
    change_row(path, 1, change)
    depths, rejected = loaded(path)
    assert depths == [0]
    assert rejected in (1, 2)
    assert loaded(path) == ([0], 0), "their rows are gone"


def test_what_was_not_used_for_too_long_is_not_loaded(tmp_path):
    path, clock = tmp_path / "a.db", WallClock()
    record(path, wall_clock=clock)
    clock.now += 100
    assert loaded(path, cache_ttl_s=110, wall_clock=clock) == (
        [0, 1, 2],
        0,
    )
    clock.now += 20
    assert loaded(path, cache_ttl_s=110, wall_clock=clock) == ([], 0)
    assert loaded(path, wall_clock=clock) == ([], 0), "their rows are gone"


def test_what_no_longer_fits_is_not_loaded(tmp_path):
    path = tmp_path / "a.db"
    record(path)
    assert loaded(path, max_bytes=2500) == ([0, 1], 0)
    assert loaded(path) == ([0, 1], 0)


@patch("start_llm.transcripts.transcript_store._MAX_VARIANTS", 1)
def test_of_too_many_variants_of_a_prefix_the_last_used_is_loaded(tmp_path):
    many = patch("start_llm.transcripts.transcript_store._MAX_VARIANTS", 9)
    with many, opened(tmp_path / "a.db") as database:
        store = TranscriptStore(PLENTY, table=database.table("rows"))
        for key, first in zip(KEYS, [add(store, KEYS[0], [number]) for number in range(3)], strict=True):
            add(store, key.with_message(REPLY), [*first.delta, 9], parent=first)
    with opened(tmp_path / "a.db") as database:
        store = TranscriptStore(PLENTY, table=database.table("rows"))
        assert [variant.tokens().tolist() for variant in store.at(KEYS[0])] == [[2]]
        after = [store.at(key.with_message(REPLY)) for key in KEYS]
        assert [[variant.tokens().tolist() for variant in known] for known in after] == [[], [], [[2, 9]]]
        assert store.metrics.variants == 2
    with opened(tmp_path / "a.db") as database:
        assert database.metrics.loaded == 2


def test_a_message_is_as_recently_used_as_what_was_built_on_it_and_is_gone(tmp_path):
    clock = WallClock()
    with opened(tmp_path / "a.db", wall_clock=clock) as database:
        store = TranscriptStore(PLENTY, clock=lambda: clock.now, table=database.table("rows"))
        first = add(store, KEYS[0], [1])
        second = add(store, KEYS[1], [1, 2], parent=first)
        clock.now += 100
        store.use(second)
        clock.now += 100
        store._forget(second)
    with opened(tmp_path / "a.db", wall_clock=clock) as database:
        (first,) = TranscriptStore(PLENTY, clock=lambda: 1000, table=database.table("rows")).at(KEYS[0])
    assert first.last_used == pytest.approx(900)


def test_a_use_is_one_change_however_long_the_conversation(tmp_path):
    with opened(tmp_path / "a.db") as database:
        store, last = TranscriptStore(PLENTY, table=database.table("rows")), None
        for depth in range(100):
            last = add(store, CanonicalKey.of(b"%d" % depth), range(depth + 1), parent=last)
        assert last
        before = pending(database)
        store.use(last)
        assert pending(database) == before + 1


# -------------------------------------------------------------------------------------------------- reasoning

DAYS = ("", "friday", "saturday")


def about(question: int, day: int, name: str | None = None) -> Conversation:
    text = DAYS[day]
    omitted = (OmittedText("today's date", "live", 0, text, text, is_clock=True),) if text else ()
    return conversation_of(CanonicalMessage(b"%d" % question, omitted), REPLY, name=name)


names = st.sampled_from([None, "mine", "yours", "\ud83d"])
asking = st.tuples(st.integers(0, 2), st.integers(0, 2), names)


@FEW
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), asking, texts, claims),
            st.tuples(st.just("get"), asking),
            st.tuples(st.just("restart")),
        ),
        max_size=20,
    )
)
def test_reasoning_is_the_same_after_a_restart(steps):
    with twice(lambda _, table: ReasoningStore(3 * 420, table=table)) as stores:
        for step in (*steps, ("restart",)):
            match step:
                case ("keep", which, text, claims):
                    asked = about(*which)
                    for store in stores:
                        store.keep(asked.keys[1], RecordedReasoning(text, asked.messages[1].exact, claims))
                case ("get", which):
                    stores.same(lambda store, which=which: store.get(about(*which), 1, which[2]))
                    stores.same(lambda store, which=which: store.use([about(*which).keys[1]]))
                case _:
                    stores.restart()
            stores.same(lambda store: store.nbytes)
        for question in range(3):
            for day in range(3):
                for name in (None, "mine", "yours", "\ud83d"):
                    asked = about(question, day, name)
                    stores.same(lambda store, asked=asked: store.get(asked, 1, asked.name))


def test_reasoning_that_was_used_outlives_other_after_a_restart_too(tmp_path):
    with opened(tmp_path / "a.db") as database:
        store = ReasoningStore(2 * 410, table=database.table("rows"))
        for question in range(2):
            asked = about(question, 0)
            store.keep(asked.keys[1], RecordedReasoning("Hm.", asked.messages[1].exact, Claims()))
        store.use([about(0, 0).keys[1]])
    with opened(tmp_path / "a.db") as database:
        store = ReasoningStore(410, table=database.table("rows"))
        assert [store.get(about(question, 0), 1, None) for question in range(2)] == ["Hm.", None]
    with opened(tmp_path / "a.db") as database:
        assert database.metrics.loaded == 1


def test_claims_of_one_store_are_not_changed_through_another():
    claims = Claims({"mine": None})
    store, texts = TranscriptStore(PLENTY), ReasoningStore(10**6)
    asked = about(0, 0)
    texts.keep(asked.keys[1], RecordedReasoning("Hm.", asked.messages[1].exact, claims))
    for given_claims in (claims, Claims({"yours": None})):
        add(store, KEYS[0], [1], claims=given_claims)
    assert store.at(KEYS[0])[0].claims.names == {"mine": None, "yours": None}
    assert texts.get(about(0, 0, "yours"), 1, "yours") is None
    assert claims == Claims({"mine": None})


def test_reasoning_that_cannot_be_read_is_dropped(tmp_path):
    with opened(tmp_path / "a.db") as database:
        table = database.table("rows")
        for value in (b"", b"[[1]]", b"\xff", b'[["a","zz",[]]]', b"[" * 100_000):
            table.put(about(0, 0).keys[1].digest + value[:1], value)
    with opened(tmp_path / "a.db") as database:
        assert ReasoningStore(10**6, table=database.table("rows")).nbytes == 0
        assert database.metrics.rejected == database.metrics.loaded > 0


# --------------------------------------------------------------------------------------------------- prefixes


@FEW
@given(st.lists(st.lists(st.integers(0, 7), max_size=4) | st.none(), max_size=20))
def test_known_prefixes_are_the_same_after_a_restart(noted):
    """None is a restart."""
    keys = [CanonicalKey.of(b"%d" % number) for number in range(8)]
    with twice(lambda _, table: PrefixHistory(5, table=table)) as stores:
        for numbers in (*noted, None):
            if numbers is None:
                stores.restart()
            else:
                for store in stores:
                    store.note(*[keys[number] for number in numbers])
            for key in keys:
                stores.same(lambda store, key=key: store.depth([key]))


def test_a_prefix_that_was_noted_again_outlives_others_after_a_restart_too(tmp_path):
    keys = [CanonicalKey.of(b"%d" % number) for number in range(3)]
    with opened(tmp_path / "a.db") as database:
        PrefixHistory(3, table=database.table("rows")).note(*keys, keys[0])
    for _ in range(2):
        with opened(tmp_path / "a.db") as database:
            history = PrefixHistory(2, table=database.table("rows"))
            assert [history.depth([key]) for key in keys] == [1, 0, 1]
    assert database.metrics.loaded == 2


# ------------------------------------------------------------------------------------------------ their names


def in_project(project: str, name: str | None, question: bytes = b"here") -> Conversation:
    block = OmittedText("git status", "block", 0, project, project)
    return conversation_of(CanonicalMessage(question, (block,)), REPLY, name=name)


projects = st.builds(in_project, st.sampled_from(["main", "branch"]), names, st.sampled_from([b"1", b"2"]))


@FEW
@given(st.lists(st.tuples(projects, st.integers(-1, 1)) | st.none(), max_size=20))
def test_names_prove_the_same_after_a_restart(noted):
    """None is a restart."""
    with twice(lambda _, table: ConversationNames(4, table=table)) as stores:
        for step in (*noted, None):
            if step is None:
                stores.restart()
            else:
                for store in stores:
                    store.note(*step)
            for name in ("mine", "yours", "\ud83d"):
                for question in (b"1", b"2"):
                    asked = in_project("main", name, question)
                    stores.same(lambda store, asked=asked: store.proving(asked))


def test_names_that_are_forgotten_have_no_rows(tmp_path):
    with opened(tmp_path / "a.db") as database:
        store = ConversationNames(2, table=database.table("rows"))
        for number in range(5):
            store.note(in_project("main", f"{number}"), -1)
    with opened(tmp_path / "a.db") as database:
        assert database.metrics.loaded == 2


def test_a_name_of_several_conversations_proves_nothing_after_a_restart(tmp_path):
    first, other = (in_project(project, "mine") for project in ("main", "branch"))
    for noted in ((first, other), (), (first,)):
        with opened(tmp_path / "a.db") as database:
            store = ConversationNames(table=database.table("rows"))
            for conversation in noted:
                store.note(conversation, -1)
            assert store.proving(first) is store.proving(other) is None


def test_a_name_of_which_nothing_proves_has_one_row(tmp_path):
    talks = [in_project(project, "mine", b"%d" % n) for n in range(3) for project in ("main", "branch")]
    for noted in (talks, ()):
        with opened(tmp_path / "a.db") as database:
            store = ConversationNames(2, table=database.table("rows"))
            for conversation in noted:
                store.note(conversation, -1)
            assert {store.proving(talk) for talk in (*talks, in_project("main", "mine", b"new"))} == {None}
    assert database.metrics.loaded == 1


def test_a_name_that_cannot_be_read_is_dropped(tmp_path):
    with opened(tmp_path / "a.db") as database:
        table = database.table("rows")
        for key, value in ((b"", b""), (b'["mine","zz"]', b""), (b'["mine","00"]', b"{}")):
            table.put(key, value)
    with opened(tmp_path / "a.db") as database:
        ConversationNames(table=database.table("rows"))
        assert database.metrics.rejected == 3


# --------------------------------------------------------------------------------------------------- together


def serving(database: Database) -> Any:
    """The transcripts of a server; its tokens are characters."""
    return transcripts(
        lambda token: chr(token).encode(),
        lambda text: [*map(ord, text)],
        store=TranscriptStore(PLENTY, table=database.table("variants")),
        reasoning_texts=ReasoningStore(10**6, table=database.table("reasoning")),
        seen=PrefixHistory(table=database.table("prefixes")),
        names=ConversationNames(table=database.table("names")),
    )


def test_a_conversation_goes_on_after_a_restart_with_the_reasoning_that_its_client_left_out(tmp_path):
    asked: list[Message] = [user("Where?")]
    with opened(tmp_path / "a.db") as database:
        turn = Turn.begin(serving(database), prompt_of(*asked), 1000)
        turn.record_submitted()
        turn.add_output(Content("Here"))
        turn.add_generated_tokens([*map(ord, "(Hm.)Here#")])
        turn.record_reply(Finished("stop", Usage(1, 0, 1)), is_whole=True)
    with opened(tmp_path / "a.db") as database:
        turn = Turn.begin(serving(database), prompt_of(*asked, reply("Here"), user("And there?")), 1000)
    assert "".join(map(chr, turn.tokens.ids)) == "Where?|>(Hm.)Here|And there?|>"
    assert (turn.prefix_match.seen, turn.prefix_match.messages) == (2, 2)
