"""Patterns for lists of calls, in JSON or another notation, between marks that models may forget."""

import regex

from start_llm.formats.reading.json_calls import Objects

SPACE = r"\s{0,64}"


def list_end(mark: str = "") -> str:
    """Return a pattern for `]` followed by the mark. One of the two may be missing.

    Group `junk` is an item of the list that is no call, where no mark follows: a mark tells the remains.
    """
    bracket = rf"{SPACE}\]"
    last = rf"(?P<junk>\s*,\s*(\"[^\"\n]*\"|\w+))?{bracket}"
    if not mark:
        return last
    return rf"({bracket})?{SPACE}{regex.escape(mark)}|{last}(?={SPACE}{_other_than(mark)})"


def _other_than(mark: str) -> str:
    """Return a pattern for text that is not the mark. It stays partial while the text may become the mark."""
    ways = [rf"{regex.escape(mark[:length])}[^{_in_class(mark, length)}]" for length in range(len(mark))]
    return f"({'|'.join(ways)})"


def _in_class(mark: str, length: int) -> str:
    letter = regex.escape(mark[length], special_only=False)
    return letter if length else rf"\s{letter}"


def json_list(mark: str = "") -> Objects:
    """Return the patterns for JSON objects in a list or side by side, and the mark that ends them."""
    return Objects(
        head=rf"(?:{SPACE}```(?:json)?)?(?:{SPACE}[\[,])?{SPACE}(?=\{{)",
        next_call=rf"(?:{SPACE},)?{SPACE}(?=\{{)",
        block_end=rf"(?:{SPACE}\]?{SPACE}```{SPACE}{regex.escape(mark)}|{list_end(mark)})"
        if mark
        else list_end(),
    )
