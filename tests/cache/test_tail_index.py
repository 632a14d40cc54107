"""The index finds what a search through all items would find, in any order of additions and removals."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from start_llm.cache.tail_index import TailIndex
from start_llm.core.common_beginning import common_length

type Tokens = tuple[int, ...]


@dataclass(eq=False)
class Item:
    tail: Tokens


def tail(rng: random.Random) -> Tokens:
    """Few tokens, so that many tails are equal, or begin like another one."""
    return tuple(rng.choices(range(3), k=rng.randint(0, 7)))


def ids(items: list[Item]) -> list[int]:
    return sorted(map(id, items))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.sample(5)
def test_it_finds_what_a_search_through_all_items_finds(seed: int):
    rng = random.Random(seed)
    index, items = TailIndex[Item](lambda item: item.tail), list[Item]()
    for _ in range(200):
        if items and rng.random() < 0.4:
            gone = items.pop(rng.randrange(len(items)))
            gone.tail = tail(rng)  # it is found by the tail that it had
            index.remove(gone)
        else:
            items.append(Item(tail(rng)))
            index.append(items[-1])
        asked = tail(rng)
        assert (len(index), ids(list(index))) == (len(items), ids(items))
        assert ids(index.equal_to(asked)) == ids([entry for entry in items if entry.tail == asked])
        begins = [entry for entry in items if entry.tail[: len(asked)] == asked]
        assert ids(list(index.beginning_with(asked))) == ids(begins)
        is_begun = list(index.beginnings_of(asked))
        assert ids(is_begun) == ids([entry for entry in items if asked[: len(entry.tail)] == entry.tail])
        assert [len(entry.tail) for entry in is_begun] == sorted(
            (len(entry.tail) for entry in is_begun), reverse=True
        )
        matches = list(index.by_common_length(asked))
        assert ids([entry for entry, _ in matches]) == ids(items)
        assert all(length == common_length(entry.tail, asked) for entry, length in matches)
        assert [length for _, length in matches] == sorted((length for _, length in matches), reverse=True)
