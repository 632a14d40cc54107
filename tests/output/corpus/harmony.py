"""Harmony (gpt-oss): messages with channels and recipients."""

from tests.output.corpus.case import NO_TOOLS, Call, Case
from tests.output.corpus.common import LIST, READ
from tests.output.corpus.writers import HARMONY, WRITERS

_WRITER = WRITERS["harmony"]


def _case(name, text, calls=(), content="", reasoning="", **more) -> Case:
    return Case(
        name=name, text=text, calls=tuple(calls), content=content, reasoning=reasoning, family=HARMONY, **more
    )


def _plain(name, text) -> Case:
    return _case(name, text, content=text)


A = Call("read", {"path": "a"}, '{"path": "a"}')
_REASONING = "<|channel|>analysis<|message|>Hm.\nWell.<|end|>"
_FINAL = "<|start|>assistant<|channel|>final<|message|>"
_HEAD = "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
_GOOD = f'{_HEAD}{{"path": "a"}}<|call|>'
_BAD = "<|start|>assistant<|channel|>commentary to=functions.remove<|message|>{}<|call|>"

CASES = (
    _case("reasoning and an answer", f"{_REASONING}{_FINAL}Done.\n<|return|>", [], "Done.\n", "Hm.\nWell."),
    _case("an answer that the last token ends", f"{_REASONING}{_FINAL}Done.", [], "Done.", "Hm.\nWell."),
    _case("an answer alone", "<|channel|>final<|message|>Done.<|return|>", [], "Done."),
    _case("reasoning and a call", f"{_REASONING}<|start|>assistant{_GOOD}", [A], reasoning="Hm.\nWell."),
    _case("the first header without a start", _GOOD, [A]),
    _case(
        "the recipient before the channel",
        '<|start|>assistant to=functions.read<|channel|>commentary json<|message|>{"path": "a"}<|call|>',
        [A],
    ),
    _case("no word before the recipient", _GOOD.replace("functions.", ""), [A]),
    _case("half a character", _GOOD.replace('"a"', '"\\ud83d"'), [Call("read", {"path": "\ufffd"})]),
    _case("no last token", _GOOD.removesuffix("<|call|>"), [A]),
    _case("a cut after a whole object", _GOOD.removesuffix("<|call|>"), [A], complete=False),
    _case("white space in the header",
          _GOOD.replace("json", " json ").replace("<|channel|>", " <|channel|> "), [A]),
    _case(
        "a preamble before a call",
        f"<|channel|>commentary<|message|>I look.\n<|end|><|start|>assistant{_GOOD}",
        [A],
        "I look.",
    ),
    _case(
        "reasoning between calls",
        f"{_REASONING}<|start|>assistant{_GOOD}<|start|>assistant{_REASONING}{_WRITER.write([READ, LIST])}",
        [A, READ, LIST],
        reasoning="Hm.\nWell.Hm.\nWell.",
    ),
    _case(
        "a call inside reasoning",
        "<|channel|>analysis<|message|>I could "
        '<tool_call>{"name": "list", "arguments": {}}</tool_call> to=functions.list {}<|end|>'
        f"{_FINAL}No.",
        [],
        "No.",
        'I could <tool_call>{"name": "list", "arguments": {}}</tool_call> to=functions.list {}',
    ),
    _case("a call on the channel of reasoning", _GOOD.replace("commentary", "analysis"), [A]),
    _case("a line break inside a text", _GOOD.replace('"a"', '"a\n"'), [Call("read", {"path": "a\n"})]),
    _case("arguments as a text", _GOOD.replace('{"path": "a"}', '"{\\"path\\": \\"a\\"}"'), [A]),
    _case("another tool between calls", f"{_GOOD}{_BAD}<|start|>assistant{_GOOD}", [A, Call("remove"), A]),
    _case("prose before a call of another tool", f"<|channel|>final<|message|>So:\n{_BAD}",
          [Call("remove")], "So:"),
    _case("another prefix", _GOOD.replace("functions.", "tools."), [A]),
    _case("other letters", _GOOD.replace("functions.read", "functions.Read"), [A]),
    _case(
        "two channels",
        "<|channel|>analysis to=functions.read<|channel|>commentary <|constrain|>json<|message|>"
        '{"path": "a"}<|call|>',
        [A],
    ),
    _case(
        "a recipient, then the channel",
        ' to=functions.read<|channel|>commentary<|message|>{"path": "a"}<|call|>',
        [A],
    ),
    _case("a message to the user", "<|channel|>commentary to=user<|message|>Hi.<|end|>", [], "Hi."),
    _case("an answer to someone", "<|channel|>final to=functions.read<|message|>Hi.<|return|>", [], "Hi."),
    _case("prose about other formats", f"{_FINAL}Write `<tool_call>`, `<think>`.", [],
          "Write `<tool_call>`, `<think>`."),
    _case("no tools", _GOOD, [], '{"path": "a"}', tools=NO_TOOLS),
    _case("reasoning that the prompt opened", f"Hm.<|end|>{_FINAL}Done.", [], "Done.", "Hm.",
          reasoning_is_open=True),
    _case("half a header at the end", f"{_FINAL}Done.<|end|><|start|>assistant<|chan", [], "Done."),
    _case("white space after an answer", f"{_FINAL}Done. \n", [], "Done. \n"),
    _plain("an answer without a header", "Hello, you."),
    _plain("a word without a header", "Hello"),
    _case("no channel's name", "<|channel|>!!! and <|start|>!", [], "!!! and !"),
    _plain("spaces before a header", " " * 40 + "a"),
    _case("a header that is none", "<|start|>assistant!<|channel|>?", [], "assistant!?"),
    *(
        _case(f"a mark twice: {mark}", f"{_HEAD}{{\"path\": \"a\"}}<|call|>".replace(mark, mark * 2),
              [Call("read", {"path": "a"})])
        for mark in ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>")
    ),
    _case("no mark before the arguments", f"{_HEAD}{{\"path\": \"a\"}}<|call|>".replace("<|message|>", ""),
          [Call("read", {"path": "a"})]),
    _case("a control token in an answer", "<|channel|>final<|message|>a<|constrain|>b<|message|>c<|return|>",
          [], "abc"),
    _case("a list of arguments", f"{_HEAD}[1]<|call|>", [], "[1]"),
    _case("an empty message", f"{_HEAD}<|call|>", [Call("read")]),
    _case("an empty message that the reply ends", f"{_HEAD} \n", [Call("read")]),
    _case("an empty message before another", f"{_HEAD}{_FINAL}Done.", [Call("read")], "Done."),
    _case("an empty message that is cut", _HEAD, complete=False),
    _case("an empty message for a tool that is not offered", f"{_HEAD.replace('read', 'x')}<|call|>",
          [Call("x")]),
    _case("a header that another one interrupts", f"{_REASONING}<|start|>assistant<|channel|>commentary "
          "to=assistant<|channel|>final<|message|>Done.", [], "Done.", "Hm.\nWell."),
    _case("headers without a message", f"<|channel|>commentary<|start|>assistant to=functions.x{_FINAL}Done.",
          [], "Done."),
    _case("a recipient that a header interrupts", f" to=functions.x{_FINAL}Done.", [], "Done."),
    _case("a text that a header follows", f"Hello{_FINAL}Done.", [], "HelloDone."),
    _case("a brace too few", f'{_HEAD}{{"path": "a"<|call|>', [A]),
    _case("an expression", f'{_HEAD}{{"path": "\\d"}}<|call|>', [Call("read", {"path": "\\d"})]),
    _case("malformed arguments", f'{_HEAD}{{"path" "a"}}<|call|>', [], '{"path" "a"}'),
    _case("a tool of the model's own", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", [],
          "print(1)"),
)  # fmt: skip
