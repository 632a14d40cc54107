"""Tables of the types of tools and of items: who runs a tool, and what its calls look like.

This server runs no tool. A tool that the *client* runs has an input schema, published by the vendor or sent
with the request, and is offered to the model. A tool that the *vendor* runs on its own servers cannot be
offered; its outputs in a conversation are text for the model, since no template has a form for them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import regex

from start_llm.core.chat import Json

type Runner = Literal["client", "vendor"]

_ANTHROPIC = "platform.claude.com/docs/en/agents-and-tools/tool-use"
_OPENAI = "platform.openai.com/docs/guides"
_VERSION = regex.compile(r"(?P<family>.+)_(?P<date>\d{8})")
_TEXT: Json = {"type": "string"}
_TEXTS: Json = {"type": "array", "items": {"type": "string"}}
_NUMBER: Json = {"type": "integer"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolType:
    """A type of tools that a vendor defines.

    Attributes:
        runs: who runs its calls.
        source: the documentation of its schema.
        name: the name under which the model calls it; empty if requests state one.
        description: what the model reads about it.
        parameters: the published schema of its input; empty for tools that cannot be offered.
        call_item: the type of its calls in the Responses protocol.
    """

    runs: Runner
    source: str
    name: str = ""
    description: str = ""
    parameters: Mapping[str, Json] = field(default_factory=dict[str, Json])
    call_item: str = ""

    @property
    def schema(self) -> dict[str, Json]:
        """The function's schema for the model, without its name."""
        return {"description": self.description, "parameters": dict(self.parameters)}


def _object(properties: Mapping[str, Json], *required: str) -> dict[str, Json]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [*required],
        "additionalProperties": False,
    }


def _about(schema: Json, description: str) -> Json:
    return {**schema, "description": description} if isinstance(schema, dict) else schema


def _words(*values: str) -> Json:
    return {"type": "string", "enum": [*values]}


def _numbers(count: int) -> Json:
    return {"type": "array", "items": _NUMBER, "minItems": count, "maxItems": count}


# ----------------------------------------------------------------------------------- Anthropic's client tools

_BASH = ToolType(
    runs="client",
    source=f"{_ANTHROPIC}/bash-tool",
    name="bash",
    description="Runs a command in a bash session. Its folder and variables stay for the next command.",
    parameters=_object(
        {
            "command": _about(_TEXT, "The command to run."),
            "restart": _about({"type": "boolean"}, "True starts a new session in place of this one."),
        },
        "command",
    ),
)


def _text_editor(name: str, *, inserted: str, can_undo: bool) -> ToolType:
    """Return a version of the text editor.

    Args:
        inserted: the argument with the text that `insert` adds.
    """
    commands = ("view", "create", "str_replace", "insert", *(("undo_edit",) if can_undo else ()))
    properties: dict[str, Json] = {
        "command": _about(_words(*commands), "What to do."),
        "path": _about(_TEXT, "Absolute path of a file, or of a folder to view."),
        "view_range": _about(
            _numbers(2), "view: the first and the last line to show, counted from 1; -1 is the end."
        ),
        "file_text": _about(_TEXT, "create: the whole content of the new file."),
        "old_str": _about(_TEXT, "str_replace: the text to replace, exactly as it is in the file."),
        "new_str": _about(_TEXT, "str_replace: the text to put in its place."),
        "insert_line": _about(_NUMBER, "insert: the line after which to insert; 0 is the start of the file."),
    }
    properties[inserted] = _about(
        _TEXT,
        "insert: the text to insert."
        if inserted not in properties
        else "str_replace: the text to put in its place. insert: the text to insert.",
    )
    return ToolType(
        runs="client",
        source=f"{_ANTHROPIC}/text-editor-tool",
        name=name,
        description="Views, creates and edits text files.",
        parameters=_object(properties, "command", "path"),
    )


_MEMORY = ToolType(
    runs="client",
    source=f"{_ANTHROPIC}/memory-tool",
    name="memory",
    description="Keeps notes in files under /memories, which last from one conversation to the next.",
    parameters=_object(
        {
            "command": _about(
                _words("view", "create", "str_replace", "insert", "delete", "rename"), "What to do."
            ),
            "path": _about(_TEXT, "The file or folder, for all commands but rename."),
            "view_range": _about(_numbers(2), "view: the first and the last line to show."),
            "file_text": _about(_TEXT, "create: the whole content of the file."),
            "old_str": _about(_TEXT, "str_replace: the text to replace."),
            "new_str": _about(_TEXT, "str_replace: the text to put in its place."),
            "insert_line": _about(_NUMBER, "insert: the line after which to insert."),
            "insert_text": _about(_TEXT, "insert: the text to insert."),
            "old_path": _about(_TEXT, "rename: the present path."),
            "new_path": _about(_TEXT, "rename: the new path."),
        },
        "command",
    ),
)

_FIRST_ACTIONS = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
    "double_click", "screenshot", "cursor_position",
)  # fmt: skip
_LATER_ACTIONS = (
    *_FIRST_ACTIONS, "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait", "triple_click",
)  # fmt: skip
_FIRST_INPUTS: Mapping[str, Json] = {
    "coordinate": _about(_numbers(2), "The point on the screen in pixels: x, y."),
    "text": _about(_TEXT, "type: the text. key, hold_key: the key or keys, such as ctrl+s."),
}
_LATER_INPUTS: Mapping[str, Json] = {
    **_FIRST_INPUTS,
    "start_coordinate": _about(_numbers(2), "left_click_drag: where the drag begins."),
    "scroll_direction": _about(_words("up", "down", "left", "right"), "scroll: the direction."),
    "scroll_amount": _about(_NUMBER, "scroll: the number of clicks of the wheel."),
    "duration": _about({"type": "number"}, "hold_key, wait: seconds."),
}
_REGION: Json = _about(_numbers(4), "zoom: the part of the screen to show: x0, y0, x1, y1.")


def _computer(actions: tuple[str, ...], inputs: Mapping[str, Json]) -> ToolType:
    return ToolType(
        runs="client",
        source=f"{_ANTHROPIC}/computer-use-tool",
        name="computer",
        description="Controls mouse and keyboard of a computer, and takes screenshots of its screen.",
        parameters=_object({"action": _about(_words(*actions), "What to do."), **inputs}, "action"),
    )


_VENDORS = ToolType(runs="vendor", source=f"{_ANTHROPIC}/tool-reference")
_VERSIONS: Mapping[str, Mapping[str, ToolType]] = {
    "bash": {"20241022": _BASH},
    "text_editor": {
        "20241022": _text_editor("str_replace_editor", inserted="new_str", can_undo=True),
        "20250429": _text_editor("str_replace_based_edit_tool", inserted="new_str", can_undo=False),
        # The documentation said new_str; Anthropic's models write insert_text (anthropic-sdk-python #1155).
        "20250728": _text_editor("str_replace_based_edit_tool", inserted="insert_text", can_undo=False),
    },
    "memory": {"20250818": _MEMORY},
    "computer": {
        "20241022": _computer(_FIRST_ACTIONS, _FIRST_INPUTS),
        "20250124": _computer(_LATER_ACTIONS, _LATER_INPUTS),
        "20251124": _computer((*_LATER_ACTIONS, "zoom"), {**_LATER_INPUTS, "region": _REGION}),
    },
}
"""Anthropic's client tools: for each family the versions in which name or schema changed."""


def anthropic_tool_type(kind: str) -> ToolType:
    """Return the type of a tool of the Messages protocol that has a type, such as `bash_20250124`.

    A version that is newer than the table has the schema of the newest one in it. All other types are run by
    Anthropic.
    """
    match = _VERSION.fullmatch(kind)
    versions = _VERSIONS.get(match["family"], {}) if match else {}
    if not match or not versions:
        return _VENDORS
    return versions[max((date for date in versions if date <= match["date"]), default=min(versions))]


# --------------------------------------------------------------------------------------------- OpenAI's tools

_LOCAL_SHELL = ToolType(
    runs="client",
    source=f"{_OPENAI}/tools-local-shell",
    name="local_shell",
    description="Runs a command on the user's computer.",
    parameters=_object(
        {
            "command": _about(_TEXTS, "The program and its arguments."),
            "timeout_ms": _about(_NUMBER, "The longest time that it may take."),
            "working_directory": _about(_TEXT, "The folder to run it in."),
        },
        "command",
    ),
    call_item="local_shell_call",
)
_SHELL = ToolType(
    runs="client",
    source=f"{_OPENAI}/tools-shell",
    name="shell",
    description="Runs shell commands on the user's computer.",
    parameters=_object(
        {
            "commands": _about(_TEXTS, "The commands, in their order."),
            "timeout_ms": _about(_NUMBER, "The longest time that they may take."),
            "max_output_length": _about(_NUMBER, "The most characters of output to return."),
        },
        "commands",
    ),
    call_item="shell_call",
)
_APPLY_PATCH = ToolType(
    runs="client",
    source=f"{_OPENAI}/tools-apply-patch",
    name="apply_patch",
    description="Creates, changes or deletes a file.",
    parameters=_object(
        {
            "type": _about(_words("create_file", "update_file", "delete_file"), "What to do."),
            "path": _about(_TEXT, "The path of the file."),
            "diff": _about(
                _TEXT,
                "create_file, update_file: the lines of the change, each with +, - or a blank in front, "
                "below a line @@ with their place.",
            ),
        },
        "type",
        "path",
    ),
    call_item="apply_patch_call",
)
_OPENAIS = ToolType(runs="vendor", source=f"{_OPENAI}/tools")
_RESPONSES: Mapping[str, ToolType] = {tool.name: tool for tool in (_LOCAL_SHELL, _SHELL, _APPLY_PATCH)}


def responses_tool_type(kind: str, environment: Json = None) -> ToolType:
    """Return the type of a tool of the Responses protocol that OpenAI defines.

    Args:
        environment: of a shell: the client runs it, unless it is a container.
    """
    place = environment.get("type", "local") if isinstance(environment, dict) else "local"
    return _OPENAIS if place != "local" else _RESPONSES.get(kind, _OPENAIS)


VENDOR_ITEMS: Mapping[str, str] = {
    "web_search_call": f"{_OPENAI}/tools-web-search",
    "file_search_call": f"{_OPENAI}/tools-file-search",
    "code_interpreter_call": f"{_OPENAI}/tools-code-interpreter",
    "image_generation_call": f"{_OPENAI}/tools-image-generation",
    "mcp_call": f"{_OPENAI}/tools-connectors-mcp",
    "mcp_list_tools": f"{_OPENAI}/tools-connectors-mcp",
    "mcp_approval_request": f"{_OPENAI}/tools-connectors-mcp",
    "mcp_approval_response": f"{_OPENAI}/tools-connectors-mcp",
    "tool_search_call": f"{_OPENAI}/tools-tool-search",
    "tool_search_output": f"{_OPENAI}/tools-tool-search",
}
"""Items of the Responses protocol that are text for the model, each with the documentation of its schema."""
VENDOR_QUESTIONS = frozenset({"mcp_approval_response"})
"""Those of them that stand on the user's side."""
_VENDOR_CALLS = frozenset({"server_tool_use", "mcp_tool_use"})


def is_vendor_block(kind: str) -> bool:
    """Return whether a block of the Messages protocol is a call that Anthropic ran, or its result."""
    return kind in _VENDOR_CALLS or (kind.endswith("_tool_result") and kind != "tool_result")


def unavailable_text(name: str, vendor: str) -> str:
    """Return the text about a tool that a vendor runs."""
    return f"The tool {name} is not available here: it runs on {vendor}'s servers. It found and did nothing."


# ------------------------------------------------------------------------------- what a vendor ran, as text

_OPAQUE = frozenset(
    {
        "type", "id", "call_id", "tool_use_id", "item_id", "cache_control", "caller", "container_id",
        "encrypted_content", "encrypted_index", "encrypted_stdout", "file_id",
    }
)  # fmt: skip
"""Members that say nothing to a model, at any depth."""
_OPAQUE_OF_ITEMS: Mapping[str, frozenset[str]] = {"image_generation_call": frozenset({"result"})}
"""Further such members of an item."""


def vendor_text(kind: str, item: Mapping[str, Json]) -> str:
    """Return lines with the type and all that the item says."""
    hidden = _OPAQUE_OF_ITEMS.get(kind, frozenset())
    try:
        members = _members({name: value for name, value in item.items() if name not in hidden})
        lines = [f"[{kind}]", *_lines(members)]
    except RecursionError:
        lines = [f"[{kind}: it is nested too deeply]"]
    return "".join(f"{line}\n" for line in lines)


def _readable(value: Json) -> Json:
    """Return a value without opaque and empty members."""
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return _members(value) if isinstance(value, dict) else value


def _members(item: Mapping[str, Json]) -> dict[str, Json]:
    members = {name: _readable(value) for name, value in item.items() if name not in _OPAQUE}
    return {name: value for name, value in members.items() if value not in (None, [], {})}


def _lines(members: Mapping[str, Json]) -> Iterator[str]:
    """Yield a line for each member; texts as they are, the members of an object below it."""
    for name, value in members.items():
        if isinstance(value, dict):
            yield from _lines(value)
        elif isinstance(value, str):
            yield f"{name}: {value}"
        elif isinstance(value, list):
            yield f"{name}:"
            yield from map(_entry, value)
        else:
            yield f"{name}: {_written(value)}"


def _entry(value: Json) -> str:
    if isinstance(value, dict) and value.keys() == {"text"}:
        return str(value["text"])
    return value if isinstance(value, str) else _written(value)


def _written(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
