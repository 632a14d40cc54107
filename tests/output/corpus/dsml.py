"""DeepSeek V3.2 and V4: invocations whose parameters say if they are text."""

from collections.abc import Iterator
from typing import Any

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS, Writer

TYPED: tuple[tuple[str, str, str, Any], ...] = (
    ("count", "false", "5", 5),
    ("count", "true", "5", 5),
    ("count", "true", "five", "five"),
    ("count", "false", "five", "five"),
    ("count", "false", "", ""),
    ("flag", "false", "true", True),
    ("flag", "false", "True", True),
    ("tags", "false", "['a', None]", ["a", None]),
    ("tags", "true", "[1]", [1]),
    ("options", "false", '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ("options", "false", "{'a': 1,}", {"a": 1}),
    ("nothing", "false", "null", None),
    ("nothing", "true", "null", None),
    ("optional", "true", "null", "null"),
    ("mixed", "true", "5", "5"),
    ("mixed", "false", "5", 5),
    ("mixed", "false", "a b", "a b"),
    ("place", "false", "12", 12),
    ("place", "false", "a b", "a b"),
    ("place", "false", '"12"', "12"),
    ("place", "true", '"12"', '"12"'),
    ("free", "true", "12", "12"),
    ("free", "false", "12", 12),
    ("free", "false", "a b", "a b"),
    ("free", "other", "12", 12),
    ("unheard", "true", "12", "12"),
    ("unheard", "false", "[1]", [1]),
)
"""Argument of the tool `typed`, what stands in its tag, text, and the value that it stands for."""


class _Table:
    """Cases in the words of one form."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        good = writer.write([Call("read", {"path": "a"})])
        self.opener, rest = good.split("\n", 1)
        self.good, self.closer = rest.rsplit("\n", 1)
        self.good += "\n"
        self.begin = self.good[: self.good.index("a</") + 1]
        self.tag = self.begin.split("invoke")[0].removeprefix("<")
        self.value_end, self.end = f"</{self.tag}parameter>", f"</{self.tag}invoke>\n"
        self.bad = self.good.replace("read", "remove!")
        self.broken = f'<{self.tag}invoke name="read">hello</{self.tag}invoke>\n'

    def case(self, name, text, calls=(), content="", **more) -> Case:
        name = f"{self.writer.name}, {name}"
        return Case(
            name=name, text=text, calls=tuple(calls), content=content, family=self.writer.family, **more
        )

    def plain(self, name, text) -> Case:
        return self.case(name, text, content=text)

    def block(self, inner: str) -> str:
        return f"{self.opener}\n{inner}{self.closer}"

    def typed(self) -> Iterator[Case]:
        for number, (key, stated, raw, value) in enumerate(TYPED):
            parameter = f'<{self.tag}parameter name="{key}" string="{stated}">{raw}</{self.tag}parameter>'
            text = self.block(f'<{self.tag}invoke name="typed">\n{parameter}\n</{self.tag}invoke>\n')
            yield self.case(f"type {number}", text, [Call("typed", {key: value})])

    def calls(self) -> Iterator[Case]:
        good, tag, end, value_end = self.good, self.tag, self.end, self.value_end
        yield self.case("no line breaks", self.block(good).replace("\n", ""), [A])
        yield self.case("no arguments in one line", self.block(f'<{tag}invoke name="list">{end}'), [LIST])
        yield self.case("no word for the type", self.block(good.replace(' string="true"', "")), [A])
        yield self.case("no end of the block", f"{self.opener}\n{good}", [A])
        yield self.case("half the end of the block", f"{self.opener}\n{good}{self.closer[:9]}", [A])
        yield self.case("no end of the call", self.block(good.replace(end, "")), [A])
        yield self.case("no ends at all", f"{self.opener}\n{self.begin}{value_end}\n", [A])
        yield self.case("two blocks", f"{self.block(good)}\n{self.block(good)}", [A, A])
        yield self.case("a block in a block that does not end", self.opener + good + self.block(good), [A, A])

    def cuts(self) -> Iterator[Case]:
        begin, value_end = self.begin, self.value_end
        yield self.case("a reply that ends in a value", f"{self.opener}\n{begin}", [A])
        yield self.case("half the end of a value", f"{self.opener}\n{begin}</｜DS", [A])
        yield self.case(
            "a cut after a parameter",
            f"{self.opener}\n{begin}{value_end}",
            open_call=("read", '{"path": "a'),
            complete=False,
        )

    def values(self) -> Iterator[Case]:
        good, tag, end, value_end = self.good, self.tag, self.end, self.value_end
        yield self.case(
            "a parameter twice",
            self.block(
                good.replace(
                    value_end, f'{value_end}\n<{tag}parameter name="path" string="true">b{value_end}'
                )
            ),
            [Call("read", {"path": "a"}, '{"path": "a"}')],
        )
        quoted = f'a{value_end} is a tag, <{tag}invoke name="list">{end}'
        yield self.case(
            "tags in a value",
            self.block(good.replace("a</", f"{quoted}</")),
            [Call("read", {"path": quoted})],
        )

    def objects(self) -> Iterator[Case]:
        """A JSON object in place of the parameters."""
        tag, end = self.tag, self.end

        def call(name: str, arguments: str) -> str:
            return f'<{tag}invoke name="{name}">\n{arguments}\n{end}'

        good, none = call("read", '{"path": "a"}'), call("list", "{}")
        yield self.case("an object", self.block(good), [A])
        yield self.case("objects", self.block(f"{good}\n{none}"), [A, Call("list")])
        yield self.case("an object without its end", f"{self.opener}\n{good}", [A])
        yield self.case("an object alone", f"{self.opener}{good.removesuffix(end)}", [A])
        yield self.plain("an object for another tool", self.block(call("remove", "{}")))
        yield self.plain("half an object", f"{self.opener}\n{good[: good.index('a')]}")
        yield self.plain("a list for an object", self.block(call("read", "[1]")))

    def refusals(self) -> Iterator[Case]:
        good, bad, broken, tag, end = self.good, self.bad, self.broken, self.tag, self.end
        yield self.case(
            "a tool that was not offered first", self.block(bad + good), [A], f"{self.opener}\n{bad}".rstrip()
        )
        yield self.case(
            "a tool that was not offered in the middle", self.block(good + bad + good), [A, A], bad.rstrip()
        )
        yield self.case("a tool that was not offered last", self.block(good + bad), [A], bad + self.closer)
        yield self.case(
            "a good call after a malformed one",
            f"{self.opener}\n{broken}{self.block(good)}",
            [A],
            f"{self.opener}\n{broken}".rstrip(),
        )
        yield self.case(
            "markup that prose quotes",
            f"Write {self.opener} so: {self.block(good)}",
            [A],
            f"Write {self.opener} so:",
        )
        if tag == "｜DSML｜":
            yield self.case("no block around a call", f"I look.\n{good}", [A], "I look.")
            yield self.case("no block around calls", f"{good}\n{good}", [A, A])
            yield self.case("the end of a block alone", f"{good}{self.closer}", [A])
            yield self.plain("no block around a call of another tool", bad)
            yield self.plain("no block around a malformed call", broken)
        else:
            yield self.plain("no block around a call", good)
        yield self.plain("an empty block", self.block(""))
        yield self.plain("text for parameters", self.block(broken))
        yield self.plain("no name", self.block(f'<{tag}invoke name="">{end}'))
        yield self.plain("a line break in a name", self.block(good.replace("read", "re\nad")))
        yield self.plain("a parameter without a name", self.block(good.replace('"path"', '""')))
        yield self.plain("a call of another form", self.block(good.replace("｜DSML｜", "")))
        yield self.plain("nothing but the opener", self.opener)
        yield self.plain("a cut head", f'{self.opener}\n<{tag}invoke name="rea')


A = Call("read", {"path": "a"}, '{"path": "a"}')
_TABLES = tuple(_Table(WRITERS[name]) for name in ("dsml_functions", "dsml_tools", "dsml_spaced"))
CASES = tuple(
    case
    for table in _TABLES
    for cases in (table.typed, table.calls, table.cuts, table.values, table.refusals)
    for case in cases()
) + tuple(case for table in _TABLES[:2] for case in table.objects())
