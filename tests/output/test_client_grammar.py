"""A client's grammar for the text of a custom tool, in every place where a call has that text."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from start_llm.core.chat import TextGrammar
from start_llm.core.errors import InvalidRequest
from start_llm.formats.writing.client_grammar import standalone
from start_llm.formats.writing.lark import Lark
from start_llm.output.grammar.enforcer import check_text_grammar

PATCH = r"""// As Codex sends it.
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
GOOD_PATCH = (
    '*** Begin Patch\n*** Add File: a\\"b.txt\n+say "hi"\t<b> 🐟\n+\n*** Delete File: c\n*** End Patch\n'
)
BAD_PATCHES = ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+a\n*** End Patch", "hi"]
END = "</v>"


def lark(definition: str) -> TextGrammar:
    return TextGrammar(tool="patch", syntax="lark", definition=definition, field="tools[0].format")


def pattern(definition: str) -> TextGrammar:
    return TextGrammar(tool="patch", syntax="regex", definition=definition, field="tools[0].format")


def chain(name: str, last: str) -> str:
    """Rules each of which refers to the next. A few thousand crash llguidance."""
    rules = [f'{name}{number}: {name}{number + 1} "b"' for number in range(250)]
    return "\n".join([f"start: {name}0", *rules, f"{name}250: {last}"])


class _Bytes:
    """Every byte is a token."""

    def __init__(self) -> None:
        self.eos_token_id = 256
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


def follows(text: str, grammar: TextGrammar, place: Literal["alone", "json", "tags"]) -> bool:
    """Return whether a call that is held to the grammar can have this text."""
    if place == "alone":
        return accepts(standalone(grammar), text)
    writer = Lark({})
    if place == "json":
        start = f'"{{" {writer.json_text(grammar)} "}}"'
        return accepts(writer.grammar(start).text, "{" + json.dumps(text, ensure_ascii=False) + "}")
    start = f'"<v>" {writer.text_until(grammar, END)}'
    return accepts(writer.grammar(start).text, f"<v>{text}{END}")


@pytest.mark.parametrize("place", ["alone", "json", "tags"])
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (lark(PATCH), [GOOD_PATCH, GOOD_PATCH.rstrip()], BAD_PATCHES),
        (lark('start: "a\\n\\"\\\\" | "b"'), ['a\n"\\', "b"], ["a", 'a\\n\\"']),
        (lark('start: "x" start "y" | "\\n"'), ["\n", "xx\nyy"], ["x\ny\n", "xy"]),
        (lark('start: /[^a]/ "!"'), ["b!", '"!', "\\!", "\n!", "\x01!", "é!", "🐟!"], ["a!", "bb!"]),
        (lark("start: /./ \"!\""), ["b!", '"!'], ["\n!"]),
        (lark("start: /(?s:.)./ \"!\""), ["\nb!"], ["b\n!", "\n\n!"]),
        (lark("start: /(?s)(a|.)./ \"!\""), ["\nb!", "b\n!"], ["!"]),
        (lark("start: /./s \"!\""), ["\n!"], ["!"]),
        (lark('start: "ok\\n"i "!"'), ["OK\n!", "ok\n!"], ["ok!"]),
        (lark('start: (" ".."#")+ "!"'), [' "#!'], ["$!"]),
        (lark("start: /\\x0a\\u0009[\\x{22}a]\\// \"!\""), ['\n\t"/!', "\n\ta/!"], ["\n\tb/!"]),
        (lark("start: /[[:alpha:]\\n]+[\\d\\s]\\S\\W/ \"!\""), ["a\nb\n\\\"!", "c1\"\n!"], ["11\"\n!"]),
        (lark("start: W \"!\"\n%import common.WS_INLINE -> W"), [" \t!"], ["\n!"]),
        (lark("start: WS WORD \"!\"\n%import common (WS, WORD)"), ["\nab!"], ["ab!"]),
        (lark('start: "a" "b"\n%ignore / +/'), ["ab", "a  b"], ["a,b"]),
        (lark('start: "}" "{" # "a"\n'), ["}{"], ["}{a", "{}"]),
        (pattern(r"^\d{2}:\d{2}/[\n\"]$"), ["12:30/\n", '12:30/"'], ["12:3/\n"]),
        (pattern("a\nb|c"), ["a\nb", "c"], ["a", "b"]),
        (pattern(r"a\$"), ["a$"], ["a"]),
        (pattern(r"a\\$"), ["a\\"], ["a$"]),
    ],
    ids=lambda value: value.definition[:24] if isinstance(value, TextGrammar) else "",
)  # fmt: skip
def test_a_text_follows_its_grammar_wherever_it_stands(place, grammar, good, bad):
    check_text_grammar(grammar)
    assert [text for text in good if not follows(text, grammar, place)] == []
    assert [text for text in bad if follows(text, grammar, place)] == []


@pytest.mark.parametrize("place", ["json", "tags"])
def test_a_grammar_that_refers_to_itself_can_end_where_any_text_could_go_on(place):
    grammar = lark('start: "(" start ")" | /[^!]+/')
    assert follows("(abc)", grammar, place)
    assert follows("abc", grammar, place)
    assert not follows("a!", grammar, place)


def test_a_text_between_tags_does_not_contain_the_end():
    assert follows("<v", lark('start: /[^!]+/ "!"'), "tags") is False
    assert follows("a<b!", lark('start: /[^!]+/ "!"'), "tags")
    assert not follows("a</v>b!", lark('start: /[^!]+/ "!"'), "tags")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lark("start: ("), "Expected token ')'"),
        (lark("start: nowhere"), 'unknown name: "nowhere"'),
        (lark("word: /a/"), "start"),
        (lark(""), "Empty grammar"),
        (lark("start: /a(?=b)/"), "look-ahead"),
        (pattern("a("), "regex parse error"),
        (lark('start: "a"\n}\nx: "b"'), "expecting rule"),
        (lark('start: "a'), "a text or a pattern has no end"),
        (lark('start: "' + r"\"" * 30_000), "a text or a pattern has no end"),
        (lark("start: /" + r"\/" * 30_000), "a text or a pattern has no end"),
        (lark("start: <[5]>"), "<[5]> is not supported"),
        (lark("start: @other"), "@other is not supported"),
        (lark('start: %json {"type": "string"}'), "%json is not supported"),
        (lark(chain("r", '"a"')), "over more than 250 levels"),
        (lark(chain("R", '"a"')), "over more than 250 levels"),
        (lark(chain("r", '"(" start ")" | "a"')), "over more than 250 levels"),
        (lark('start: "' + "a" * 2**16 + '"'), "more than 65536 characters"),
    ],
    ids=lambda value: value.definition[:24] if isinstance(value, TextGrammar) else "",
)
def test_a_grammar_that_is_none_is_refused_by_the_name_of_its_tool(grammar, reason):
    with pytest.raises(InvalidRequest) as refused:
        check_text_grammar(grammar)
    assert refused.value.param == "tools[0].format"
    assert reason in refused.value.message
    assert "'patch'" in refused.value.message
    assert "1 |" not in refused.value.message


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lark("start: A\nA: /[a-z]+/ & ~/b/"), "'~'"),
        (lark("start: /a b/x"), "flag x"),
        (lark("start: /(?x)a b/"), "flag x"),
        (lark('start: "ab".."c"'), "no range"),
        (lark(r'start: "\q"'), "malformed"),
        (lark(r"start: /\Q/"), "no expression"),
    ],
    ids=str,
)
def test_what_has_no_form_in_json_is_refused(grammar, reason):
    with pytest.raises(InvalidRequest, match=reason):
        Lark({}).json_text(grammar)
