"""Templates are answered faster than by the sandbox of jinja2, and never otherwise."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from start_llm.models import chat_template

MESSAGES = [
    {"role": "user", "content": "a {x} b", "items": "own", "nothing": None, "calls": [{"name": "n"}]},
    {"role": "assistant", "content": "é"},
]
ANSWERED = (
    "{% for m in messages %}{{ m.role }}{{ m.content.strip() }}{{ m.missing }}{{ m.nothing }}{% endfor %}",
    "{{ messages[0].items }}{{ messages[0]['items'] }}{{ messages[0].calls[0].name }}",
    "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role }}{{ loop.nextitem.role }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle(1, 2) }}{% endfor %}",
    "{% for m in messages %}{{ loop.changed(m.role) }}{{ loop.depth }}{{ loop.missing }}{% endfor %}",
    "{% set ns = namespace(a=1, b=none) %}{% set ns.c = messages %}{{ ns.a }}{{ ns.b }}{{ ns.c }}{{ ns.d }}",
    "{% set ns = namespace(f=messages[0].content.format) %}{{ ns.f(x=1) }}",
    "{{ messages[0].content.format(x=1) }}{{ messages[0].content.format_map({'x': 1}) }}",
    "{{ messages[0].content.split(' ')[0].upper() }}{{ messages[0].content.join(['a', 'b']) }}",
    "{{ messages[0].content.startswith('a', 0, 1) }}{{ messages[0].content.missing }}",
    "{% for key, value in messages[0].items() %}{{ key }}{{ value }}{% endfor %}",
    "{% for m in messages %}{% set _ = m.content.replace('a', m.role) %}{{ _ }}{% endfor %}",
    "{% macro shout(m) %}{{ m.content.upper() }}{% endmacro %}{{ shout(messages[0]) }}",
)
REFUSED = (
    "{{ messages[0].__class__ }}",
    "{{ messages[0].content.__class__.__mro__ }}",
    "{{ messages[0].content.strip.__self__.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ messages[0].content.format.__globals__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% set ns = namespace(f='{0.__class__}'.format) %}{{ ns.f(messages) }}",
    "{% for m in ['{0.__class__}'.format] %}{{ loop.nextitem }}{{ m(messages) }}{% endfor %}",
    "{{ '{x.__class__}'.format_map({'x': messages}) }}",
    "{% for m in messages %}{{ loop._iterable }}{{ loop.__class__ }}{% endfor %}",
    "{% set ns = namespace() %}{{ ns.__class__ }}{{ ns._Namespace__attrs }}",
    "{{ namespace.__init__ }}",
    "{{ messages[0].content.join(1) }}",
    "{{ messages[0].content.upper(1) }}",
)


def answer(template: object) -> str:
    try:
        return template.render(messages=MESSAGES)  # pyright: ignore[reportAttributeAccessIssue]
    except (TemplateError, TypeError) as error:
        return f"{type(error)}: {error}"


@pytest.mark.parametrize("text", [*ANSWERED, *REFUSED])
def test_a_template_gets_what_the_sandbox_of_transformers_gives(text: str):
    its_own = chat_template_utils._cached_compile_jinja_template(text)
    assert answer(chat_template.compiled(text)) == answer(its_own)
