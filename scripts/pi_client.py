"""Imitate the coding agent pi as a server sees it: its tools and its messages.

This follows the chat completions of pi 0.87. It sends no session id, and the whole conversation on every
turn. Reasoning comes back in the field in which it arrived. Arguments are serialized again, and an answer
that consists of calls alone has null as its content.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from chat_client import Message, Reply, Tool
from probing import prose

RESULT_CHARACTERS = 160


def _tool(name: str, description: str, required: Sequence[str], **parameters: Any) -> Tool:
    schema = {"type": "object", "required": list(required), "properties": parameters}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _number(description: str) -> dict[str, Any]:
    return {"type": "number", "description": description}


_EDIT = {
    "type": "object",
    "required": ["oldText", "newText"],
    "properties": {
        "oldText": _text("Text of the file, as it stands there once."),
        "newText": _text("What takes its place."),
    },
}

TOOLS = [
    _tool(
        "read",
        "Read a file. Long files are cut; go on with offset and limit.",
        ["path"],
        path=_text("Path of the file, relative or absolute."),
        offset=_number("First line to read, from 1 on."),
        limit=_number("Lines to read at most."),
    ),
    _tool(
        "bash",
        "Run a command in the working directory. Gives its output, and cuts a long one.",
        ["command"],
        command=_text("The command."),
        timeout=_number("Seconds that it may take."),
    ),
    _tool(
        "edit",
        "Replace texts in one file. Each text to replace has to stand there exactly once.",
        ["path", "edits"],
        path=_text("Path of the file, relative or absolute."),
        edits={"type": "array", "description": "One or more replacements.", "items": _EDIT},
    ),
    _tool(
        "write",
        "Write a file, and the folders above it. What it held before is gone.",
        ["path", "content"],
        path=_text("Path of the file, relative or absolute."),
        content=_text("The whole content."),
    ),
]

_SYSTEM = """\
You are a coding agent in session {name}. You read files, run commands, edit code and write new files.

Tools: read, bash, edit, write.
- Look with bash (ls, grep, find) before you change anything.
- Edit what exists, write what is new, and say in short sentences what you did.

# Project context

## AGENTS.md

{context}

<cwd>
/work
</cwd>"""


def system(name: str, characters: int) -> Message:
    """Return the system prompt. It begins with the run's name, so no earlier run has computed it."""
    context = prose(f"The project's rules, {name}", characters)
    return {"role": "developer", "content": _SYSTEM.format(name=name, context=context)}


def user(text: str) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def results(reply: Reply, name: str) -> list[Message]:
    """Return a short result for each call of a reply."""
    return [
        {
            "role": "tool",
            "content": prose(f"Result {number} of {name}", RESULT_CHARACTERS),
            "tool_call_id": call["id"],
        }
        for number, call in enumerate(reply.calls, start=1)
    ]


def body(messages: Sequence[Message], options: argparse.Namespace) -> Mapping[str, Any]:
    """Return a request body without the fields for streaming. The server chooses the sampling."""
    return {
        "messages": messages,
        "tools": TOOLS,
        "store": False,
        "max_completion_tokens": options.max_tokens,
        "reasoning_effort": options.effort,
    }
