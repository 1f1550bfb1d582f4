"""`kvpage-engine agents`: the agents of a serving engine."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from rich.table import Table

from kvpage_server.system.program import not_empty
from kvpage_server.system.terminal import out, readable, table_of
from kvpage_server.system.text import as_size

from . import Failure

TOKEN = "KVPAGE_TOKEN"  # environment variable
URL = "http://127.0.0.1:8000"  # the default
ANSWER_SECONDS = 60.0
ACTIONS = (  # name, help, arguments, method, path
    ("list", "all agents", (), "GET", "/v1/agents"),
    ("show", "one agent", ("name",), "GET", "/v1/agents/{name}"),
    ("save", "write an agent to the tiers below memory", ("name",), "POST", "/v1/agents/{name}/save"),
    ("fork", "copy the context of NAME to the agent NEW", ("name", "new"), "POST", "/v1/agents/{name}/fork"),
    ("delete", "delete an agent from all tiers", ("name",), "DELETE", "/v1/agents/{name}"),
)


def add_to(commands: Any) -> None:
    parser = commands.add_parser("agents", help="list, show, save, fork or delete the agents of a serving engine")
    _add_options(parser)
    parser.set_defaults(url=URL, model=None, token=os.environ.get(TOKEN))
    actions = parser.add_subparsers(title="actions", required=True)
    for name, help, arguments, method, path in ACTIONS:
        action = actions.add_parser(name, help=help)
        _add_options(action)
        for argument in arguments:
            action.add_argument(argument, metavar=argument.upper())
        if name == "fork":
            action.add_argument("--replace", action="store_true", help="replace the agent NEW if it exists")
        action.set_defaults(run=run, method=method, path=path)


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that may be before and after the action. They have no defaults here: those of the action would
    replace the values before it.
    """
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("--url", type=not_empty, help=f"URL of the engine (default: {URL})")
    add(
        "--model",
        metavar="NAME",
        type=not_empty,
        help="model, if the engine has several (default: the first, list: all)",
    )
    add("--token", type=not_empty, help=f"access token (default: {TOKEN} of the environment)")


def run(args: argparse.Namespace) -> int:
    """Send the request of an action to the engine, print the agents in the reply, and return 0. Raises Failure."""
    named = quote(args.name, safe="") if "name" in args else ""
    body = {"to": args.new, "replace": args.replace} if "new" in args else None
    query = f"?{urlencode({'model': args.model})}" if args.model else ""
    answer = _ask(args, args.path.format(name=named) + query, body)
    try:
        shown = readable(f"{answer['id']} is deleted") if args.method == "DELETE" else _table(answer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Failure(f"{args.url} is no engine: it answered {json.dumps(answer):.100}") from error
    out.print(shown, soft_wrap=False)
    return 0


def _ask(args: argparse.Namespace, path: str, body: Any) -> Any:
    """Send a request, and return the decoded reply. Raises Failure with the engine's error message."""
    headers = {"Authorization": f"Bearer {args.token}"} if args.token else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(args.url + path, data, headers, method=args.method), timeout=ANSWER_SECONDS) as reply:
            return json.load(reply)
    except HTTPError as error:
        raise Failure(_message(error)) from error
    except (URLError, ValueError, OSError) as error:
        raise Failure(f"cannot ask {args.url}: {getattr(error, 'reason', error)}") from error


def _message(error: HTTPError) -> str:
    try:
        found = json.load(error)["error"]
        message = str(found["message"])
        # The engine's message names the field of the body.
        return message.replace("replace: true", "--replace") if found["code"] == "agent_exists" else message
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answered {error.code}, which is not what an engine says"


def _table(answer: dict[str, Any]) -> Table:
    """Return a table of the agents in a reply. Raises LookupError, TypeError, ValueError or AttributeError for a reply
    that is not an engine's.
    """
    table = table_of("agent", "model", "tiers", "saved", "tokens", "bytes", numbers_from=4)
    for agent in answer.get("data", [answer]):
        saved = "yes" if agent["saved"] else "no"
        names, tiers = map(readable, (agent["id"], agent["model"])), ", ".join(agent["tiers"])
        table.add_row(*names, tiers, saved, f"{agent['tokens']:,}", as_size(agent["bytes"]))
    return table
