"""`kvpage`: the command line for a running store. It uses the store as an ordinary client."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from getpass import getpass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from rich.markup import escape

from kvpage_server import __version__
from kvpage_server.address import DEFAULT_URL, URL, shown, tls_hint, urls_of, with_credentials
from kvpage_server.client.cluster.side_by_side import servers_of
from kvpage_server.client.cluster.topology import Address
from kvpage_server.client.raw_commands import plain_client
from kvpage_server.configuration.config import Config
from kvpage_server.configuration.kinds import Kind, integer, memory
from kvpage_server.look.cluster_stats import status_of_several, top_of_several
from kvpage_server.look.ls import ROWS, ls
from kvpage_server.look.multi_store import (
    NO_ANSWER,
    MultiStore,
    SlotsMoved,
    Unavailable,
    cluster_as_one,
    is_cluster,
    servers_as_one,
)
from kvpage_server.look.output import WRONG_ARGUMENTS, LookError, UsageError, connected
from kvpage_server.look.pages_on_strings import PagesOnStrings
from kvpage_server.look.savings import BLOCK_TOKENS, WATTS, savings
from kvpage_server.look.status import status
from kvpage_server.look.top import top
from kvpage_server.look.why import stat, verify, why
from kvpage_server.system.completion import SHELLS, completion_of, script
from kvpage_server.system.program import (
    ProgramParser,
    ends_quietly,
    interrupts_deferred,
    missing_extra,
    not_empty,
    reason_of,
    say,
)
from kvpage_server.system.terminal import out, print_json
from kvpage_server.system.text import name_of_text, name_shown

_ONE_SERVER_ONLY = {  # commands that take one server, with the advice for several
    "restore": "a dump of several has a directory for each, restore each into its server",
    "bench": "measure one after the other",
    "connectors": "name the one that the engine uses",
    "savings": "engines publish to each of them, so name one",
}
_NO_CLUSTER = {  # commands that take no cluster, with the advice for a cluster
    "dump": "a Valkey or Redis Cluster has BGSAVE",
    "restore": "restore into one kvpage-server",
    "bench": "--url takes one kvpage-server, and --against one Valkey or Redis",
    "connectors": "--url takes one kvpage-server",
    "doctor": "--url takes kvpage-servers, and valkey-cli --cluster check checks a cluster",
    "savings": "--url takes one kvpage-server; kvpage top shows the reused tokens of each engine",
}

# Exceptions that end a command with a message.
_FAILURES = LookError, redis.RedisError, ValueError, OSError

_GATEWAY_HINT = "; look into the cluster by its own URL, as valkey-cluster://HOST:PORT"


def main(arguments: list[str] | None = None) -> None:
    """Run a command, and exit with status 2 if a server does not answer or the arguments are wrong, with 1 for any
    other failure or if data is missing or corrupt, otherwise with 0.
    """
    with ends_quietly("kvpage"):
        with interrupts_deferred():
            command = parser()  # imports modules
        args = command.parse_args(arguments)
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    """Run the command on the server, servers or cluster of the URL. Return the exit code. Raises BrokenPipeError."""
    try:
        if args.show is doctor:
            return int(args.show(args))
        args.url = _url(args)
        urls = urls_of(args.url)
        if is_cluster(args.url):
            return _run_on_cluster(args)
        if len(urls) == 1:
            return _run_on_server(args)
        return _run_on_all_as_one(args) if args.show in (ls, stat, top, verify, why) else _run_on_each(args, urls)
    except WRONG_ARGUMENTS as error:
        return say("kvpage", str(error), 2)
    except BrokenPipeError:
        raise
    except _FAILURES as failure:
        return _report_failure(args, args.url or "", failure)


def _run_on_server(args: argparse.Namespace) -> int:
    """Run the command on one server. Return the exit code."""
    with connected(args.url) as store:
        url = shown(args.url)
        args.home, args.unreachable = lambda key: url, list
        return _run_command(store, args)


def _run_on_cluster(args: argparse.Namespace) -> int:
    """Run the command on a cluster, again if its slots move meanwhile. Return the exit code. Raises UsageError."""
    if instead := _NO_CLUSTER.get(args.show.__name__):
        raise UsageError(f"kvpage {args.show.__name__} takes no cluster: {instead}")
    while True:
        with suppress(SlotsMoved), cluster_as_one(args) as masters:
            if args.show is status:
                return 0 if status_of_several(masters, args) else 2
            return _run_command(PagesOnStrings(masters), args, masters)


def _run_on_all_as_one(args: argparse.Namespace) -> int:
    """Run the command on several servers as one store, because an agent's blocks are on all of them. Return the exit
    code.
    """
    with servers_as_one(args) as several:
        return _run_command(several, args, several)


def _run_command(
    store: redis.Redis | MultiStore | PagesOnStrings, args: argparse.Namespace, several: MultiStore | None = None
) -> int:
    """Run the command on `store`, and return the exit code.

    `several` has the connections of a store that consists of several servers. The code is 2 if one did not answer.
    """
    try:
        as_one = args.show is top and several
        code = 0 if (top_of_several(as_one, store, args) if as_one else args.show(store, args)) else 1
    except Unavailable:  # `MultiStore` has reported the server
        return 2
    except (LookError, redis.ResponseError) as failure:
        code = _report_failure(args, args.url, failure)
    return 2 if several and several.unreachable else code


def _run_on_each(args: argparse.Namespace, urls: list[str]) -> int:
    """Run the command for each server, one after another, and repeat it with --watch. Return the highest exit code.

    Raises UsageError for a command that takes one server.
    """
    if instead := _ONE_SERVER_ONLY.get(args.show.__name__):
        raise UsageError(f"kvpage {args.show.__name__} takes one server, and --url names several: {instead}")
    every = getattr(args, "watch", None)
    while True:
        if every is not None and out.is_terminal and not args.json:
            out.clear()
        args.nowhere = {*getattr(args, "request", ())}  # the names for `dump` of which no server has had a page so far
        code = max(_exit_codes(args, urls))
        for name in sorted(args.nowhere):
            code = max(code, say("kvpage", f"no server that answered has a page of request {name_shown(name)}", 1))
        if every is None:
            return code
        time.sleep(every)


def _exit_codes(args: argparse.Namespace, urls: list[str]) -> Iterator[int]:
    """Run the command for each server, and yield its exit code. `dump` writes a directory for each server.

    Raises UsageError, PageError, BrokenPipeError.
    """
    for url in urls:
        of_one = argparse.Namespace(**{**vars(args), "url": url, "watch": None})
        if args.show is dump:
            of_one.directory = args.directory / re.sub(r"\W+", "-", urlsplit(url).netloc.rpartition("@")[2])
        if not getattr(args, "json", False):
            out.print(f"[bold]{escape(shown(url))}[/]")
        try:
            yield _run_on_server(of_one)
        except (*WRONG_ARGUMENTS, BrokenPipeError):
            raise
        except _FAILURES as failure:
            yield _report_failure(args, url, failure)


def _report_failure(args: argparse.Namespace, url: str, failure: Exception) -> int:
    """Print the failure of a command. With --json, also print an object for a server that does not answer.

    Return the exit code.
    """
    silent, why = False, str(failure)
    if isinstance(failure, redis.AuthenticationError):
        why = _access_error(url)
    elif isinstance(failure, NO_ANSWER):
        hint = tls_hint(url, why)
        silent, why = True, f"cannot reach {shown(url)}: " + (f"{why.rstrip('.')}; {hint}" if hint else why)
    elif isinstance(failure, OSError):
        why = reason_of(failure)
    elif isinstance(failure, redis.InvalidResponse):
        why = f"{shown(url)}: {why}: is it a kvpage-server of this version?"
    elif "DB index is out of range" in why:
        return say("kvpage", f"{shown(url)}: the server has no such database; allowed: 0 of a kvpage-server", 2)
    elif why.startswith("a gateway does not support"):
        why += _GATEWAY_HINT
    why = why.removeprefix("NOPERM ")  # redis-py leaves the code of an error in a pipeline
    if getattr(args, "json", False) is True and silent:  # for `bench` and `replay`, `json` is a file
        print_json({"url": shown(url), "error": why})
    return say("kvpage", why, 2 if silent else 1)


def _url(args: argparse.Namespace) -> str:
    """Return the store's URL from the options and the environment, with user and password.

    With --askpass, asks for the password in the terminal. Raises UsageError for an invalid URL, LookError without a
    terminal or password.
    """
    url = args.url or os.environ.get(URL) or DEFAULT_URL
    password = ""
    if args.askpass:
        if not sys.stdin.isatty():
            raise LookError("--askpass: there is no terminal to ask at; set KVPAGE_PASSWORD in the environment")
        try:
            password = getpass(f"Password for {args.user or 'the default user'} at {shown(url)}: ")
        except EOFError:
            raise LookError("no password was given") from None
    try:
        url = with_credentials(url, args.user or "", password)
        _check_url(url)
        if against := getattr(args, "against", None):
            _check_url(against)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return url


def _check_url(url: str) -> None:
    """Raise ValueError if a URL of a server, several servers or a cluster is invalid."""
    if is_cluster(url):
        Address(url)
        return
    urls = urls_of(url)
    for server in [each.url for each in servers_of(url)] if len(urls) > 1 else urls:
        plain_client(server)


def _access_error(url: str) -> str:
    """Return the error text for a missing or wrong password."""
    asks = urlsplit(url)
    if not asks.password:
        return (
            f"{shown(url)} needs a password: set KVPAGE_PASSWORD or REDISCLI_AUTH in the environment, or use --askpass"
        )
    return f"{shown(url)} does not take this password for user {unquote(asks.username or 'default')}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    program = ProgramParser(prog="kvpage", description="Inspect a running page store.")
    program.add_argument("--version", action="version", version=f"kvpage {__version__}")
    commands = program.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, show: Any, help: str, *, asks: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=f"{help[:1].upper()}{help[1:]}.")
        # a command that reads only files gets a fixed URL, so that an invalid one in the environment is not an error
        command.set_defaults(show=show, url=None if asks else DEFAULT_URL, user=None, askpass=False)
        if asks:
            more = "" if name in _ONE_SERVER_ONLY else ", of several with commas"
            more += "" if name in _NO_CLUSTER else ", or of a cluster"
            help = f"URL of the store{more} (default: {URL} or {DEFAULT_URL})"
            command.add_argument("--url", type=not_empty, help=help)
            help = "user to log in as, with the password in KVPAGE_PASSWORD or REDISCLI_AUTH in the environment"
            command.add_argument("--user", metavar="NAME", type=not_empty, help=help)
            command.add_argument("--askpass", action="store_true", help="ask for the password in the terminal")
        return command

    def shows(name: str, show: Any, help: str, *, asks: bool = True) -> argparse.ArgumentParser:
        command = add(name, show, help, asks=asks)
        command.add_argument("--json", action="store_true", help="print JSON, one object a line")
        return command

    watch: dict[str, Any] = {"metavar": "SECONDS", "type": _seconds}
    status_ = shows("status", status, "show memory, contents, hit ratio, disk and clients of the store")
    status_.add_argument("--watch", nargs="?", const=1.0, help="repeat every SECONDS (default: 1)", **watch)
    top_ = shows("top", top, "show rates, engines and memory by agent, until interrupted")
    top_.add_argument("--watch", default=1.0, help="seconds between updates (default: 1)", **watch)
    ls_ = shows("ls", ls, "list agents, shared prefixes and other requests, or the blocks of one request")
    ls_.add_argument("req", metavar="REQ", nargs="?", type=_name)
    help = f"rows of each table, 0 for all (default: {ROWS}); --json prints all"
    ls_.add_argument("--limit", metavar="N", type=_rows, default=ROWS, help=help)
    shows("stat", stat, "show the metadata of a page, or the blocks of an agent").add_argument(
        "key", metavar="KEY|AGENT", type=_name, help="the key of a page is kv:REQ:LAYER:HEAD:PAGE:TYPE"
    )
    verify_ = shows(
        "verify", verify, "check the checksums of a request's or an agent's pages, and remove corrupt pages"
    )
    verify_.add_argument("req", metavar="REQ|AGENT", type=_name)
    verify_.add_argument("pages", metavar="PAGE", nargs="*", type=_number(integer(0, 2**32 - 1)), default=[])
    why_ = shows("why", why, "explain why a read of a request, page or string, or a load of an agent, would miss")
    why_.add_argument("req", metavar="REQ|AGENT|KEY", type=_name)
    why_.add_argument(
        "name", metavar="LAYER HEAD PAGE TYPE", nargs="*", type=_number(integer(0, 2**32 - 1)), default=[]
    )
    doctor_ = shows("doctor", doctor, "check machine, configuration and server, and say what to do")
    help = "arguments of kvpage-server: a configuration file, and after -- also options, such as -- FILE --dir DIR"
    doctor_.add_argument("server", metavar="ARGUMENT", nargs="*", help=help)
    _add_snapshots(shows)
    _add_replay(add)
    _add_savings(shows)
    completion_ = add("completion", completion, "print the completion of kvpage and kvpage-server", asks=False)
    completion_.add_argument("shell", choices=SHELLS)
    connectors_ = add("connectors", connectors, "check that an engine saves a context here, and restores it unchanged")
    connectors_.add_argument("action", choices=["verify"])
    connectors_.add_argument("engine", choices=["vllm", "lmcache", "sglang", "mlx-lm"])
    connectors_.add_argument("--model", metavar="FOLDER", help="model that vLLM or mlx-lm runs")
    help = "use the tier below vLLM's offloading to RAM, for GPUs; otherwise the connector, for the CPU"
    connectors_.add_argument("--tier", action="store_true", help=help)
    help = 'options of vllm.LLM in JSON, such as \'{"dtype": "bfloat16"}\''
    connectors_.add_argument("--options", metavar="JSON", type=_object, default={}, help=help)
    bench_ = add(
        "bench", bench, "measure the speed of writes and reads of pages and blocks; deletes its data afterwards"
    )
    bench_.add_argument("--against", metavar="URL", type=not_empty, help="server to compare with: any Redis or Valkey")
    seconds = partial(_seconds, least=0.001)
    bench_.add_argument("--seconds", type=seconds, default=0.5, help="seconds for each kind of call (default: 0.5)")
    bench_.add_argument("--quick", action="store_true", help="measure a few sizes only")
    _add_figures(bench_)
    return program


def _add_figures(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", type=_output, metavar="FILE", help="write the figures to FILE")
    command.add_argument("--plot", type=_plot, metavar="FILE", help="draw the figures: FILE.png, FILE.svg or FILE.pdf")


def _seconds(word: str, least: float = 0.1) -> float:
    """Parse an argument in seconds, from `least` to a day. Raises ArgumentTypeError."""
    seconds = 0.0
    with suppress(ValueError):
        seconds = float(word) if word.isascii() else 0.0
    if not least <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"must be {least} to 86400 seconds, got {word}")
    return seconds


def _name(word: str) -> bytes:
    """Parse a name, which is written as `kvpage ls` prints it. Raises ArgumentTypeError, also for an empty one."""
    try:
        return name_of_text(not_empty(word))
    except ValueError as error:  # also UnicodeEncodeError
        raise argparse.ArgumentTypeError(str(error)) from None


def _object(word: str) -> dict[str, Any]:
    """Parse an object in JSON. Raises ArgumentTypeError."""
    found = None
    with suppress(ValueError):
        found = json.loads(word)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be an object in JSON, got {word}")
    return found


def _number(kind: Kind) -> Callable[[str], int]:
    """Return a parser of numbers of a kind. It raises ArgumentTypeError, which names the allowed values."""

    def parse(word: str) -> int:
        try:
            return int(kind.read([word]))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _rows(word: str) -> int:
    """Parse a number of rows. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise argparse.ArgumentTypeError(f"must be a number of rows, 0 for all, got {word}")
    return int(word)


def _add_replay(add: Callable[..., argparse.ArgumentParser]) -> None:
    from kvpage_server.replay import CAPACITIES, SIMULATIONS, USUAL

    positive, size = _number(integer(1, 10**12)), _number(memory(1))
    replay_ = add("replay", replay, "compare eviction policies on a trace in Mooncake's format", asks=False)
    replay_.add_argument("trace", metavar="TRACE", type=Path)
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}
    help = f"policies to compare (default: {' '.join(USUAL)})"
    replay_.add_argument("--policy", choices=SIMULATIONS, help=help, **several)
    help = f"capacities in blocks (default: {' '.join(map(str, CAPACITIES))})"
    replay_.add_argument("--capacity", type=positive, metavar="N", help=help, **several)
    help = "spread the blocks over N nodes, in segments of 1 to 64 blocks; takes one --policy and one --capacity"
    replay_.add_argument("--nodes", type=positive, metavar="N", help=help)
    help = "size of a block, such as 2mb (default: 64mb)"
    replay_.add_argument("--block-bytes", type=size, metavar="SIZE", help=help)
    _add_figures(replay_)


def _add_savings(shows: Callable[..., argparse.ArgumentParser]) -> None:
    positive = _number(integer(1, 10**12))
    help = "show the prefill, energy and memory that reuse has saved, of running engines or of a trace"
    savings_ = shows("savings", savings, help)
    help = "trace in Mooncake's format, for a store without a limit; without it, the engines of the store"
    savings_.add_argument("trace", metavar="TRACE", nargs="?", type=Path, help=help)
    help = f"power of a machine that computes (default: {WATTS:g})"
    savings_.add_argument("--watts", metavar="W", type=_number(integer(1, 10**6)), default=WATTS, help=help)
    help = "of a trace: tokens a second that an engine computes"
    savings_.add_argument("--rate", metavar="N", type=positive, help=help)
    help = "of a trace: bytes of the KV cache a token"
    savings_.add_argument("--token-bytes", metavar="N", type=positive, help=help)
    help = f"of a trace: tokens of a block (default: {BLOCK_TOKENS})"
    savings_.add_argument("--block-tokens", metavar="N", type=positive, help=help)


def _path(text: str) -> Path:
    """Return a path. Raises ArgumentTypeError for an empty one, such as that of an unset variable, and for "-"."""
    if text in ("", "-"):
        raise argparse.ArgumentTypeError("a path has at least one character" if not text else "- is not a path")
    return Path(text)


def _output(text: str) -> Path:
    """Return the path of a file to write at the end. Raises ArgumentTypeError if its directory does not exist."""
    path = _path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _plot(text: str) -> Path:
    """Return the path of a chart. Raises ArgumentTypeError for a format that is not offered."""
    path = _output(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end with .png, .svg or .pdf, got {text}")
    return path


def _add_snapshots(shows: Callable[..., argparse.ArgumentParser]) -> None:
    def of_requests(command: Any) -> None:
        help = "only the pages of this request; can be given several times"
        command.add_argument("--request", metavar="REQ", type=_name, action="append", default=[], help=help)

    dump_ = shows("dump", dump, "write the store's content to safetensors files; continues an interrupted dump")
    dump_.add_argument("directory", metavar="DIRECTORY", type=_path)
    which = dump_.add_mutually_exclusive_group()
    of_requests(which)
    help = "only pages and strings whose keys match"
    which.add_argument("--match", metavar="GLOB", type=not_empty, default="*", help=help)
    dump_.add_argument("--update", action="store_true", help="bring a finished dump up to date")
    dump_.add_argument(
        "--code", action="store_true", help="write pages in the lossless code, 0.7 of the bytes in bfloat16"
    )
    restore_ = shows("restore", restore, "load a dump into a store, without its corrupt entries")
    restore_.add_argument("directory", metavar="DIRECTORY", type=_path)
    of_requests(restore_)
    how = restore_.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="leave existing keys as they are (default)")
    how.add_argument("--replace", action="store_true", help="replace existing keys")
    inspect_ = shows("inspect", inspect, "show what a dump, or one file of it, contains", asks=False)
    inspect_.add_argument("path", metavar="DIRECTORY|FILE", type=_path)
    of_requests(inspect_)
    inspect_.add_argument("--verify", action="store_true", help="check every hash")


# -- replay --------------------------------------------------------------------------------------------------------


def doctor(args: argparse.Namespace) -> int:
    """Check machine, configuration and servers. Return the exit code.

    The checks open their own connections, because a server may be absent. Raises UsageError for a cluster.
    """
    with interrupts_deferred():
        from kvpage_server.doctor import run_checks  # imported here, since the server's modules are slow to load

    if args.url or args.user or args.askpass or os.environ.get(URL):
        args.url = _url(args)
        if is_cluster(args.url):
            raise UsageError(f"kvpage doctor takes no cluster: {_NO_CLUSTER['doctor']}")
    return run_checks(args)


def completion(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print a shell's completion of `kvpage` and `kvpage-server`, without the store. Return True."""
    parameters = {f"--{name}": str(field.metadata["doc"]) for name, field in Config.parameters().items()}
    server = {**parameters, "--check-config": "check the configuration", "--help": "", "--version": ""}
    print(completion_of(args.shell, parser()) + script(args.shell, "kvpage-server", server, {}), end="")
    return True


def replay(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Simulate eviction policies on the trace `args.trace`, without the store. Return True.

    Raises UsageError for arguments that do not fit --nodes, LookError if a library for --plot is missing.
    """
    from kvpage_server.replay import CAPACITIES, ON_NODES, USUAL, Destination, run, run_nodes

    to = Destination(out, args.json, args.plot)
    try:
        if args.nodes:
            policy, *more = args.policy or ["allkeys-lru"]
            capacity, *others = args.capacity or [10_000]
            if more or others or policy not in ON_NODES:
                raise UsageError(f"--nodes takes one --policy, of {', '.join(ON_NODES)}, and one --capacity")
            if args.block_bytes:
                raise UsageError("--nodes counts blocks, and takes no --block-bytes")
            run_nodes(args.trace, policy=policy, capacity=capacity, nodes=args.nodes, to=to)
        else:
            run(
                args.trace,
                policies=args.policy or USUAL,
                capacities=args.capacity or CAPACITIES,
                block_bytes=args.block_bytes or 64 << 20,
                to=to,
            )
    except ModuleNotFoundError as missing:
        raise LookError(f"--plot: {missing_extra(missing, 'bench')}") from None
    return True


# -- dump, restore, inspect ----------------------------------------------------------------------------------------


def dump(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Write the store's pages and strings to files in `args.directory`. Return whether all were written."""
    with interrupts_deferred():
        from kvpage_server.snapshot.command import run_dump  # imported here, since it is slow to load

    return run_dump(store, args)


def restore(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Load the dump in `args.directory` into the store. Return whether all of it was loaded."""
    with interrupts_deferred():
        from kvpage_server.snapshot.command import run_restore

    return run_restore(store, args)


def inspect(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print the contents of a dump, without the store. Return whether it is intact."""
    with interrupts_deferred():
        from kvpage_server.snapshot.command import run_inspect

    return run_inspect(args)


# -- connectors ----------------------------------------------------------------------------------------------------


def connectors(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Let an engine save and restore a context in this environment. Print the comparison, and return whether the
    context was restored unchanged.

    Raises RedisError if the store does not answer, LookError if the engine is not installed, UsageError for an option
    of another engine.
    """
    if args.model and args.engine not in ("vllm", "mlx-lm"):
        raise UsageError(f"verify {args.engine} runs no model: --model is for vllm and mlx-lm")
    if (args.tier or args.options) and args.engine != "vllm":
        raise UsageError(f"--tier and --options are for vllm, not for {args.engine}")
    with suppress(redis.exceptions.NoPermissionError):  # it answers: an engine needs no right to PING
        store.ping()
    package = args.engine.replace("-", "_")
    if not find_spec(package):
        raise LookError(f"{args.engine} is not installed in the environment of {sys.executable}")
    options = dict[str, Any]()
    if args.engine in ("vllm", "mlx-lm"):
        if not args.model:
            raise LookError(f"verify {args.engine} needs --model")
        options["model"] = args.model
    if args.engine == "vllm":
        options |= {"tier": args.tier, "options": args.options}
    with interrupts_deferred():
        check = import_module(f"kvpage_connectors.{package}_verify").verify
    failures = check(args.url, **options)
    for failure in failures:
        print(f"kvpage: {failure}", file=sys.stderr)
    return not failures


# -- bench ---------------------------------------------------------------------------------------------------------


def bench(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Print the speed of writes and reads of pages and blocks, on the server args.url and, to compare, in turns on
    args.against. Delete the written data afterwards. Return True.

    Connections of its own are used, not `store`. Raises RedisError, OSError for a file that cannot be written, and
    LookError if a library for --plot is missing.
    """
    with interrupts_deferred():
        from kvpage_server.bench import run  # imported here, since numpy and the page client are slow to load

    urls = [args.url, *([args.against] if args.against else [])]
    for args.url in reversed(urls):  # `_report_failure` names it
        with connected(args.url) as asked:
            asked.ping()
    try:
        run(urls, seconds=args.seconds, quick=args.quick, json=args.json, plot=args.plot, out=out)
    except ModuleNotFoundError as missing:
        raise LookError(f"--plot: {missing_extra(missing, 'bench')}") from None
    return True


if __name__ == "__main__":
    main()
