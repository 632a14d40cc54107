"""Compiles chat templates as transformers does, in its sandbox, but with fewer checks at run time.

Before a template reads an attribute or calls a method, jinja2's sandbox checks whether it may. These checks
are slow and run again for every message. For plain data, methods of strings and loops their result is known
beforehand, so they are skipped. Everything else is checked as before.
"""

from collections.abc import Callable
from functools import cache
from types import BuiltinMethodType
from typing import Any

from jinja2.runtime import LoopContext
from transformers.utils import chat_template_utils

_OF_DICTIONARIES = frozenset(dir(dict))
_OF_TEXTS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
"""Methods of strings, except those that the sandbox replaces."""
_PLAIN = frozenset({str, int, bool, dict, list})

type _Get = Callable[[Any, str], Any]
type _Call = Callable[..., Any]


@cache
def compiled(template: str) -> Any:
    """Return the compiled template. It renders what the template compiled by transformers renders."""
    made: Any = chat_template_utils._compile_jinja_template(template)  # pyright: ignore[reportPrivateUsage]
    environment = made.environment
    environment.getattr = _of_known_first(environment)
    environment.call = _texts_first(environment.call)
    return made


def _of_known_first(environment: Any) -> _Get:
    of_anything: _Get = environment.getattr
    undefined, holders = environment.undefined, (LoopContext, environment.globals["namespace"])

    def of_known_first(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is dict:
            if name not in _OF_DICTIONARIES:
                return value[name] if name in value else undefined(obj=value, name=name)
        elif kind is str:
            if name in _OF_TEXTS:
                return getattr(value, name)
        elif kind in holders and not name.startswith("_"):
            held = getattr(value, name, None)
            if type(held) in _PLAIN:
                return held
        return of_anything(value, name)

    return of_known_first


def _texts_first(call_anything: _Call) -> _Call:
    def call_texts_first(context: Any, called: Any, /, *args: Any, **options: Any) -> Any:
        if type(called) is not BuiltinMethodType or type(called.__self__) is not str:
            return call_anything(context, called, *args, **options)
        options.pop("_loop_vars", None)
        options.pop("_block_vars", None)
        return called(*args, **options)

    return call_texts_first
