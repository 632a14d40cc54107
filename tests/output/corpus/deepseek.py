"""DeepSeek up to V3.1: calls with a name and an object, which V3 and R1 put in a fence."""

from collections.abc import Iterator

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS, Writer

A = Call("read", {"path": "a"}, '{"path": "a"}')
_OPENER, _BLOCK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _block(inner: str) -> str:
    return f"{_OPENER}{inner}{_BLOCK_END}"


class _Table:
    """Cases in the words of one form."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.good = writer.write([A]).removeprefix(_OPENER).removesuffix(_BLOCK_END)
        self.bad, self.broken = self.good.replace("read", "remove"), self.good.replace('"a"', "")
        self.end = self.good[self.good.rindex("}") + 1 :]

    def case(self, name, text, calls=(), content="", **more) -> Case:
        name = f"{self.writer.name}, {name}"
        return Case(
            name=name, text=text, calls=tuple(calls), content=content, family=self.writer.family, **more
        )

    def plain(self, name, text) -> Case:
        return self.case(name, text, content=text)

    def calls(self) -> Iterator[Case]:
        good, open_end = self.good, self.good.removesuffix(_END)
        yield self.case(
            "line breaks everywhere", _block(good).replace("｜>", "｜>\n").replace("<｜", "\n<｜"), [A]
        )
        yield self.case(
            "no arguments", _block(good.replace("read", "list").replace('{"path": "a"}', "{}")), [LIST]
        )
        yield self.case("two calls in a block", _block(f"{good}{good}"), [A, A])
        yield self.case("two calls on lines of their own", _block(f"\n{good}\n{good}\n"), [A, A])
        yield self.case("two blocks", f"{_block(good)}\n{_block(good)}", [A, A])
        yield self.case("no block around a call", f"I look.\n{good}", [A], "I look.")
        yield self.case("no end of the block", f"{_OPENER}{good}", [A])
        yield self.case("no end of the call", _block(open_end), [A])
        yield self.case("no end between two calls", _block(open_end + good), [A, A])
        yield self.case("no ends at all", f"{_OPENER}{open_end}", [A])
        yield self.case("half the end of a call", f"{_OPENER}{open_end}<｜tool▁ca", [A])

    def neighbours(self) -> Iterator[Case]:
        good, bad, broken = self.good, self.bad, self.broken
        yield self.case(
            "all marks in a value",
            _block(good.replace('"a"', f'"{_END}{_BLOCK_END}{_BEGIN}read{_SEPARATOR}``` {{"')),
            [Call("read", {"path": f"{_END}{_BLOCK_END}{_BEGIN}read{_SEPARATOR}``` {{"})],
        )
        yield self.case(
            "an argument twice",
            _block(good.replace('"a"', '"a", "path": "b"')),
            [Call("read", {"path": "b"}, '{"path": "a", "path": "b"}')],
        )
        yield self.case("another tool first", _block(bad + good), [Call("remove", {"path": "a"}), A])
        yield self.case(
            "a good call after a malformed one",
            _block(broken + good),
            [A],
            f"{_OPENER}{broken}".removesuffix(self.end),
        )
        yield self.case("text after a block", f"{_block(good)}\n\nDone.", [A], "Done.")
        yield self.case(
            "markup that prose quotes", f"`{_OPENER}` so: {_block(good)}", [A], f"`{_OPENER}` so:"
        )

    def refusals(self) -> Iterator[Case]:
        good = self.good
        yield self.case("a tool that was not offered", _block(self.bad), [Call("remove", {"path": "a"})])
        yield self.plain("an empty block", _block(""))
        yield self.plain("a malformed call", _block(self.broken))
        yield self.plain("a list of arguments", _block(good.replace('{"path": "a"}', "[1]")))
        yield self.plain("no name", _block(good.replace("read", "")))
        yield self.plain("a name that is none", _block(good.replace("read", "read it")))
        yield self.plain("no separator", _block(good.replace(_SEPARATOR, " ")))
        yield self.plain("a cut head", f"{_OPENER}{good[: good.index('read') + 2]}")
        yield self.plain("a cut object", f"{_OPENER}{good[: good.index('a"}')]}")


_FENCED = WRITERS["deepseek_fenced"]
_HEAD = f"{_BEGIN}function{_SEPARATOR}read"
CASES = (
    *(
        case
        for table in map(_Table, (WRITERS["deepseek"], _FENCED))
        for cases in (table.calls, table.neighbours, table.refusals)
        for case in cases()
    ),
    Case(
        name="a fence without a language",
        text=_block(f'{_HEAD}\n```\n{{"path": "a"}}\n```{_END}'),
        calls=(A,),
        family=_FENCED.family,
    ),
    Case(
        name="a fence that nothing closes",
        text=_block(f'{_HEAD}\n```json\n{{"path": "a"}}\n{_END}'),
        calls=(A,),
        family=_FENCED.family,
    ),
)
