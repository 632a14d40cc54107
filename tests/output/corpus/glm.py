"""GLM-4.5 and later: keys and values in tags."""

from tests.output.corpus.case import Call, Case
from tests.output.corpus.common import LIST
from tests.output.corpus.writers import WRITERS

_FAMILY = WRITERS["glm"].family


def _case(name, text, calls=(), content="", **more) -> Case:
    return Case(name=name, text=text, calls=tuple(calls), content=content, family=_FAMILY, **more)


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_BEGIN = "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a"
_GOOD = f"{_BEGIN}</arg_value>\n</tool_call>"

CASES = (
    _case("no line breaks", _GOOD.replace("\n", ""), [A]),
    _case("line breaks before the name", _GOOD.replace("read", "\nread"), [A]),
    _case("no arguments in one line", "<tool_call>list</tool_call>", [LIST]),
    _case(
        "newlines that belong to the value",
        _GOOD.replace(">a<", ">\na\n<"),
        [Call("read", {"path": "\na\n"})],
    ),
    _case("no last tag", f"{_BEGIN}</arg_value>\n", [A]),
    _case("half a last tag", f"{_BEGIN}</arg_value>\n</tool_", [A]),
    _case("a reply that ends in a value", _BEGIN, [A]),
    _case("half the end of a value", f"{_BEGIN}</arg_va", [A]),
    _case(
        "a reply that ends in a number",
        "<tool_call>read<arg_key>limit</arg_key><arg_value>2",
        [Call("read", {"limit": 2})],
    ),
    _case(
        "all tags in a value",
        f"{_BEGIN}</arg_value> <arg_key> </tool_call><tool_call></arg_value></tool_call>",
        [Call("read", {"path": "a</arg_value> <arg_key> </tool_call><tool_call>"})],
    ),
    _case("no tag between two calls", f"{_BEGIN}</arg_value></tool_call>{_GOOD}", [A, A]),
    _plain("prose in the block", "<tool_call>Please use tags like this</tool_call>"),
    _plain("a word in the block", "<tool_call>Please</tool_call>"),
    _plain("a name and nothing else", "<tool_call>list"),
    _plain("a key without a value", "<tool_call>read<arg_key>path</arg_key></tool_call>"),
    _plain("a value without a key", "<tool_call>read<arg_value>a</arg_value></tool_call>"),
    _plain("a name that is too long", f"<tool_call>{'a' * 300}</tool_call>"),
    _plain("spaces without end", "<tool_call>list" + " " * 100 + "</tool_call>"),
)
