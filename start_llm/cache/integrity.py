"""What must hold between pages, strands and checkpoints at any time."""

from __future__ import annotations

from collections.abc import Sequence

from start_llm.cache.pages import Checkpoint, Page, PageTree, Run, Strand, page_key

_LONGEST_CHAIN = 100
"""Keys made from one another, where others had the same."""


class BrokenInvariant(AssertionError):
    """The cache contradicts itself: a bug, never a matter of input."""


def check_tree(tree: PageTree, strands: Sequence[Strand], checkpoints: Sequence[Checkpoint]) -> None:
    """Raises BrokenInvariant at the first contradiction."""
    pages = list(tree.pages())
    _demand(len(pages) == tree.count, "pages are counted wrongly")
    for page in pages:
        _check_page(page, strands, tree.page_size)
    everywhere = [*pages, *tree.roots()]
    _demand(
        _same([one for page in everywhere for one in page.checkpoints], checkpoints),
        "a checkpoint is listed in one place only",
    )
    _demand(
        _same([one for page in everywhere for one in page.strands], strands),
        "a strand is listed in one place only",
    )
    for strand in strands:
        _check_strand(strand, tree.page_size)
    for checkpoint in checkpoints:
        _check_checkpoint(checkpoint, tree.page_size)
    _check_runs(tree, pages)


def _same(left: Sequence[object], right: Sequence[object]) -> bool:
    return sorted(map(id, left)) == sorted(map(id, right))


def _check_runs(tree: PageTree, pages: Sequence[Page]) -> None:
    runs: dict[Run, list[Page]] = {}
    for page in sorted(pages, key=lambda one: one.end):
        if isinstance(page.holder, Run):
            runs.setdefault(page.holder, []).append(page)
    _demand(_same(tree.runs, list(runs)), "a run is not counted, or one without pages is")
    _demand(sum(run.stored.nbytes for run in runs) == tree.run_bytes, "bytes of runs are counted wrongly")
    _demand(sum(run.stored.arrays for run in runs) == tree.run_arrays, "arrays of runs are counted wrongly")
    for run, inside in runs.items():
        _demand(list(run.pages.items()) == [(page.end, page) for page in inside], "a run has other pages")
        _demand(run.stored.covers(*run.span), "a run does not hold its pages")
    _demand(sum(run.loose_bytes for run in runs) == tree.loose_bytes, "what is loose is counted wrongly")


def _check_page(page: Page, strands: Sequence[Strand], page_size: int) -> None:
    parent = page.parent
    _demand(parent is not None and parent.children.get(page.key) is page, "a page is not its parent's child")
    if parent is not None:
        _demand(_has_its_key(page, parent), "a page has the key of other tokens")
        _demand(page.start == parent.end, "a page does not begin where its parent ends")
    _demand(
        _same([one for alike in page.by_first_token.values() for one in alike], list(page.children.values())),
        "children are listed twice, and differently",
    )
    is_full = len(page.tokens) == page_size
    _demand(is_full or not page.children, "a short page has children")
    _demand(page.holder is not None or not page.is_leaf, "a lost page is kept for nothing")
    if isinstance(page.holder, Strand):
        strand = page.holder
        _demand(any(one is strand for one in strands), "a page lies in a strand that is gone")
        _demand(any(one is page for one in strand.path), "a page lies in a strand that does not know it")


def _has_its_key(page: Page, parent: Page) -> bool:
    """That of its tokens, or one made from it where others had the same."""
    key = page_key(parent.key, page.tokens)
    for _ in range(_LONGEST_CHAIN):
        if key == page.key:
            return True
        key = page_key(key, page.tokens)
    return False


def _check_strand(strand: Strand, page_size: int) -> None:
    parent = strand.root
    for page in strand.path:
        _demand(page.parent is parent, "a strand's path has a gap")
        _demand(page.holder is not None, "a page of a strand is lost")
        _demand(isinstance(page.holder, Strand), "a page of a strand is kept beside it")
        _demand(tuple(strand.tokens[page.start : page.end]) == page.tokens, "a strand has other tokens")
        parent = page
    left = len(strand.tokens) - strand.end_page.end
    _demand(0 <= left < page_size, "a strand's path is too long, or too short")
    _demand(any(one is strand for one in strand.end_page.strands), "a strand does not stand at its end")


def _check_checkpoint(checkpoint: Checkpoint, page_size: int) -> None:
    _demand(len(checkpoint.tail) < page_size, "a checkpoint hangs on the wrong page")
    _demand((checkpoint.tail_cut is not None) == bool(checkpoint.tail), "a checkpoint misses its tail")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenInvariant(otherwise)
