"""Calls of the tools that OpenAI defines and the client runs: their items instead of a function's arguments.

{"type": "shell_call", "action": {"commands": ["ls"]}}    shell, with {"commands": ["ls"]}
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from start_llm.core.chat import Json
from start_llm.protocols.fields import Fields, parse_embedded


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInCall:
    """A type of items that are calls.

    Attributes:
        tool: the model's name for the tool.
        prefix: of the ids of its items.
        member: the member that has the arguments.
        usual: members that clients expect there, with the values that say nothing.
        fixed: members that are no arguments.
        lists: members that are lists of texts for clients, each with what stands before a text that the model
            writes in place of the list.
    """

    tool: str
    prefix: str
    member: str
    usual: Mapping[str, Json] = field(default_factory=dict[str, Json])
    fixed: Mapping[str, Json] = field(default_factory=dict[str, Json])
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def written(self, arguments: str) -> dict[str, Json]:
        """Return the member for the text of the arguments. Text that is not an object leaves it empty."""
        parsed = parse_embedded(arguments)
        members = parsed if isinstance(parsed, dict) else {}
        listed: dict[str, Json] = {
            name: [*before, text]
            for name, before in self.lists.items()
            if isinstance(text := members.get(name), str)
        }
        return {**self.usual, **members, **listed, **self.fixed}

    def arguments(self, item: Fields) -> Mapping[str, Json]:
        """Return the arguments of a call that a client sends back, without what says nothing."""
        held = item.object(self.member)
        members = held.data if held else {}
        return {
            name: value
            for name, value in members.items()
            if name not in self.fixed and value is not None and not (value == {} and name in self.usual)
        }


BUILT_IN_CALLS: Mapping[str, BuiltInCall] = {
    "local_shell_call": BuiltInCall(
        tool="local_shell",
        prefix="lsh_",
        member="action",
        usual={"command": [], "env": {}},
        fixed={"type": "exec"},
        lists={"command": ("bash", "-lc")},  # a program and its arguments
    ),
    "shell_call": BuiltInCall(
        tool="shell", prefix="sh_", member="action", usual={"commands": []}, lists={"commands": ()}
    ),
    "apply_patch_call": BuiltInCall(
        tool="apply_patch", prefix="apc_", member="operation", usual={"type": "update_file", "path": ""}
    ),
}


def _text_of(item: Fields) -> str:
    value = item.value("output")
    return value if isinstance(value, str) else ""


def _shell_output(item: Fields) -> str:
    """Return what each command wrote, and how it ended."""
    if isinstance(item.value("output"), str):
        return _text_of(item)
    return "".join(map(_one_output, item.objects("output")))


def _one_output(output: Fields) -> str:
    outcome = output.object("outcome")
    texts = [output.text("stdout"), output.text("stderr"), _ending(outcome) if outcome else None]
    return "".join(f"{text.removesuffix(chr(10))}\n" for text in texts if text)


def _ending(outcome: Fields) -> str:
    code = outcome.value("exit_code")
    return "[It took too long]" if outcome.value("type") == "timeout" else f"[Exit code {code}]"


def _patch_output(item: Fields) -> str:
    failed = "[The call failed]\n" if item.value("status") == "failed" else ""
    return failed + (_text_of(item) or ("" if failed else "Done."))


BUILT_IN_OUTPUTS: Mapping[str, Callable[[Fields], str]] = {
    "local_shell_call_output": _text_of,
    "shell_call_output": _shell_output,
    "apply_patch_call_output": _patch_output,
}
"""For each type of items that are results, the function that returns their text."""
