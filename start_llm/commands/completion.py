"""`start_llm completion`: scripts that make bash, zsh and fish complete commands, options and values."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from start_llm.commands.command_tree import Command, Operand, Option

_NAME = "start_llm"


def _key(path: Sequence[str]) -> str:
    return "/".join(path)


def _valued(command: Command) -> list[tuple[str, Operand]]:
    return [(name, option.value) for option in command.options if option.value for name in option.names]


# ------------------------------------------------------------------------------------------------------ bash

_BASH = """\
_start_llm() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" command="" place=0 option="" rest="" word words="" kind=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ -n "$option" ]]; then
            [[ "$word" == "=" ]] || option=""
            continue
        fi
        case "$command $word" in
{moves}
            *" -"*) ;;
            *) place=$((place + 1)) ;;
        esac
    done
    [[ "$current" == "=" ]] && current=""
    if [[ -n "$option" ]]; then
        case "$command $option" in
{values}
        esac
    else
        case "$command:$place" in
{places}
        esac
        if [[ "$current" == -* && -z "$rest" ]]; then
            kind=""
            case "$command" in
{options}
            esac
        fi
    fi
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(
        case "$kind" in
            file) compgen -f -- "$current" ;;
            folder) compgen -d -- "$current" ;;
            *) compgen -W "$words" -- "$current" ;;
        esac
    )
    if [[ -n "$kind" ]]; then compopt -o filenames 2> /dev/null; fi
}}
complete -F _start_llm start_llm
"""


def bash(root: Command) -> str:
    """Return the script for bash."""
    commands = list(root.all())
    return _BASH.format(
        moves="\n".join(line for command in commands for line in _bash_moves(command)),
        values="\n".join(line for command in commands for line in _bash_values(command)),
        places="\n".join(line for command in commands for line in _bash_places(command)),
        options="\n".join(
            f'                "{_key(command.path)}") words="{" ".join(_option_names(command))}" ;;'
            for command in commands
        ),
    )


def _bash_moves(command: Command) -> Iterator[str]:
    for below in command.commands:
        yield f'            "{_key(command.path)} {below.name}") command="{_key(below.path)}" place=0 ;;'
    for name, _ in _valued(command):
        yield f'            "{_key(command.path)} {name}") option="{name}" ;;'


def _bash_values(command: Command) -> Iterator[str]:
    for name, value in _valued(command):
        yield f'            "{_key(command.path)} {name}") {_bash_offer(value)} ;;'


def _bash_places(command: Command) -> Iterator[str]:
    key = _key(command.path)
    if command.commands:
        yield f'            "{key}:0") words="{" ".join(below.name for below in command.commands)}" ;;'
    for place, operand in enumerate(command.operands):
        pattern = f'"{key}:"*' if operand.is_rest else f'"{key}:{place}"'
        rest = " rest=yes" if operand.is_rest else ""
        yield f"            {pattern}) {_bash_offer(operand)}{rest} ;;"


def _bash_offer(operand: Operand) -> str:
    if operand.choices:
        return f'words="{" ".join(operand.choices)}"'
    return "" if operand.kind == "nothing" else f"kind={operand.kind}"


def _option_names(command: Command) -> list[str]:
    return [name for option in command.options for name in option.names if name.startswith("--")]


# ------------------------------------------------------------------------------------------------------- zsh


def zsh(root: Command) -> str:
    """Return the script for zsh."""
    functions = "\n".join(_zsh_function(command) for command in root.all())
    return (
        f"#compdef {_NAME}\n\n{functions}\n"
        f'if [[ "$funcstack[1]" == "_{_NAME}" ]]; then _{_NAME} "$@"; else compdef _{_NAME} {_NAME}; fi\n'
    )


def _zsh_function(command: Command) -> str:
    name = "_".join(["", _NAME, *command.path])
    specs = [spec for option in command.options for spec in _zsh_option(option)]
    if command.commands:
        return _zsh_group(name, command, specs)
    specs += [
        f"*:::{operand.name}:_files" if operand.is_rest else f"{place}:{operand.name}:{_zsh_offer(operand)}"
        for place, operand in enumerate(command.operands, 1)
    ]
    return f"{name}() {{\n    _arguments {' '.join(map(shlex.quote, specs))}\n}}\n"


def _zsh_group(name: str, command: Command, specs: Sequence[str]) -> str:
    quoted = " ".join(map(shlex.quote, [*specs, "1:command:->command", "*::argument:->argument"]))
    described = " ".join(
        shlex.quote(f"{below.name}:{below.about.replace(':', ' ')}") for below in command.commands
    )
    cases = "\n".join(
        f"            {below.name}) {'_'.join(['', _NAME, *below.path])} ;;" for below in command.commands
    )
    return (
        f"{name}() {{\n"
        "    local context state line\n"
        "    typeset -A opt_args\n"
        f"    _arguments -C {quoted}\n"
        "    case $state in\n"
        f"        command) local -a commands=({described}); _describe command commands ;;\n"
        f"        argument) case $words[1] in\n{cases}\n        esac ;;\n"
        "    esac\n"
        "}\n"
    )


def _zsh_option(option: Option) -> Iterator[str]:
    about = "".join(f"\\{char}" if char in "[]:\\" else char for char in option.about)
    for name in option.names:
        others = " ".join(other for other in option.names if other != name)
        excluded = f"({others})" if others else ""
        value = f":{option.value.name}:{_zsh_offer(option.value)}" if option.value else ""
        yield f"{excluded}{name}[{about}]{value}"


def _zsh_offer(operand: Operand) -> str:
    if operand.choices:
        return f"({' '.join(operand.choices)})"
    return {"file": "_files", "folder": "_files -/", "nothing": " "}[operand.kind]


# ------------------------------------------------------------------------------------------------------ fish

_FISH = """\
function __start_llm_at --argument-names wanted place
    set -l command ""
    set -l count 0
    set -l option ""
    for word in (commandline -opc)[2..]
        if test -n "$option"
            set option ""
            continue
        end
        switch "$command $word"
{moves}
            case "* -*"
            case "*"
                set count (math $count + 1)
        end
    end
    test "$command" = "$wanted"; or return 1
    switch "$place"
        case ""
            return 0
        case "+*"
            test $count -ge (string sub --start 2 -- $place)
        case "*"
            test $count -eq $place
    end
end

complete -c start_llm -f
"""


def fish(root: Command) -> str:
    """Return the script for fish."""
    commands = list(root.all())
    moves = "\n".join(line for command in commands for line in _fish_moves(command))
    lines = (line for command in commands for line in _fish_lines(command))
    return _FISH.format(moves=moves) + "\n".join(lines) + "\n"


def _fish_moves(command: Command) -> Iterator[str]:
    key = _key(command.path)
    for below in command.commands:
        yield f'            case "{key} {below.name}"'
        yield f'                set command "{_key(below.path)}"; set count 0'
    for name, _ in _valued(command):
        yield f'            case "{key} {name}"'
        yield f'                set option "{name}"'


def _fish_lines(command: Command) -> Iterator[str]:
    key = _key(command.path)
    for below in command.commands:
        yield _fish_line(f"{_fish_at(key, '0')} -a {below.name} -d", below.about)
    for option in command.options:
        names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
        value = f" -x {_fish_offer(option.value)}" if option.value else ""
        yield _fish_line(f"{_fish_at(key)} {' '.join(names)}{value} -d", option.about)
    for place, operand in enumerate(command.operands):
        where = _fish_at(key, f"+{place}" if operand.is_rest else str(place))
        if offer := _fish_offer(operand):
            yield f"complete -c {_NAME} {where} {offer}"


def _fish_at(key: str, place: str = "") -> str:
    return f"-n \"__start_llm_at '{key}' {place}\"" if place else f"-n \"__start_llm_at '{key}'\""


def _fish_line(words: str, about: str) -> str:
    quoted = about.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c {_NAME} {words} '{quoted}'"


def _fish_offer(operand: Operand) -> str:
    if operand.choices:
        return f"-a '{' '.join(operand.choices)}'"
    return {"file": "-F", "folder": "-a '(__fish_complete_directories)'", "nothing": ""}[operand.kind]


SHELLS: Mapping[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
