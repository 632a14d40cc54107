"""Renders a model's chat template as loading the model would, in a process that can be ended.

    python -m start_llm.hosting.template_trial FOLDER

A template is a program of the model's author: it may never end, and `'%9999999999d' % 1` takes ten
gigabytes. In the server nothing could end it, because Python cannot stop a thread. `models.trial` starts this
process and judges by its exit status. It imports neither MLX nor transformers, which would take seconds.

The limits are the process's own, so that they hold when the server has gone: memory where the system obeys it
(not on macOS, where the server watches), time of the processor, and time.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from start_llm.core.chat import Json
from start_llm.formats import registry
from start_llm.prompt.template_audit.audit import audit
from start_llm.prompt.template_audit.samples import rendered_samples

TOO_MUCH_MEMORY = 3
"""Exit status."""
_PROCESSOR_S = 10
_LONGEST_S = 120
_MEMORY_BYTES = 2**30
"""What rendering may take beside what the process has anyway."""
_TEMPLATES = ("*.jinja", "additional_chat_templates/*.jinja")
_IN_JSON = ("tokenizer_config.json", "chat_template.json")
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def main(folder: Path) -> int:
    """Render every template of a folder in all the ways in which the server does. Returns the exit status."""
    _limit()
    config = _json(folder / "config.json")
    tokenizer_config = _json(folder / "tokenizer_config.json")
    for template in templates_in(folder):
        try:
            _render(TrialTokenizer(template, tokenizer_config), config)
        except MemoryError:
            return TOO_MUCH_MEMORY
        except Exception:  # noqa: BLE001, S112 - what else is wrong with a model is reported when it is loaded
            continue
    return 0


def _render(tokenizer: TrialTokenizer, config: Mapping[str, Any]) -> None:
    samples = rendered_samples(tokenizer)
    family = registry.detect(config, tokenizer.chat_template, tokenizer.added_tokens, samples)
    audit(tokenizer, family)


def _limit() -> None:
    signal.alarm(_LONGEST_S)
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, 2 * _PROCESSOR_S))
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def files_with_templates(folder: Path) -> Iterator[Path]:
    """Yield the files of a model in which a template may be, not a folder or a dead link of such a name."""
    for pattern in (*_IN_JSON, *_TEMPLATES):
        yield from filter(Path.is_file, sorted(folder.glob(pattern)))


def templates_in(folder: Path) -> list[str]:
    """Return the templates of a model, each once."""
    templates: list[str] = []
    for path in files_with_templates(folder):
        if path.suffix == ".jinja":
            with suppress(OSError):  # loading reports it
                templates.append(path.read_text(encoding="utf-8", errors="replace"))
        else:
            templates += _texts(_json(path).get("chat_template"))
    return list(dict.fromkeys(templates))


def _texts(value: object) -> list[str]:
    """Return a template, or those of a list of named ones."""
    if isinstance(value, str):
        return [value]
    entries = value if isinstance(value, list) else []
    templates = [entry.get("template") for entry in entries if isinstance(entry, dict)]
    return [template for template in templates if isinstance(template, str)]


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        value = json.loads(path.read_bytes())
        return value if isinstance(value, dict) else {}
    return {}


class TrialTokenizer:
    """A template without a tokenizer: it renders, and its tokens are bytes.

    Args:
        config: the content of tokenizer_config.json.
    """

    has_chat_template = True

    def __init__(self, template: str, config: Mapping[str, Any]) -> None:
        self.chat_template = template
        self._special = {name: text for name in _SPECIAL if (text := _token(config.get(name)))}
        added = config.get("added_tokens_decoder")
        listed = added.values() if isinstance(added, dict) else ()
        self.added_tokens = tuple(text for token in listed if (text := _token(token)))
        self.end_texts = frozenset({self._special["eos_token"]} if "eos_token" in self._special else ())
        self._template = environment().from_string(template)

    def render(
        self,
        messages: list[dict[str, Json]],
        tools: list[dict[str, Json]] | None,
        options: Mapping[str, Json],
        *,
        add_generation_prompt: bool,
        strftime_now: Callable[[str], str],
    ) -> str:
        """See `prompt.template.TemplateTokenizer`."""
        self._template.globals["strftime_now"] = strftime_now
        variables = {**self._special, "documents": None, **options}
        return self._template.render(
            variables, messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
        )

    def encode(self, text: str, *, as_document: bool) -> list[int]:  # noqa: ARG002 - see the protocol
        return list(text.encode(errors="surrogatepass"))


def _token(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


class _Generation(Extension):
    """`{% generation %}`, whose text is what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as its class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers compiles templates in (`chat_template_utils`), without transformers."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _as_json
    named: dict[str, Any] = {"raise_exception": _raise, "strftime_now": datetime.now(UTC).strftime}
    made.globals.update(named)
    return made


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise TemplateError(message)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
