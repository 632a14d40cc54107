"""The table of the tools that vendors define."""

from typing import Any

import jsonschema
import pytest

from start_llm.protocols.tool_types import anthropic_tool_type


def commands(kind: str) -> list[str]:
    properties: Any = anthropic_tool_type(kind).parameters["properties"]
    return (properties.get("command") or properties["action"])["enum"]


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [
        ("bash_20241022", "bash", {"command": "ls"}),
        ("bash_20250124", "bash", {"command": "ls", "restart": True}),
        ("text_editor_20241022", "str_replace_editor", {"command": "undo_edit", "path": "/a"}),
        (
            "text_editor_20250124",
            "str_replace_editor",
            {"command": "insert", "path": "/a", "insert_line": 0, "new_str": "x"},
        ),
        (
            "text_editor_20250429",
            "str_replace_based_edit_tool",
            {"command": "view", "path": "/a", "view_range": [1, -1]},
        ),
        (
            "text_editor_20250728",
            "str_replace_based_edit_tool",
            {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
        ),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/a", "new_path": "/b"}),
        ("computer_20241022", "computer", {"action": "left_click", "coordinate": [1, 2]}),
        (
            "computer_20250124",
            "computer",
            {"action": "scroll", "coordinate": [1, 2], "scroll_direction": "up", "scroll_amount": 3},
        ),
        ("computer_20251124", "computer", {"action": "zoom", "region": [0, 0, 5, 5]}),
    ],
)
def test_a_client_tool_has_its_name_and_takes_its_calls(kind, name, call):
    tool = anthropic_tool_type(kind)
    assert (tool.runs, tool.name) == ("client", name)
    assert tool.source
    jsonschema.validate(call, tool.parameters)


def test_versions_differ_in_what_they_can_do():
    assert "undo_edit" in commands("text_editor_20250124")
    assert "undo_edit" not in commands("text_editor_20250429")
    assert "scroll" not in commands("computer_20241022")
    assert "zoom" in commands("computer_20251124")
    assert "zoom" not in commands("computer_20250124")


def test_a_version_that_is_not_in_the_table_is_the_newest_before_it():
    assert anthropic_tool_type("bash_20990101") == anthropic_tool_type("bash_20250124")
    assert anthropic_tool_type("memory_20200101") == anthropic_tool_type("memory_20250818")


@pytest.mark.parametrize("kind", ["web_search_20250305", "code_execution_20250825", "mcp_toolset", "bash"])
def test_what_anthropic_runs_is_the_vendors(kind):
    tool = anthropic_tool_type(kind)
    assert (tool.runs, tool.parameters) == ("vendor", {})
