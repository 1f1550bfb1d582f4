"""`kvpage`: looks into a running store from a terminal. Knows it by its commands alone, as any other client does."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from getpass import getpass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from rich.markup import escape

from kvpage_server import __version__
from kvpage_server.address import DEFAULT_URL, URL, shown, urls_of, with_credentials
from kvpage_server.client.cluster.side_by_side import servers_of
from kvpage_server.client.wire.connection import plain_client
from kvpage_server.configuration.config import integer, memory
from kvpage_server.look.ls import ls
from kvpage_server.look.output import LookError
from kvpage_server.look.page import stat, verify
from kvpage_server.look.several import SideBySide
from kvpage_server.look.status import status
from kvpage_server.look.top import top
from kvpage_server.look.why import why
from kvpage_server.system.program import ends_quietly, missing_extra, say
from kvpage_server.system.terminal import out


def main(arguments: list[str] | None = None) -> None:
    """The process. Exits with 1 when what was asked for is not there or not intact, with 2 when it can't be asked."""
    with ends_quietly("kvpage"):
        args = _parser().parse_args(arguments)
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit code."""
    try:
        args.url = _url(args)
        urls = urls_of(args.url)
        if len(urls) == 1:
            return _ask(args)
        return _ask_as_one(args) if args.show in (ls, stat, verify, why) else _ask_all(args, urls)
    except LookError as failure:
        return say("kvpage", str(failure), 1)
    except redis.AuthenticationError:
        return say("kvpage", _not_let_in(args.url), 2)
    except redis.ConnectionError as error:
        return say("kvpage", f"cannot reach {shown(args.url)}: {error}", 2)
    except BrokenPipeError:
        raise
    except (redis.RedisError, ValueError, OSError) as error:
        return say("kvpage", str(error), 2)


def _ask(args: argparse.Namespace) -> int:
    with _connected(args.url) as store:
        return 0 if args.show(store, args) else 1


def _ask_as_one(args: argparse.Namespace) -> int:
    """Servers side by side: an agent's blocks are at all of them."""
    with ExitStack() as stack:
        stores = {server: stack.enter_context(_connected(server.url)) for server in servers_of(args.url)}
        return 0 if args.show(SideBySide(stores), args) else 1


def _connected(url: str) -> redis.Redis:
    return plain_client(url, protocol=3, socket_connect_timeout=5, max_connections=1)


def _ask_all(args: argparse.Namespace, urls: list[str]) -> int:
    """Of servers side by side, one after the other. A dump of each is in a directory of its own. The exit code is the
    worst one."""
    if args.show in (top, restore, bench):
        raise LookError("this is done at one server, --url names several")
    codes = []
    for url in urls:
        of_one = argparse.Namespace(**{**vars(args), "url": url})
        if args.show is dump:
            of_one.directory = args.directory / re.sub(r"\W+", "-", urlsplit(url).netloc.rpartition("@")[2])
        if not getattr(args, "json", False):
            out.print(f"[bold]{escape(shown(url))}[/]")
        try:
            codes.append(_ask(of_one))
        except LookError as failure:
            codes.append(say("kvpage", str(failure), 1))
        except redis.ConnectionError as error:
            codes.append(say("kvpage", f"cannot reach {shown(url)}: {error}", 2))
    return max(codes)


def _url(args: argparse.Namespace) -> str:
    """Where the store is, and who asks. Raises ValueError."""
    url = args.url or os.environ.get(URL) or DEFAULT_URL
    password = ""
    if args.askpass:
        if not sys.stdin.isatty():
            raise LookError("--askpass: there is no terminal to ask at; set KVPAGE_PASSWORD in the environment")
        try:
            password = getpass(f"Password for {args.user or 'the default user'} at {shown(url)}: ")
        except EOFError:
            raise LookError("no password was given") from None
    return with_credentials(url, args.user, password)


def _not_let_in(url: str) -> str:
    asks = urlsplit(url)
    if not asks.password:
        return (
            f"{shown(url)} wants a password: set KVPAGE_PASSWORD or REDISCLI_AUTH in the environment, or say --askpass"
        )
    return f"{shown(url)} does not take this password for user {unquote(asks.username or 'default')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvpage", description="Looks into a running page store.")
    parser.add_argument("--version", action="version", version=f"kvpage {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, show: Any, help: str, *, asks: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.")
        command.set_defaults(show=show, url="", user="", askpass=False)
        if asks:
            help = (
                f"the store's address, or several with commas; {URL} of the environment, or {DEFAULT_URL}, if not given"
            )
            command.add_argument("--url", default="", help=help)
            help = "who asks; the password is KVPAGE_PASSWORD's or REDISCLI_AUTH's of the environment"
            command.add_argument("--user", metavar="NAME", default="", help=help)
            command.add_argument("--askpass", action="store_true", help="ask for the password at the terminal")
        return command

    def shows(name: str, show: Any, help: str, *, asks: bool = True) -> argparse.ArgumentParser:
        command = add(name, show, help, asks=asks)
        command.add_argument("--json", action="store_true", help="for programs: an object a line")
        return command

    watch: dict[str, Any] = {"metavar": "SECONDS", "type": _seconds}
    status_ = shows("status", status, "how the store is doing")
    status_.add_argument("--watch", nargs="?", const=1.0, help="again and again, every second if not given", **watch)
    top_ = shows("top", top, "the store as it works: rates, and whose memory it is; until interrupted")
    top_.add_argument("--watch", default=1.0, help="between two looks, 1 if not given", **watch)
    shows("ls", ls, "the agents, what they share and other requests; or the blocks of a request").add_argument(
        "req", metavar="REQ", nargs="?"
    )
    shows("stat", stat, "what is known of a page, or of an agent").add_argument(
        "key", metavar="KEY|AGENT", help="a page is kv:REQ:LAYER:HEAD:PAGE:TYPE"
    )
    verify_ = shows("verify", verify, "hash a request's pages again; corrupt ones are removed")
    verify_.add_argument("req", metavar="REQ")
    verify_.add_argument("pages", metavar="PAGE", nargs="*", type=int)
    why_ = shows("why", why, "why a read of a request or of a page would miss, or a load of an agent")
    why_.add_argument("req", metavar="REQ|AGENT")
    why_.add_argument("name", metavar="LAYER HEAD PAGE TYPE", nargs="*", type=int)
    _add_snapshots(shows)
    _add_replay(add)
    bench_ = add("bench", bench, "measure how fast pages and blocks of all sizes travel; deletes what it has written")
    bench_.add_argument(
        "--against", metavar="URL", help="another server, to be measured beside it: any Redis or Valkey"
    )
    bench_.add_argument("--seconds", type=float, default=0.5, help="for each kind of call, 0.5 if not given")
    bench_.add_argument("--quick", action="store_true", help="a few sizes only")
    bench_.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it")
    bench_.add_argument("--plot", type=Path, metavar="FILE", help="draw them; the name's end says PNG, SVG or PDF")
    return parser


def _seconds(word: str) -> float:
    seconds = float(word)
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be 0.1 to 86400 seconds, got {word}")
    return seconds


def _add_replay(add: Callable[..., argparse.ArgumentParser]) -> None:
    from kvpage_server.replay.command import CAPACITIES, SIMULATIONS, USUAL

    def positive(word: str) -> int:
        return int(integer(1, 10**12).read([word]))

    def size(word: str) -> int:
        return int(memory(1).read([word]))

    replay_ = add("replay", replay, "what policies make of a recorded trace, in Mooncake's format", asks=False)
    replay_.add_argument("trace", metavar="TRACE", type=Path)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    replay_.add_argument("--policy", choices=SIMULATIONS, help=f"{', '.join(USUAL)} if not given", **several)
    usual = ", ".join(map(str, CAPACITIES))
    replay_.add_argument(
        "--capacity", type=positive, metavar="N", help=f"room, in blocks; {usual} if not given", **several
    )
    replay_.add_argument(
        "--nodes",
        type=positive,
        metavar="N",
        help="on how many nodes, for segments of 1 to 64 blocks; with one --policy and one --capacity",
    )
    replay_.add_argument(
        "--block-bytes", type=size, metavar="SIZE", default=64 << 20, help="of a block, such as 2mb; 64mb if not given"
    )
    replay_.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it")
    replay_.add_argument("--plot", type=Path, metavar="FILE", help="draw them; the name's end says PNG, SVG or PDF")


def _add_snapshots(shows: Callable[..., argparse.ArgumentParser]) -> None:
    def of_requests(command: Any) -> None:
        help = "the pages of this request alone; may be given several times; %%XX stands for a byte"
        command.add_argument("--request", metavar="REQ", action="append", default=[], help=help)

    dump_ = shows("dump", dump, "write what the store holds into safetensors files; goes on where it was interrupted")
    dump_.add_argument("directory", metavar="DIRECTORY", type=Path)
    which = dump_.add_mutually_exclusive_group()
    of_requests(which)
    which.add_argument("--match", metavar="GLOB", default="*", help="the pages and strings whose keys match")
    dump_.add_argument("--update", action="store_true", help="bring a finished dump up to date")
    restore_ = shows("restore", restore, "send a dump to a store, what is corrupt left out")
    restore_.add_argument("directory", metavar="DIRECTORY", type=Path)
    of_requests(restore_)
    how = restore_.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="keys that exist stay as they are: the default")
    how.add_argument("--replace", action="store_true", help="keys that exist are replaced")
    inspect_ = shows("inspect", inspect, "what lies in a dump, or in a file of one", asks=False)
    inspect_.add_argument("path", metavar="DIRECTORY|FILE", type=Path)
    of_requests(inspect_)
    inspect_.add_argument("--verify", action="store_true", help="hash all of it")


# -- replay --------------------------------------------------------------------------------------------------------


def replay(store: redis.Redis, args: argparse.Namespace) -> bool:
    """A trace through policies, without any store."""
    from kvpage_server.replay.command import CAPACITIES, ON_NODES, USUAL, run, run_nodes
    from kvpage_server.replay.report import Destination

    to = Destination(out, args.json, args.plot)
    try:
        if args.nodes:
            policy, *more = args.policy or ["allkeys-lru"]
            capacity, *others = args.capacity or [10_000]
            if more or others or policy not in ON_NODES:
                raise LookError(f"--nodes takes one --policy, of {', '.join(ON_NODES)}, and one --capacity")
            run_nodes(args.trace, policy=policy, capacity=capacity, nodes=args.nodes, to=to)
        else:
            run(
                args.trace,
                policies=args.policy or USUAL,
                capacities=args.capacity or CAPACITIES,
                block_bytes=args.block_bytes,
                to=to,
            )
    except ModuleNotFoundError as missing:
        raise LookError(f"--plot: {missing_extra(missing, 'bench')}") from None
    return True


# -- dump, restore, inspect ----------------------------------------------------------------------------------------


def dump(store: redis.Redis, args: argparse.Namespace) -> bool:
    """What the store holds, into files."""
    from kvpage_server.snapshot.command import run_dump  # so do they here

    return run_dump(store, args)


def restore(store: redis.Redis, args: argparse.Namespace) -> bool:
    """What was dumped, into the store."""
    from kvpage_server.snapshot.command import run_restore

    return run_restore(store, args)


def inspect(store: redis.Redis, args: argparse.Namespace) -> bool:
    """What was dumped."""
    from kvpage_server.snapshot.command import run_inspect

    return run_inspect(args)


# -- bench ---------------------------------------------------------------------------------------------------------


def bench(store: redis.Redis, args: argparse.Namespace) -> bool:
    """How fast pages travel."""
    from kvpage_server.bench.command import run  # numpy and the page client take a while to load

    urls = [args.url, *([args.against] if args.against else [])]
    try:
        run(urls, seconds=args.seconds, quick=args.quick, json=args.json, plot=args.plot, out=out)
    except ModuleNotFoundError as missing:
        raise LookError(f"--plot: {missing_extra(missing, 'bench')}") from None
    return True


if __name__ == "__main__":
    main()
