"""A store of limited size keeps what was used last."""

from start_llm.core.recently_used import RecentlyUsed


def store(most: int) -> RecentlyUsed[str, str]:
    return RecentlyUsed(most, len)


def test_it_gives_back_what_was_put():
    kept = store(10)
    kept.put("a", "xx")
    assert (kept.get("a"), kept.get("b"), kept.size) == ("xx", None, 2)


def test_what_was_used_longest_ago_goes_first():
    kept = store(6)
    for key in "abc":
        kept.put(key, "xx")
    kept.get("a")
    kept.put("d", "xxx")
    assert [kept.get(key) for key in "abcd"] == ["xx", None, None, "xxx"]
    assert kept.size == 5


def test_a_value_that_is_put_again_counts_once():
    kept = store(6)
    kept.put("a", "xxxx")
    kept.put("a", "yy")
    assert (kept.get("a"), kept.size) == ("yy", 2)


def test_what_is_too_large_is_not_kept_and_drops_nothing_else():
    kept = store(6)
    kept.put("a", "xx")
    kept.put("b", "x" * 7)
    kept.put("a", "x" * 8)
    assert (kept.get("a"), kept.get("b"), kept.size) == (None, None, 0)
