"""Step 3: `<steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>…`.

Each call stands between `<｜tool_call_begin｜>function<｜tool_sep｜>` and `<｜tool_call_end｜>`. Step 3.5
writes as Qwen does. Own parser, because mlx_lm has none.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_OPENER, _END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
_BEGIN, _CALL_END = "<｜tool_call_begin｜>", "<｜tool_call_end｜>"
_SEPARATOR = "<｜tool_sep｜>"
_VALUE_END = "</steptml:parameter>"
_SPACE = r"\s{0,64}"
_NAMED = r"\s{1,64}name\s{0,64}=\s{0,64}\"(?P<%s>[^<>\"\n]{1,256})\"\s{0,64}>"
_TAGS = Tags(
    head=rf"(?:{_SPACE}{_CALL_END})?(?:{_SPACE}{_SEPARATOR})?{_SPACE}{_BEGIN}{_SPACE}(?:function{_SPACE}{_SEPARATOR}[^<]{{0,256}})?"
    rf"<steptml:invoke{_NAMED % 'name'}",
    key=rf"{_SPACE}<steptml:parameter{_NAMED % 'key'}",
    value_end=_VALUE_END,
    end=rf"{_SPACE}(?:</steptml:invoke>|{_CALL_END})",
    another=rf"(?:{_OPENER}{_SPACE})?{_BEGIN}[^<]{{0,64}}(?:{_SEPARATOR})?[^<]{{0,64}}"
    rf"<steptml:invoke{_NAMED % 'tool'}",
    has_lines=False,
    next_call=rf"(?:{_SPACE}{_CALL_END})?{_SPACE}(?:{_SEPARATOR}{_SPACE})?(?={_BEGIN})",
    block_end=rf"(?:{_SPACE}{_CALL_END})?{_SPACE}{_END}",
)

STEP3 = ModelFormat(
    name="step3",
    marks=("<steptml:",),
    types=("step3",),
    reasoning=THINK,
    notations=(
        Notation(
            name="step3",
            openers=(_OPENER,),
            reader=partial(TaggedReader, _TAGS),
            text=CallText(
                mark="<steptml:",
                before=_OPENER,
                head=f'{_BEGIN}function{_SEPARATOR}<steptml:invoke name="NAME">',
                tail=f"</steptml:invoke>{_CALL_END}",
                arguments=TaggedArguments(key='<steptml:parameter name="KEY">', value_end=_VALUE_END),
                after=_END,
            ),
        ),
    ),
)
