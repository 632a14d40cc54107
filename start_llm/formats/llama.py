"""Llama 3: a bare `{"name": NAME, "parameters": {…}}`, several with `;`, and `<function=NAME>{…}</function>`.

Tools that it knows from its training it calls in Python: `<|python_tag|>NAME.call(key="text")`.

Own parser, because mlx_lm has none.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.python_calls import KEY, ArgumentsScanner, as_json
from start_llm.formats.writing.call_text import CallText

# Without an opener, the first member tells a call from a JSON answer, which must stream without delay.
_BARE = Objects(
    head=r"(?:\s{0,64}[;,])?\s{0,64}"
    r"(?=\{\s{0,64}\"(?:(?:name|parameters|arguments|function)\"|type\"\s{0,64}:\s{0,64}\"function\"))",
    next_call=r"(?:\s{0,64}[;,])?\s{0,64}(?=\{)",
    may_lack_arguments=False,
)
_TAGGED = Objects(
    head=r"(?P<name>[^<>{}\n]{1,256})>\s{0,64}(?=\{)",
    block_end=r"\s{0,64}</function>",
)
_PYTHON = Objects(head=rf"\s{{0,64}}(?P<name>{KEY})\.call(?=\()", span=ArgumentsScanner, arguments=as_json)

LLAMA = ModelFormat(
    name="llama3",
    marks=("<|python_tag|>", "<|start_header_id|>"),
    types=("llama",),
    notations=(
        Notation(
            name="llama_bare",
            openers=("<|python_tag|>",),
            reader=partial(ObjectReader, _BARE),
            bare=("{",),
            text=CallText(mark="", head='{"name": "NAME", "parameters": ', tail="}", between="; "),
        ),
        Notation(
            name="llama_tagged",
            openers=("<function=",),
            reader=partial(ObjectReader, _TAGGED),
            text=CallText(mark="<function=", head="<function=NAME>", tail="</function>"),
        ),
    ),
)
LLAMA_READ_ONLY = (
    Notation(name="llama_python", openers=("<|python_tag|>",), reader=partial(ObjectReader, _PYTHON)),
)
