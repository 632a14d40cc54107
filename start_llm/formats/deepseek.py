"""DeepSeek up to V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`; older: fenced.

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {…}
    ```<｜tool▁call▁end｜>

Own parser, because mlx_lm has none.
"""

from functools import partial

from start_llm.formats.model_format import ModelFormat, Notation
from start_llm.formats.reading.json_calls import ObjectReader, Objects
from start_llm.formats.reasoning_marks import THINK
from start_llm.formats.writing.call_text import CallText

_OPENER = "<｜tool▁calls▁begin｜>"
_BEGIN = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"
_BLOCK_END = "<｜tool▁calls▁end｜>"
_OPENERS = (_OPENER, _BEGIN)
_NAME = r"(?P<name>[\w.\-]{1,256})"


def _objects(head: str, fence: str) -> Objects:
    """Return the patterns of calls with this head. The closing fence and the end mark are optional."""
    end = rf"(?:\s{{0,64}}{fence})?(?:\s{{0,64}}{_END})?\s{{0,64}}"
    return Objects(
        head=rf"(?:{end}{_BEGIN})?\s{{0,64}}{head}\s{{0,64}}(?=\{{)",
        next_call=rf"{end}(?={_BEGIN})",
        block_end=rf"{end}{_BLOCK_END}",
    )


_PLAIN = _objects(rf"{_NAME}\s{{0,64}}{_SEPARATOR}", "")
_FENCED = _objects(rf"function\s{{0,64}}{_SEPARATOR}\s{{0,64}}{_NAME}\s{{0,64}}```(?:json)?", "```")

DEEPSEEK = ModelFormat(
    name="deepseek",
    marks=(_OPENER,),
    types=("deepseek",),
    reasoning=THINK,
    notations=(
        Notation(
            name="deepseek_fenced",
            openers=_OPENERS,
            reader=partial(ObjectReader, _FENCED),
            text=CallText(
                mark="```json",
                before=_OPENER,
                head=f"{_BEGIN}function{_SEPARATOR}NAME\n```json\n",
                tail=f"\n```{_END}",
                between="\n",
                after=_BLOCK_END,
            ),
        ),
        Notation(
            name="deepseek",
            openers=_OPENERS,
            reader=partial(ObjectReader, _PLAIN),
            text=CallText(
                mark=_SEPARATOR,
                before=_OPENER,
                head=f"{_BEGIN}NAME{_SEPARATOR}",
                tail=_END,
                after=_BLOCK_END,
            ),
        ),
    ),
)
