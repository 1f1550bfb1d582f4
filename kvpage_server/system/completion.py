"""Completion of a program's commands and options in bash, zsh and fish."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from shlex import quote

Words = Mapping[str, str]  # a command or an option, and its description

SHELLS = ("bash", "zsh", "fish")


def completion_of(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return a script for `shell`, one of SHELLS, that completes the program of `parser`."""
    first, options = dict(_options(parser)), dict[str, Words]()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            first |= {choice.dest: _short(choice.help) for choice in action._choices_actions}
            options |= {name: _options(command) for name, command in action.choices.items()}
    return script(shell, parser.prog, first, options)


def script(shell: str, program: str, first: Words, options: Mapping[str, Words]) -> str:
    """Return a script for `shell`, one of SHELLS. `options` complete words after a command, and `first` all others."""
    function = "_" + program.replace("-", "_")
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](program, function, first, options)


def _options(parser: argparse.ArgumentParser) -> Words:
    words = ((word, action.help) for action in parser._actions for word in action.option_strings)
    return {word: _short(help) for word, help in words if word.startswith("--")}


def _short(help: str | None) -> str:
    return re.split(r" \(|[;:,%]", help or "")[0]


def _bash(program: str, function: str, first: Words, options: Mapping[str, Words]) -> str:
    cases = "".join(f"        {name}) words={quote(' '.join(words))} ;;\n" for name, words in options.items())
    return f"""{function}() {{
    local words={quote(" ".join(first))}
    if [ "$COMP_CWORD" -gt 1 ]; then
        case ${{COMP_WORDS[1]}} in
{cases}        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F {function} {program}
"""


def _zsh(program: str, function: str, first: Words, options: Mapping[str, Words]) -> str:
    def listed(words: Words) -> str:
        return " ".join(quote(f"{word}:{help}") for word, help in words.items())

    cases = "".join(f"        {name}) known=({listed(words)}) ;;\n" for name, words in options.items())
    return f"""#compdef {program}
{function}() {{
    local -a known=({listed(first)})
    if (( CURRENT > 2 )); then
        case $words[2] in
{cases}        esac
    fi
    _describe word known || _files
}}
compdef {function} {program}
"""


def _fish(program: str, _: str, first: Words, options: Mapping[str, Words]) -> str:
    def line(condition: str, word: str, help: str) -> str:
        name = f"--long-option {word[2:]}" if word.startswith("--") else f"--arguments {word} --no-files"
        return f"complete --command {program} {condition}{name} --description {quote(help)}\n"

    begin = "--condition __fish_use_subcommand " if options else ""
    lines = [line(begin, word, help) for word, help in first.items()]
    for name, words in options.items():
        condition = f"--condition '__fish_seen_subcommand_from {name}' "
        lines += [line(condition, word, help) for word, help in words.items()]
    return "".join(lines)
