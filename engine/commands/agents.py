"""`kvpage-engine agents`: what an engine that serves remembers of whom."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from engine.commands import Failure

TOKEN = "KVPAGE_TOKEN"  # in the environment
ANSWER_SECONDS = 60.0


def add_to(commands: Any) -> None:
    """Its arguments."""
    parser = commands.add_parser("agents", help="list, show, save, fork or delete what an engine remembers")
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the engine (default: %(default)s)")
    add("--token", default=os.environ.get(TOKEN), help=f"who asks (default: {TOKEN} of the environment)")
    actions = parser.add_subparsers(title="actions", required=True)
    for name, run, help, names in (
        ("list", list_agents, "all of them", ()),
        ("show", show, "one", ("NAME",)),
        ("save", save, "return when nothing of it is in memory alone", ("NAME",)),
        ("fork", fork, "let NEW go on from where NAME is", ("NAME", "NEW")),
        ("delete", delete, "forget it", ("NAME",)),
    ):
        action = actions.add_parser(name, help=help)
        for argument in names:
            action.add_argument(argument.lower(), metavar=argument)
        action.set_defaults(run=run)


def list_agents(args: argparse.Namespace) -> int:
    """A table."""
    _print(_asked(args, "GET", "/v1/agents")["data"])
    return 0


def show(args: argparse.Namespace) -> int:
    """A line of it."""
    _print([_asked(args, "GET", _path(args))])
    return 0


def save(args: argparse.Namespace) -> int:
    """Likewise."""
    _print([_asked(args, "POST", f"{_path(args)}/save")])
    return 0


def fork(args: argparse.Namespace) -> int:
    """The new one."""
    _print([_asked(args, "POST", f"{_path(args)}/fork", {"to": args.new})])
    return 0


def delete(args: argparse.Namespace) -> int:
    """Say so."""
    print(f"{_asked(args, 'DELETE', _path(args))['id']} is forgotten")
    return 0


def _path(args: argparse.Namespace) -> str:
    return f"/v1/agents/{quote(args.name, safe='')}"


def _asked(args: argparse.Namespace, method: str, path: str, body: Any = None) -> Any:
    """What the engine answers. Raises Failure with what it says instead."""
    headers = {"Authorization": f"Bearer {args.token}"} if args.token else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(args.url + path, data, headers, method=method), timeout=ANSWER_SECONDS) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise Failure(_said(error)) from error
    except (URLError, ValueError, OSError) as error:
        raise Failure(f"cannot ask {args.url}: {getattr(error, 'reason', error)}") from error


def _said(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code}, which is not what an engine says"


def _print(agents: list[dict[str, Any]]) -> None:
    table = Table("agent", "tiers", "saved", box=None, header_style="bold", pad_edge=False, padding=(0, 2))
    for column in ("tokens", "bytes"):
        table.add_column(column, justify="right")
    for agent in agents:
        saved = "yes" if agent["saved"] else "no"
        table.add_row(agent["id"], ", ".join(agent["tiers"]), saved, f"{agent['tokens']:,}", decimal(agent["bytes"]))
    Console(width=None if Console().is_terminal else 120).print(table)
