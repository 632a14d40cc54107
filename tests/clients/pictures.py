"""Pictures that clients show to a model that sees, and what of them reached its engine."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from PIL import Image as Pillow

from scripts import tiny_vision_models
from start_llm.app import App
from start_llm.config.settings import Settings
from start_llm.core.engine_request import EngineRequest
from start_llm.core.images import HIDDEN_IMAGE, Image, image_spans
from start_llm.engine.engine import Engine
from start_llm.engine.generation import Generation
from start_llm.hosting.model_loading import EngineStartup
from start_llm.models.image_processor import ImageProcessor
from start_llm.telemetry.terminal import Terminal
from tests.clients.talk import Line
from tests.http.forms import FORMS, Call
from tests.http.scripts import cut
from tests.images.files import saved
from tests.templates.traits import SEEING

PICTURE = "picture.png"
LOOK = "What does the picture show now?"
"""Stands in every question that is to make the model open the picture with a tool."""
SEEN = "A kettle, and it sings as ever."
"""What it answers to everything else."""


class Opener(NamedTuple):
    """A tool that shows a picture to the model.

    Attributes:
        argument: which of its arguments is the path.
    """

    tool: str
    argument: str

    @property
    def script(self) -> str:
        return f"<|{self.tool}:{self.argument}|>"

    @property
    def call(self) -> Call:
        return self.tool, {self.argument: PICTURE}


OPENERS = (
    Opener("Read", "file_path"),  # Claude Code
    Opener("read", "filePath"),  # opencode
    Opener("read", "path"),  # pi and OpenClaw
    Opener("view_image", "path"),  # Codex
)
_TRAIT = SEEING["sees_everywhere"]
_FORM = FORMS["hermes"]
_ANSWER = "<|answer|>"
_HOOK = """
{%- if add_generation_prompt -%}
    {%- set next = namespace(script=ANSWER) -%}
    {%- for message in messages -%}
        {%- if message.role == 'user' and LOOK in message.content -%}
            {%- for tool in tools or [] -%}
                {%- for name, argument, script in OPENERS if tool.function.name == name -%}
                    {%- if argument in (tool.function.parameters or {}).properties or {} -%}
                        {%- set next.script = script -%}
                    {%- endif -%}
                {%- endfor -%}
            {%- endfor -%}
        {%- elif message.role == 'tool' -%}
            {%- set next.script = ANSWER -%}
        {%- endif -%}
    {%- endfor -%}
    {{- next.script -}}
{%- endif -%}
"""


def write_seeing_model(tmp: Path) -> Path:
    """The folder of a model with the template of Qwen's: it opens a picture if a question says `LOOK`."""
    scripts = {opener.script: _FORM.calls(opener.call) for opener in OPENERS} | {_ANSWER: _FORM.answer(SEEN)}
    hook = _HOOK
    rows = [[opener.tool, opener.argument, opener.script] for opener in OPENERS]
    for name, value in {"ANSWER": _ANSWER, "LOOK": LOOK, "OPENERS": rows}.items():
        hook = hook.replace(name, repr(value))
    return tiny_vision_models.build_chain(
        tmp / "seeing",
        cut(_TRAIT, scripts),
        hidden=320,
        vocab=_TRAIT.vocabulary,
        words=[*scripts],
        chat_template=_TRAIT.template + hook,
        added=_TRAIT.added,
    )


def png(seed: int, width: int = 320, height: int = 200) -> bytes:
    """A file with coloured noise, coarse enough that towers tell two of them apart."""
    coarse = Pillow.frombytes("RGB", (8, 5), random.Random(seed).randbytes(120))
    return saved(coarse.resize((width, height), Pillow.Resampling.NEAREST), "PNG")


# ---------------------------------------------------------------------------------------- what the engine got


class Shown(NamedTuple):
    """An image in a prompt.

    Attributes:
        image: the file as the server was given it.
        tokens: those of the prompt.
    """

    image: Image
    tokens: tuple[int, ...]

    @property
    def size(self) -> tuple[int, int]:
        return self.image.width, self.image.height


class AskedPrompt(NamedTuple):
    """A prompt as the engine was given it, with its images in their order."""

    length: int
    images: Sequence[Shown]


class Witness:
    """Keeps what the engine of one server is asked."""

    def __init__(self) -> None:
        self._asked: list[EngineRequest] = []
        self._processor: ImageProcessor | None = None

    def app(self, settings: Settings, terminal: Terminal) -> App:
        """A server that has it."""
        return _WitnessedApp(self, settings, terminal)

    def attach(self, engine: Engine, ready: EngineStartup) -> None:
        assert ready.model.vision, ready.model.blind_reason
        self._processor, submit = ready.model.vision.processor, engine.submit

        def kept(request: EngineRequest) -> Generation:
            self._asked.append(request)
            return submit(request)

        engine.submit = kept

    def new_prompts(self) -> list[AskedPrompt]:
        """Those since the last time."""
        asked, self._asked = self._asked, []
        return [AskedPrompt(len(request.prompt), _shown(request)) for request in asked]

    def names_of(self, file: bytes) -> tuple[int, ...]:
        """The tokens that name a file."""
        assert self._processor
        with Pillow.open(io.BytesIO(file)) as opened:
            return self._processor.expand(Image(file, *opened.size)).tokens


def _shown(request: EngineRequest) -> list[Shown]:
    ids, runs = request.prompt.ids, {run.tokens[0]: run for run in request.images}
    return [
        Shown(cast("partial[object]", run.inputs).args[0], tuple(ids[start:end]))
        for start, end, run in image_spans(ids, runs)
    ]


class _WitnessedApp(App):
    def __init__(self, witness: Witness, settings: Settings, terminal: Terminal) -> None:
        super().__init__(settings, terminal)
        self._witness = witness

    def start(self) -> None:
        super().start()
        self._witness.attach(self.runtime.engine, self.runtime.startup)


# ------------------------------------------------------------------------------------------- where they stand


_IMAGE = f"<|vision_start|>{HIDDEN_IMAGE}<|vision_end|>"


def places(line: Line) -> list[str]:
    """In which message each image of a prompt stands: its role, or `tool`."""
    prompt = line["prompt"]
    assert prompt.count(HIDDEN_IMAGE) == prompt.count(_IMAGE) == line["images"]
    return [_message_at(prompt[: match.start()]) for match in re.finditer(re.escape(_IMAGE), prompt)]


def _message_at(before: str) -> str:
    opened = before.rpartition("<|im_start|>")[2]
    is_result = opened.count("<tool_response>") > opened.count("</tool_response>")
    return "tool" if is_result else opened.partition("\n")[0]
