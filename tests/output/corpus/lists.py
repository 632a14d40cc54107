"""Attacks on every notation that puts its calls into a list between marks."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.output.corpus.case import Call, Case
from tests.output.corpus.writers import WRITERS

A = Call("read", {"path": "a"})


@dataclass(frozen=True, kw_only=True)
class ListForm:
    """How a list is written.

    Attributes:
        writer: name of the notation.
        opening, closing: what stands around the calls, brackets included.
        between: two of them.
        good, bad, malformed: a call of an offered tool, of another one, and what is no call.
        bad_call: the call of the other tool; None where its name can be none, so that it is text.
    """

    writer: str
    opening: str
    closing: str
    between: str = ", "
    good: str = '{"name": "read", "arguments": {"path": "a"}}'
    bad: str = '{"name": "remove!", "arguments": {}}'
    bad_call: Call | None = None
    malformed: str = '{"name": "read", "arguments": {"path": }}'

    def of(self, *calls: str) -> str:
        return f"{self.opening}{self.between.join(calls)}{self.closing}"

    def case(self, name: str, text: str, *calls: Call, content: str = "") -> Case:
        return Case(name=name, text=text, calls=calls, content=content, family=WRITERS[self.writer].family)

    def plain(self, name: str, text: str) -> Case:
        return self.case(name, text, content=text)


def list_cases(form: ListForm) -> Iterator[Case]:
    """Of which family the cases are, the writer's name says."""
    yield from _neighbours(form)
    yield from _ends(form)
    if form.bad_call is None:
        yield form.plain("a tool that was not offered alone", form.of(form.bad))
    yield form.plain("a malformed call alone", form.of(form.malformed))
    yield form.plain("an empty list", f"{form.opening}{form.closing}")
    yield form.plain("prose in a list", form.of("read the file"))
    yield form.plain("a cut call", f"{form.opening}{form.good[: len(form.good) // 2]}")


def _neighbours(form: ListForm) -> Iterator[Case]:
    good, bad, comma = form.good, form.bad, form.between.rstrip("\n")
    yield form.case("two calls in a list", form.of(good, good), A, A)
    yield form.case("prose after a list", f"{form.of(good)}\n\nDone.", A, content="Done.")
    if form.bad_call is not None:
        yield form.case("another tool first", form.of(bad, good), form.bad_call, A)
        yield form.case("another tool last", form.of(good, bad), A, form.bad_call)
        yield form.case("another tool in the middle", form.of(good, bad, good), A, form.bad_call, A)
        return
    yield form.case("a bad call first", form.of(bad, good), A, content=f"{form.opening}{bad}")
    yield form.case(
        "a bad call last", form.of(good, bad), A, content=f"{comma}{bad}{form.closing}".lstrip("\n")
    )
    yield form.case(
        "a bad call in the middle",
        form.of(good, bad, good),
        A,
        A,
        content=f"{form.between}{bad}".lstrip("\n"),
    )


def _ends(form: ListForm) -> Iterator[Case]:
    """Each part of what ends a list may be missing."""
    yield form.case("no end at all", f"{form.opening}{form.good}", A)
    for length in range(1, len(form.closing)):
        yield form.case(
            f"{length} letters of the end", f"{form.opening}{form.good}{form.closing[:length]}", A
        )
