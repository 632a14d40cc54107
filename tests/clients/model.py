"""A model as agents have it: a question makes it call a tool, and a result makes it answer.

Which of its scripts it follows stands in the last token of the prompt, and the template writes that: clients
choose no scripts. The call is of the tool that the client has, whatever its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.http.forms import FORMS, Call
from tests.http.scripts import cut
from tests.templates.traits import TRAITS, trait_folder

QUESTION = "What does the note say today?"
"""Stands in every question that is to make the model call a tool."""
ANSWER = "The note is read, and the kettle may sing."
NOTE = "note.txt"
COMMAND = f"cat {NOTE}"
THOUGHT = "I look into the folder before I say anything."

CALLS: Mapping[str, Call] = {
    "Bash": ("Bash", {"command": COMMAND, "description": "Read it"}),
    "bash": ("bash", {"command": COMMAND, "description": "Reads it"}),
    "exec": ("exec", {"command": COMMAND}),
    "exec_command": ("exec_command", {"cmd": COMMAND}),
}
"""By the name of the tool."""
_FORM = FORMS["glm"]
_ANSWER = "answer"
_HOOK = """
{%- if add_generation_prompt -%}
    {%- set next = namespace(script='answer') -%}
    {%- for message in messages -%}
        {%- if message.role == 'user' and QUESTION in message.content -%}
            {%- for tool in tools or [] if tool.function.name in NAMES -%}
                {%- set next.script = tool.function.name -%}
            {%- endfor -%}
        {%- elif message.role == 'tool' -%}
            {%- set next.script = 'answer' -%}
        {%- endif -%}
    {%- endfor -%}
    {{- '<|' ~ next.script ~ ('|>' if enable_thinking is false else '+|>') -}}
{%- endif -%}
"""


def write_agents_model(tmp: Path) -> Path:
    """The folder of the model, with the template of GLM and its kin."""
    trait = TRAITS[_FORM.trait]
    said = {_ANSWER: _FORM.answer(ANSWER), **{name: _FORM.calls(call) for name, call in CALLS.items()}}
    quiet = {f"<|{name}|>": text for name, text in said.items()}
    thinking = {f"<|{name}+|>": _FORM.thought(THOUGHT) + text for name, text in said.items()}
    hook = _HOOK.replace("QUESTION", repr(QUESTION)).replace("NAMES", repr([*CALLS]))
    scripts = quiet | thinking
    return trait_folder(
        _FORM.trait,
        tmp,
        cut(trait, scripts),
        chat_template=trait.template + hook,
        words=[*scripts],
        hidden=256,
        layers=1,
    )
