"""Kimi K3: `<|open|>call tool="NAME" index="1"<|sep|>`, then typed arguments or one JSON object.

    <|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>
    <|open|>json type="object"<|sep|>{…}<|close|>json<|sep|>

Own parser: mlx_lm's parser reads only finished blocks, ends a value at the first end mark, even inside a
text, and loses every call of a block if one is malformed.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.schema import JSON_TYPES
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import unmistakable
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_OPENER, _BLOCK_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_CALL, _CALL_END = "<|open|>call", "<|close|>call<|sep|>"
_OPENERS = (_OPENER, _CALL)
_ANSWER, _ANSWER_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
_MESSAGE_END = "<|close|>message<|sep|>"
_VALUE_END = "<|close|>argument<|sep|>"
_JSON, _JSON_END = '<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"
_HEAD = f'{_CALL} tool="NAME" index="NUMBER"<|sep|>'
_TYPES = {**{kind: kind for kind in JSON_TYPES}, "integer": "number"}

_SPACE = r"\s{0,64}"
_SEPARATOR = rf"[^<>]{{0,64}}{_SPACE}<\|sep\|>"
_NAMED_CALL = rf"(?:{_SPACE}<\|open\|>call)?\s{{1,64}}tool=\"(?P<name>[^<>\"\n]{{1,256}})\"{_SEPARATOR}"
_NEXT_CALL = rf"{_SPACE}(?=<\|open\|>call\s)"
_AFTER_JSON = rf"(?:{_SPACE}<\|close\|>json<\|sep\|>)?(?:{_SPACE}<\|close\|>call<\|sep\|>)?{_SPACE}"


def _unescape(name: str) -> str:
    return name.replace("&quot;", '"').replace("&amp;", "&")


def _escape(name: str) -> str:
    return name.replace("&", "&amp;").replace('"', "&quot;")


_TAGS = Tags(
    head=_NAMED_CALL,
    unescape=_unescape,
    key=rf"{_SPACE}<\|open\|>argument\s{{1,64}}key=\"(?P<key>[^<>\"\n]{{1,256}})\""
    rf"(?:\s{{1,64}}type=\"(?P<type>\w{{1,64}})\")?{_SPACE}<\|sep\|>",
    value_end=_VALUE_END,
    end=rf"{_SPACE}<\|close\|>(?:call|tools)<\|sep\|>",
    another=rf"(?:<\|open\|>tools<\|sep\|>{_SPACE})?<\|open\|>call\s{{1,64}}tool=\"(?P<tool>[^<>\"\n]{{1,256}})\"{_SEPARATOR}",
    has_lines=False,
    next_call=_NEXT_CALL,
    block_end=rf"{_SPACE}<\|close\|>tools<\|sep\|>",
    text_type=_TYPES["string"],
)
_OBJECTS = Objects(
    head=rf"{_AFTER_JSON}{_NAMED_CALL}{_SPACE}<\|open\|>json{_SEPARATOR}{_SPACE}(?=\{{)",
    unescape=_unescape,
    next_call=rf"{_AFTER_JSON}(?=<\|open\|>call\s)",
    block_end=rf"{_AFTER_JSON}<\|close\|>tools<\|sep\|>",
)

KIMI_K3 = ModelFormat(
    name="kimi_k3",
    marks=("<|open|>",),
    types=("kimi_k3",),
    reasoning=unmistakable("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    answer_marks=(_ANSWER, _ANSWER_END, _MESSAGE_END),
    around_answer=((_ANSWER, _ANSWER_END + _MESSAGE_END),),
    reply_end=_MESSAGE_END,
    notations=(
        Notation(
            name="kimi_k3",
            openers=_OPENERS,
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark="<|open|>",
                before=_OPENER,
                head=_HEAD,
                first=1,
                tail=_CALL_END,
                arguments=TaggedArguments(
                    key='<|open|>argument key="KEY" type="TYPE"<|sep|>',
                    value_end=_VALUE_END,
                    types=_TYPES,
                    escape=_escape,
                ),
                after=_BLOCK_END,
            ),
        ),
        Notation(
            name="kimi_k3_json",
            openers=_OPENERS,
            reader=partial(ObjectReader, _OBJECTS),
            text=CallText(
                mark=_JSON,
                before=_OPENER,
                head=_HEAD + _JSON,
                first=1,
                tail=_JSON_END + _CALL_END,
                after=_BLOCK_END,
            ),
        ),
    ),
)
