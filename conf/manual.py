"""Manual pages of the three programs, from the declarations of their options: `python -m conf.manual DIRECTORY`.

`make docs` writes them to conf/man, from which a wheel installs them into share/man/man1.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvpage.engine import cli as engine

from kvpage_server import __version__, cli
from kvpage_server.configuration.config import Config

STATUS = {
    "0": "Everything was done.",
    "1": "The command failed, or data is missing or damaged.",
    "2": "The arguments are wrong, or a server did not answer.",
    "130": "The program was interrupted.",
}
STORE = {
    "KVPAGE_URL": "URL of the store, if no option names one.",
    "KVPAGE_PASSWORD, REDISCLI_AUTH": "Password of the user. The first one that is set counts.",
}
CORE = {"KVPAGE_CORE": "python runs the page core in Python in place of the compiled one."}
DESCRIPTION = (
    "FILE has lines of a name and a value, as redis.conf. Parameters on the command line override it. Without a file, "
    "maxmemory is a quarter of the machine's memory, and dir is the user's directory for data. SIGTERM and SIGINT stop "
    "the server in order; SIGHUP renews its log file and certificates."
)
SERVER = {
    "--check-config": "check the configuration, and exit",
    "--help": "print the parameters, and exit",
    "--version": "print the version and the page core, and exit",
}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the name of each program, and its page."""
    yield "kvpage", page(cli.parser(), STORE | CORE, STATUS, ["kvpage-server", "kvpage-engine"])
    yield "kvpage-engine", page(engine.parser(), STORE, STATUS, ["kvpage", "kvpage-server"])
    yield "kvpage-server", "".join(page_of_server())


def page_of_server() -> Iterator[str]:
    forms = "[FILE] [--name value ...]", "--check-config [FILE] [--name value ...]"
    parameters = {f"--{name} value": str(field.metadata["doc"]) for name, field in Config.parameters().items()}
    yield head("kvpage-server", "keeps KV pages, speaks the Redis protocol")
    yield from section("SYNOPSIS", [line for form in forms for line in (".B kvpage\\-server", text(form), ".br")])
    yield from section("DESCRIPTION", [text(DESCRIPTION)])
    yield from section("OPTIONS", terms(SERVER))
    yield from section("PARAMETERS", terms(parameters))
    yield from section("ENVIRONMENT", terms(CORE))
    yield from section("EXIT STATUS", terms({"0": "The server was stopped.", "1": "It cannot start, or lost data."}))
    yield from see_also(["kvpage", "kvpage-engine", "redis-cli"])


def page(
    parser: argparse.ArgumentParser, environment: Mapping[str, str], status: Mapping[str, str], others: list[str]
) -> str:
    """Return the page of a program whose commands `parser` has."""
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in commands._choices_actions}
    parts = [head(parser.prog, str(parser.description)[:1].lower() + str(parser.description)[1:].rstrip("."))]
    parts += section("SYNOPSIS", [f".B {text(parser.prog)}", text("COMMAND [ARGUMENT ...]")])
    parts += section("OPTIONS", terms(dict(map(option, options(parser)))))
    parts += section("COMMANDS", [])
    for name, command in commands.choices.items():
        parts += [f".SS {name}\n", *(f"{line}\n" for line in (f".B {text(command.prog)}", text(arguments(command))))]
        parts += [".PP\n", text(f"{helps.get(name, '').rstrip('.')}.") + "\n"]
        parts += [f"{line}\n" for line in terms(dict(map(option, options(command))))]
    parts += section("ENVIRONMENT", terms(environment)) + section("EXIT STATUS", terms(status)) + see_also(others)
    return "".join(parts)


def head(program: str, purpose: str) -> str:
    title = f'.TH {program.upper()} 1 "" "kvpage {__version__}" "User Commands"\n'
    return title + "".join(section("NAME", [f"{text(program)} \\- {text(purpose)}"]))


def see_also(others: Iterable[str]) -> list[str]:
    return section("SEE ALSO", [", ".join(f"{text(other)}(1)" for other in others)])


def section(title: str, lines: Iterable[str]) -> list[str]:
    return [f".SH {title}\n", *(f"{line}\n" for line in lines)]


def terms(described: Mapping[str, str]) -> list[str]:
    return [line for term, what in described.items() for line in (".TP", f".B {text(term)}", text(what))]


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and the described arguments of a command. All have --help."""
    left_out = argparse._SubParsersAction, argparse._HelpAction
    known = (action for action in parser._actions if not isinstance(action, left_out))
    return [action for action in known if action.help and action.help != argparse.SUPPRESS]


def option(action: argparse.Action) -> tuple[str, str]:
    """Return an option or argument as it is typed, and its description."""
    typed = ", ".join(f"{word} {value(action)}".strip() for word in action.option_strings) or value(action)
    return typed, argparse.HelpFormatter("", width=1 << 20)._expand_help(action)


def value(action: argparse.Action) -> str:
    """Return the name of the value of an option, or of an argument; "" for an option without a value."""
    if action.nargs == 0:
        return ""
    names = [action.metavar] if isinstance(action.metavar, str) else [*(action.metavar or ())]
    choices = "|".join(map(str, action.choices or ()))
    return " ".join(names) or choices or action.dest.upper()


def arguments(parser: argparse.ArgumentParser) -> str:
    """Return the arguments of a command as they are typed: required ones, and a place for options."""
    known = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    needed = [option(action)[0] for action in known if action.option_strings and action.required]
    forms = {"?": "[{}]", "*": "[{} ...]", "+": "{} ..."}
    others = [forms.get(str(action.nargs), "{}").format(value(action)) for action in known if not action.option_strings]
    return " ".join(["[OPTION ...]", *needed, *others])


def text(words: str) -> str:
    """Return a text for roff, in which a backslash, a hyphen and the first character of a line have a meaning."""
    escaped = re.sub(r"\s+", " ", words).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    for name, content in pages():
        Path(sys.argv[1], f"{name}.1").write_text(content, encoding="utf-8")
