"""Pages are found by their tokens, from the first one on, and go when nothing needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from start_llm.cache import pages
from start_llm.cache.pages import (
    Checkpoint,
    MemoryUsage,
    Page,
    PageRun,
    PageTree,
    SequenceCache,
    page_key,
)
from start_llm.core.common_beginning import common_length
from tests.cache.fakes import BYTES_OF_A_TOKEN, FakeCut, FakeState, kept_state, run
from tests.cache.integrity import BrokenInvariant, check_tree

SIZE = 4
TOKENS = st.lists(st.integers(1, 3), max_size=20)


def grown(tree: PageTree, tokens: Sequence[int], salt: bytes = b"") -> list[Page]:
    """The pages of these tokens, with arrays of their own; the last may be short."""
    path: list[Page] = []
    page = tree.root(salt)
    for start in range(0, len(tokens), tree.page_size):
        part = tuple(tokens[start : start + tree.page_size])
        page = tree.insert(page, part, run(part, start), now=1)
        path.append(page)
    return path


def idle(root: Page, tokens: Sequence[int], path: Sequence[Page] = ()) -> SequenceCache:
    seq_cache = SequenceCache([], root, list(tokens), list(path), is_active=False)
    seq_cache.end_page.seq_caches.append(seq_cache)
    return seq_cache


@pytest.fixture
def tree() -> PageTree:
    return PageTree(SIZE)


# ---------------------------------------------------------------------------------------------------- finding


@given(known=st.lists(TOKENS, max_size=5), asked=TOKENS)
def test_matched_are_the_full_pages_that_a_prompt_has_in_common_with_a_known_one(known, asked):
    tree = PageTree(SIZE)
    for tokens in known:
        grown(tree, tokens)
    path = tree.match(tree.root(b""), asked)
    assert [token for page in path for token in page.tokens] == asked[: SIZE * len(path)]
    longest = max((common_length(asked, tokens) for tokens in known), default=0)
    assert len(path) == longest // SIZE
    check_tree(tree, [], [])


def test_a_page_counts_from_the_first_token(tree):
    first, second, short = grown(tree, range(10))
    assert [(page.start, page.end) for page in (first, second, short)] == [(0, 4), (4, 8), (8, 10)]
    assert (first.parent, second.parent, short.parent) == (tree.root(b""), first, second)


def test_the_same_tokens_after_other_ones_are_another_page(tree):
    grown(tree, [1, 1, 1, 1, 5, 5, 5, 5])
    assert tree.match(tree.root(b""), [2, 2, 2, 2, 5, 5, 5, 5]) == []
    assert tree.match(tree.root(b""), [5, 5, 5, 5]) == []


def test_two_salts_share_nothing(tree):
    (page,) = grown(tree, [1, 2, 3, 4], b"one")
    assert tree.match(tree.root(b"two"), [1, 2, 3, 4]) == []
    assert tree.match(tree.root(b"one"), [1, 2, 3, 4]) == [page]
    (other,) = grown(tree, [1, 2, 3, 4], b"two")
    assert page.key != other.key
    assert set(tree._roots.values()) == {tree.root(b"one"), tree.root(b"two")}


def test_salts_under_which_nothing_is_kept_are_forgotten(tree):
    (page,) = grown(tree, [1, 2, 3, 4], b"kept")
    (gone,) = grown(tree, [1, 2, 3, 4], b"gone")
    tree.remove(gone)
    last = [tree.root(b"asked %d" % number) for number in range(100)][-1]
    assert set(tree._roots.values()) == {tree.root(b"kept"), last}
    assert tree.match(tree.root(b"kept"), [1, 2, 3, 4]) == [page]


def test_the_root_of_a_sequence_without_a_full_page_stays(tree):
    root = tree.root(b"short")
    root.seq_caches.append(SequenceCache([], root))
    tree.root(b"another")
    assert tree.root(b"short") is root


def test_a_hash_only_finds_a_page_and_equal_tokens_accept_it(tree):
    (page,) = grown(tree, [1, 2, 3, 4])
    page.tokens = (1, 2, 3, 5)  # as if both had the same hash
    assert tree.match(tree.root(b""), [1, 2, 3, 4]) == []


def test_pages_with_the_same_key_are_all_found_whichever_of_them_goes(tree, monkeypatch):
    """Only a collision: the second one gets a key that is made from the first one's."""
    monkeypatch.setattr(pages, "page_key", lambda parent, tokens: (int.from_bytes(parent) + 1).to_bytes(17))
    blocks = [(1, 2, 3, n) for n in range(3)]
    first, second, third = (page for block in blocks for page in grown(tree, block))
    root = tree.root(b"")
    assert [tree.match(root, block) for block in blocks] == [[first], [second], [third]]
    assert tree.rejected_keys
    tree.remove(second)
    assert [tree.match(root, block) for block in blocks] == [[first], [], [third]]
    assert grown(tree, blocks[2]) == [third]
    assert tree.count == 2


def test_a_match_ends_before_a_page_that_is_lost(tree):
    first, second, third = grown(tree, range(12))
    tree.hold(second, None)
    assert tree.match(tree.root(b""), range(12)) == [first]
    tree.hold(second, run([4, 5, 6, 7], 4))
    assert tree.match(tree.root(b""), range(12)) == [first, second, third]


@given(TOKENS, TOKENS)
def test_the_key_of_a_page_depends_on_everything_up_to_its_end(left, right):
    assert (page_key(b"", left) == page_key(b"", right)) == (left == right)
    assert page_key(page_key(b"", left), right) != page_key(page_key(b"", [*left, 9]), right)


@given(TOKENS, TOKENS)
def test_the_common_length_is_that_of_the_longest_common_beginning(left, right):
    length = common_length(left, right)
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


# ------------------------------------------------------------------------------------------ coming, and going


def test_a_page_that_is_there_keeps_its_arrays_and_is_used_again(tree):
    (page,) = grown(tree, [1, 2, 3, 4])
    held = page.holder
    assert tree.insert(tree.root(b""), (1, 2, 3, 4), run([9, 9, 9, 9]), now=7) is page
    assert (page.holder, page.last_used, tree.count) == (held, 7, 1)


def test_a_page_that_was_lost_is_found_again_when_it_is_computed_again(tree):
    first, _ = grown(tree, range(8))
    tree.hold(first, None)
    again = run([0, 1, 2, 3])
    assert tree.insert(tree.root(b""), (0, 1, 2, 3), again, now=2) is first
    assert first.holder is again
    assert len(tree.match(tree.root(b""), range(8))) == 2


def test_a_longer_page_takes_the_place_of_a_shorter_one_that_says_no_more(tree):
    (short,) = grown(tree, [1, 2])
    (other,) = grown(tree, [3])
    (longer,) = grown(tree, [1, 2, 3])
    assert {id(page) for page in tree.pages()} == {id(other), id(longer)}
    assert not tree.has(short)
    (full,) = grown(tree, [1, 2, 3, 4])
    assert {id(page) for page in tree.pages()} == {id(other), id(full)}
    assert tree.runs_usage.nbytes == 5 * BYTES_OF_A_TOKEN


def test_bytes_are_counted_where_a_page_has_arrays_of_its_own(tree):
    (page,) = grown(tree, [1, 2, 3, 4])
    assert tree.runs_usage.nbytes == 4 * BYTES_OF_A_TOKEN
    tree.hold(page, idle(tree.root(b""), [1, 2, 3, 4], [page]))
    assert tree.runs_usage.nbytes == 0
    tree.hold(page, run([1, 2]))
    assert tree.runs_usage.nbytes == 2 * BYTES_OF_A_TOKEN
    tree.hold(page, None)
    assert tree.runs_usage.nbytes == 0


def test_a_page_goes_if_nothing_is_after_it(tree):
    first, second = grown(tree, range(8))
    with pytest.raises(ValueError, match="cannot go"):
        tree.remove(first)
    assert tree.remove(second) is first
    assert tree.has(first) and not tree.has(second)
    assert (tree.count, tree.runs_usage.nbytes) == (1, 4 * BYTES_OF_A_TOKEN)
    with pytest.raises(ValueError, match="cannot go"):
        tree.remove(tree.root(b""))


@pytest.mark.parametrize("kept_by", ["a sequence cache", "a checkpoint"])
def test_a_page_stays_for_what_stands_on_it(tree, kept_by):
    (page,) = grown(tree, range(4))
    if kept_by == "a sequence cache":
        idle(tree.root(b""), range(5), [page])
    else:
        page.checkpoints.append(kept_state(page, (), FakeState(1), None, 1))
    with pytest.raises(ValueError, match="cannot go"):
        tree.remove(page)
    tree.hold(page, None)
    assert tree.prune(page) is page


def test_lost_pages_go_with_the_last_one_after_them(tree):
    """However many they are."""
    path = grown(tree, range(SIZE * 3000))
    for page in path[1:-1]:
        tree.hold(page, None)
    assert tree.count == 3000
    assert tree.remove(path[-1]) is path[0]
    assert (tree.count, list(tree.pages())) == (1, [path[0]])


def test_a_checkpoint_is_as_far_as_its_page_and_its_tail(tree):
    _, page = grown(tree, range(8))
    checkpoint = kept_state(page, (8, 9), FakeState(1), FakeCut((8, 9)), 1)
    assert checkpoint.position == 10
    assert kept_state(page, (), FakeState(1), None, 1).position == 8


# -------------------------------------------------------------------------------------------------- integrity


def run_of(page: Page) -> PageRun:
    assert isinstance(page.holder, PageRun)
    return page.holder


type Tampering = Callable[[PageTree, list[Page], SequenceCache, Checkpoint], object]


TAMPERINGS: dict[str, Tampering] = {
    "counted wrongly": lambda tree, *_: setattr(tree, "count", 7),
    "memory of runs is counted": lambda tree, *_: setattr(tree, "runs_usage", MemoryUsage(7, 7)),
    "the key of other tokens": lambda _tree, path, *_: setattr(path[1], "tokens", (9, 9, 9, 9)),
    "does not begin where its parent ends": lambda _tree, path, *_: setattr(path[2], "end", 11),
    "not its parent's child": lambda _tree, path, *_: setattr(path[2], "parent", path[0]),
    "a short page has children": lambda tree, path, *_: tree.insert(path[2], (1,), run([1], 10), 1),
    "kept for nothing": lambda tree, path, *_: tree.hold(path[2], None),
    "a sequence cache's path has a gap": lambda _tree, _path, seq_cache, _: seq_cache.path.reverse(),
    "a page of a sequence cache is lost": lambda tree, path, *_: tree.hold(path[1], None),
    "a sequence cache has other tokens": lambda _tree, _path, seq_cache, _: seq_cache.tokens.__setitem__(
        0, 77
    ),
    "too long, or too short": lambda _tree, _path, seq_cache, _: seq_cache.tokens.extend(range(4)),
    "a sequence cache is listed in one place": lambda _tree, path, seq_cache, _: path[0].seq_caches.append(
        seq_cache
    ),
    "a sequence cache does not stand at its end": lambda _tree, path, seq_cache, _: (
        path[1].seq_caches.remove(seq_cache) or path[0].seq_caches.append(seq_cache)
    ),
    "a checkpoint is listed in one place": lambda _tree, path, _, checkpoint: path[0].checkpoints.append(
        checkpoint
    ),
    "hangs on the wrong page": lambda _tree, _path, _, checkpoint: setattr(checkpoint, "tail", (1,) * 4),
    "misses its tail": lambda _tree, _path, _, checkpoint: setattr(checkpoint, "tail", (1,)),
    "a page of a sequence cache is kept beside it": lambda tree, path, *_: tree.hold(
        path[1], run(range(4, 8), 4)
    ),
    "what is loose is counted wrongly": lambda tree, *_: setattr(tree, "unused_run_bytes", 7),
    "a run is not counted": lambda tree, *_: tree._runs.clear(),
    "a run has other pages": lambda _tree, path, *_: run_of(path[2]).pages.__setitem__(8, path[1]),
    "a run does not hold its pages": lambda _tree, path, *_: setattr(run_of(path[2]).stored, "start", 9),
    "in a sequence cache that is gone": lambda tree, path, *_: tree.hold(
        path[0], SequenceCache([], tree.root(b""))
    ),
    "in a sequence cache that does not know it": lambda tree, path, seq_cache, _: tree.hold(
        path[2], seq_cache
    ),
}
"""The words of the complaint, and an action that deserves it."""


@pytest.mark.parametrize("complaint", [None, *TAMPERINGS])
def test_whatever_is_tampered_with_is_found(tree, complaint):
    path = grown(tree, range(10))
    seq_cache = idle(tree.root(b""), range(9), path[:2])
    for page in path[:2]:
        tree.hold(page, seq_cache)
    checkpoint = kept_state(path[1], (), FakeState(1), None, 1)
    path[1].checkpoints.append(checkpoint)
    if complaint is None:
        check_tree(tree, [seq_cache], [checkpoint])
        return
    TAMPERINGS[complaint](tree, path, seq_cache, checkpoint)
    with pytest.raises(BrokenInvariant, match=complaint):
        check_tree(tree, [seq_cache], [checkpoint])
