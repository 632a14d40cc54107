"""The models that servers are measured with: random ones, and scripted ones that think or call a tool.

A random model never ends its reply, thinks or calls anything. A scripted one does, in as many tokens as a
short reasoning or call of a real model has, and computes its prompt like any model of its family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scripts import tiny_models

type Model = Literal["random", "thinks", "calls"]

_WORDS = [f" w{number}" for number in range(100)]
_CALL = ["<tool_call>", '\n{"name": "run_command", "arguments": ']
_BEHIND = ["}\n", "</tool_call>"]

_SCRIPTS: dict[Model, list[str]] = {
    # Reasoning and a call, as the template itself would write them.
    "thinks": [
        "<think>",
        "\nI have to look at",
        *_WORDS,
        " first.\n",
        "</think>",
        "\n\n",
        *_CALL,
        '{"command": "cat notes"}',
        *_BEHIND,
    ],
    # A call as no JSON library would write it.
    "calls": [*_CALL, '{"timeout":  1000.0,   "command":  "caf\\u00e9 \\/', *_WORDS, '" }', *_BEHIND],
}


def build(model: Model, family: str, folder: Path) -> Path:
    """Write a model of `family`, of the same size whatever it says."""
    if model == "random":
        return tiny_models.build(family, folder)
    return tiny_models.build_chain(folder, {"\n": _SCRIPTS[model]}, family=family, hidden=256, layers=4)
