"""DeepSeek V3.2 and V4: `<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</…>`.

The calls are wrapped in `function_calls` (V3.2), in `tool_calls` (V4), or in `calls` with a space after each
mark. The `string` attribute marks an argument as text or JSON. Models also write one JSON object in place of
the parameters, and V4 often forgets the wrapper.

Own parser, because mlx_lm has none.
"""

from dataclasses import replace
from functools import partial

import regex

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reading.schema import JSON_TYPES
from start_llm.formats.reading.tagged import TaggedReader, Tags
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.arguments import TaggedArguments
from start_llm.formats.writing.call_text import CallText

_MARK = "｜DSML｜"
_QUOTED = r"=\s{0,64}\"(?P<%s>[^<>\"\n]{1,256})\""
_TYPES = {**dict.fromkeys(JSON_TYPES, "false"), "string": "true"}


def _notation(name: str, wrapper: str, mark: str) -> Notation:
    """Return the notation of calls inside a wrapper of this name.

    Args:
        mark: the text before the name of each tag.
    """
    opener, closer = f"<{mark}{wrapper}>", f"</{mark}{wrapper}>"
    value_end = f"</{mark}parameter>"
    return Notation(
        name=name,
        openers=(opener,),
        reader=partial(TaggedReader, _tags(mark, value_end, closer)),
        text=CallText(
            mark=f"{wrapper}>",
            before=f"{opener}\n",
            head=f'<{mark}invoke name="NAME">\n',
            tail=f"</{mark}invoke>\n",
            arguments=TaggedArguments(
                key=f'<{mark}parameter name="KEY" string="TYPE">',
                value_end=value_end,
                after="\n",
                types=_TYPES,
            ),
            after=closer,
        ),
    )


def _with_objects(name: str, wrapper: str) -> Notation:
    """Return the notation of calls whose arguments are written as one JSON object."""
    invoke, end = rf"\s{{0,64}}<{_MARK}invoke\s{{1,64}}name", rf"(?:\s{{0,64}}</{_MARK}invoke>)?"
    objects = Objects(
        head=rf"(?:{end}(?={invoke}))?{invoke}{_QUOTED % 'name'}\s{{0,64}}>\s{{0,64}}(?=\{{)",
        next_call=rf"{end}(?={invoke})",
        block_end=rf"{end}\s{{0,64}}</{_MARK}{wrapper}>",
    )
    return Notation(name=name, openers=(f"<{_MARK}{wrapper}>",), reader=partial(ObjectReader, objects))


def _tags(mark: str, value_end: str, closer: str) -> Tags:
    mark, closer = regex.escape(mark, literal_spaces=True), regex.escape(closer, literal_spaces=True)
    return Tags(
        head=rf"\s{{0,64}}<{mark}invoke\s{{1,64}}name{_QUOTED % 'name'}\s{{0,64}}>",
        key=rf"\s{{0,64}}<{mark}parameter\s{{1,64}}name{_QUOTED % 'key'}"
        rf"(?:\s{{1,64}}string{_QUOTED % 'type'})?\s{{0,64}}>",
        value_end=value_end,
        end=rf"\s{{0,64}}(?:</{mark}invoke>|{closer})",
        another=rf"(?:<{mark}\w{{1,32}}>\s{{0,64}})?<{mark}invoke\s{{1,64}}name{_QUOTED % 'tool'}\s{{0,64}}>",
        next_call=rf"\s{{0,64}}(?=<{mark}invoke\s)",
        block_end=rf"\s{{0,64}}{closer}",
        text_type=_TYPES["string"],
    )


_CLOSER = rf"</{_MARK}(?:function_calls|tool_calls)>"
_BARE = replace(
    _tags(_MARK, f"</{_MARK}parameter>", ""),
    head=rf"(?:\s{{0,64}}<{_MARK}invoke)?\s{{1,64}}name{_QUOTED % 'name'}\s{{0,64}}>",
    end=rf"\s{{0,64}}(?:</{_MARK}invoke>|{_CLOSER})",
    block_end=rf"\s{{0,64}}{_CLOSER}",
)

DSML = ModelFormat(
    name="deepseek_v32",
    marks=(_MARK,),
    types=("deepseek_v32", "deepseek_v4"),
    reasoning=replace(THINK, cut="</think>"),
    notations=(
        _notation("dsml_functions", "function_calls", _MARK),
        _notation("dsml_tools", "tool_calls", _MARK),
        _notation("dsml_spaced", "calls", f"{_MARK} "),
    ),
)
DSML_READ_ONLY = (
    Notation(name="dsml_bare", openers=(f"<{_MARK}invoke",), reader=partial(TaggedReader, _BARE)),
    _with_objects("dsml_functions_json", "function_calls"),
    _with_objects("dsml_tools_json", "tool_calls"),
)
