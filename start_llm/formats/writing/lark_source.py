"""Rewrites the source of a client's grammar, which is in Lark, token by token."""

import regex

_TOKEN = regex.compile(
    r"""(?P<comment>(?://|\#)[^\n]*)
    |(?P<import>%import[^\n]*)
    |(?P<ignore>%ignore\b)
    |(?P<forbidden>%\w*|@\w*|<[^<>\s]+>)
    |(?P<range>"(?:\\.|[^"\\\n])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])*")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<text_flags>i?)
    |/(?P<pattern>(?:\\.|[^/\\])+)/(?P<pattern_flags>[imslux]*)
    |(?P<broken>["/])
    |(?P<negation>~(?=[ \t]*[^\s\d]))
    |(?P<alias>->[ \t]*\w+)
    |(?P<modifier>[?!](?=_?[a-z][\w-]*\s*:))
    |(?P<rule>(?<![\w-])_?[a-z][a-z0-9_-]*)(?P<defined>\s*:)?(?P<options>[\[.:](?=\S))?
    |(?P<terminal>[A-Z_][\w-]*)(?P<defined_terminal>\s*:)?
    |(?P<other>[\s|()]+|.)""",
    regex.VERBOSE | regex.DOTALL,
)


class UnusableGrammar(Exception):
    """The grammar has what cannot be used here; the text says what."""


class RewrittenSource:
    """The source of a grammar, some of its tokens rewritten.

    Here only comments go. Subclasses say what stands in place of a regular expression (`_pattern`) and of any
    other token (`_other`).
    """

    def __init__(self, source: str) -> None:
        self._source = source

    @property
    def text(self) -> str:
        """The rewritten source.

        Raises:
            UnusableGrammar: it has a token that is not supported, or a text or pattern without an end.
        """
        return "".join(map(self._token, _TOKEN.finditer(self._source)))

    def _token(self, match: regex.Match[str]) -> str:
        if match["forbidden"]:
            raise UnusableGrammar(f"{match['forbidden']} is not supported")
        if match["broken"]:
            raise UnusableGrammar("a text or a pattern has no end")
        if match["comment"]:
            return ""
        if match["pattern"] is not None:
            return self._pattern(match["pattern"], match["pattern_flags"])
        return self._other(match)

    def _pattern(self, pattern: str, flags: str) -> str:
        return f"/{pattern}/{flags}"

    def _other(self, match: regex.Match[str]) -> str:
        return match[0]


def pattern_for(text: str) -> str:
    """Return the regular expression for exactly this text, as Lark writes it between slashes."""
    lines = (regex.escape(line, literal_spaces=True).replace("/", r"\/") for line in text.split("\n"))
    return r"\n".join(lines)
