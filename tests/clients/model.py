"""A model as agents have it: a question makes it call a tool, and a result makes it answer.

Which of its scripts it follows stands in the last token of the prompt, and the template writes that: clients
choose no scripts. The call is of the tool that the client has, whatever its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from start_llm.core.chat import Json
from tests.http.forms import FORMS, Call
from tests.http.scripts import cut
from tests.templates.traits import TRAITS, trait_folder

QUESTION = "What does the note say today?"
"""Stands in every question that is to make the model call a tool."""
ANSWER = "The note is read, and the kettle may sing."
NOTE = "note.txt"
COMMAND = f"cat {NOTE}"
ERASE = "Please throw the note away."
PIPE = "Please measure the note."
MEASURED = "measured.txt"
ESCALATE = "Please measure the note without the sandbox."
_MEASURE = f"cat {NOTE} | wc -c | tee {MEASURED}"
DEEDS: Mapping[str, str] = {ERASE: f"rm -rf {NOTE}", PIPE: _MEASURE, ESCALATE: _MEASURE}
"""Commands that change something, by the question that they follow."""
_ESCALATING = (ERASE, ESCALATE)
_ESCALATED = {"sandbox_permissions": "require_escalated", "justification": "May I write down how long it is?"}
"""What Codex tells a model to say if a command deletes, or needs more than the sandbox."""
SUMMARY = "So far a note was read, more than once, and nothing else is left to do."
REQUESTS = (
    "You are a context summarization",  # opencode, pi and OpenClaw, in a system text of their own
    "CONTEXT CHECKPOINT COMPACTION",  # Codex
    "Your task is to create a detailed summary",  # Claude Code
)
"""Words in which clients ask for a summary."""
REASONING = "I look into the folder before I say anything."

CALLS: Mapping[str, Call] = {
    "Bash": ("Bash", {"command": COMMAND, "description": "Read it"}),
    "bash": ("bash", {"command": COMMAND, "description": "Reads it"}),
    "exec": ("exec", {"command": COMMAND}),
    "exec_command": ("exec_command", {"cmd": COMMAND}),
    "run_shell_command": (
        "run_shell_command",
        {"command": COMMAND, "is_background": False, "description": "Reads it"},
    ),
    "run_commands": ("run_commands", {"commands": [COMMAND]}),
}
"""By the name of the tool."""
DELEGATE = "Let two others look at the note at once."
SEARCH = "Which tool edits notebooks?"
PATCH = "Please add a second note by a patch."
PATCHED, PATCHED_TEXT = "second.txt", "Sing with the kettle."
WRITE, EDIT = "Please write a second note.", "Please mend the second note."
_DELEGATED = {"prompt": f"{QUESTION} (by another)", "subagent_type": "claude", "run_in_background": False}
ERRANDS: Mapping[str, tuple[Call, ...]] = {
    DELEGATE: (
        ("Agent", {"description": "Read one", **_DELEGATED}),
        ("Agent", {"description": "Read two", **_DELEGATED}),
    ),
    SEARCH: (("ToolSearch", {"query": "select:NotebookEdit", "max_results": 5}),),
    WRITE: (("Write", {"file_path": PATCHED, "content": f"{PATCHED_TEXT}\n"}),),
    EDIT: (("Edit", {"file_path": PATCHED, "old_string": "Sing", "new_string": "Hum"}),),
    PATCH: (
        (
            "apply_patch",
            {"input": f"*** Begin Patch\n*** Add File: {PATCHED}\n+{PATCHED_TEXT}\n*** End Patch\n"},
        ),
    ),
}
"""Calls by the question that they follow."""
_FORM = FORMS["glm"]
_ANSWER, _SUMMARY = "answer", "summary"
_ERRANDS = {question: f"errand{number}" for number, question in enumerate(ERRANDS)}
_HOOK = """
{%- if add_generation_prompt -%}
    {%- set next = namespace(script='answer', system='', user='') -%}
    {%- for message in messages -%}
        {%- if message.role == 'system' -%}
            {%- set next.system = next.system ~ message.content -%}
        {%- elif message.role == 'user' -%}
            {%- set next.user = message.content -%}
        {%- endif -%}
        {%- if message.role == 'user' -%}
            {%- for question, suffix in SUFFIXES if question in message.content -%}
                {%- for tool in tools or [] if tool.function.name in NAMES -%}
                    {%- set next.script = tool.function.name ~ suffix -%}
                {%- endfor -%}
            {%- endfor -%}
            {%- for question, script in ERRANDS if question in message.content -%}
                {%- set next.script = script -%}
            {%- endfor -%}
        {%- elif message.role == 'tool' -%}
            {%- set next.script = 'answer' -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for words in REQUESTS if words in next.system ~ next.user -%}
        {%- set next.script = 'summary' -%}
    {%- endfor -%}
    {{- '<|' ~ next.script ~ ('|>' if enable_thinking is false else '+|>') -}}
{%- endif -%}
"""


def write_agents_model(tmp: Path, commands: Mapping[str, str] = {QUESTION: COMMAND}) -> Path:
    """The folder of the model, with the template of GLM and its kin.

    Args:
        commands: what it runs, by the question.
    """
    trait = TRAITS[_FORM.trait]
    suffixes = {question: f"-{number}" for number, question in enumerate(commands)}
    texts = {
        _ANSWER: _FORM.answer(ANSWER),
        _SUMMARY: _FORM.answer(f"<summary>\n{SUMMARY}\n</summary>"),
        **{
            name + suffixes[question]: _FORM.calls(_running(call, command, question in _ESCALATING))
            for name, call in CALLS.items()
            for question, command in commands.items()
        },
        **{script: _FORM.calls(*ERRANDS[question]) for question, script in _ERRANDS.items()},
    }
    quiet = {f"<|{name}|>": text for name, text in texts.items()}
    thinking = {f"<|{name}+|>": _FORM.reasoning(REASONING) + text for name, text in texts.items()}
    hook = _HOOK
    values = {"NAMES": [*CALLS], "REQUESTS": [*REQUESTS]}
    pairs = {"ERRANDS": _ERRANDS, "SUFFIXES": suffixes}
    for name, value in (values | {name: [*map(list, of.items())] for name, of in pairs.items()}).items():
        hook = hook.replace(name, repr(value))
    scripts = quiet | thinking
    return trait_folder(
        _FORM.trait,
        tmp,
        cut(trait, scripts),
        chat_template=trait.template + hook,
        words=[*scripts],
        hidden=448 * len(commands),
        layers=1,
    )


def _running(call: Call, command: str, escalates: bool) -> Call:
    name, arguments = call
    commands: list[Json] = [command]
    changed = {
        key: command if value == COMMAND else commands if value == [COMMAND] else value
        for key, value in arguments.items()
    }
    return name, changed | (_ESCALATED if escalates and name == "exec_command" else {})
