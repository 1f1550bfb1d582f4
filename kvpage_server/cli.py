"""`kvpage`: looks into a running store from a terminal. Knows it by its commands alone, as any other client does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from getpass import getpass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from rich.filesize import decimal
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvpage_server import __version__
from kvpage_server.address import DEFAULT_URL, URL, shown, with_credentials
from kvpage_server.configuration.config import integer, memory
from kvpage_server.page import DType, KVType, PageError, PageKey
from kvpage_server.system.plurals import how_many
from kvpage_server.system.program import ends_quietly, missing_extra, say
from kvpage_server.system.terminal import for_people, out, readable, table_of, when
from kvpage_server.why import why as lines_of_why

_AT_ONCE = 100  # requests asked for in one go


class Failure(Exception):
    """What was asked for can't be shown; the message says why."""


def main(arguments: list[str] | None = None) -> None:
    """The process. Exits with 1 when what was asked for is not there or not intact, with 2 when it can't be asked."""
    with ends_quietly("kvpage"):
        args = _parser().parse_args(arguments)
        sys.exit(_run(args))


def _run(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit code."""
    try:
        args.url = _url(args)
        with redis.Redis.from_url(args.url, protocol=3, socket_connect_timeout=5) as store:
            return 0 if args.show(store, args) else 1
    except Failure as failure:
        return say("kvpage", str(failure), 1)
    except redis.AuthenticationError:
        return say("kvpage", _not_let_in(args.url), 2)
    except redis.ConnectionError as error:
        return say("kvpage", f"cannot reach {shown(args.url)}: {error}", 2)
    except BrokenPipeError:
        raise
    except (redis.RedisError, ValueError, OSError) as error:
        return say("kvpage", str(error), 2)


def _url(args: argparse.Namespace) -> str:
    """Where the store is, and who asks. Raises ValueError."""
    url = args.url or os.environ.get(URL) or DEFAULT_URL
    password = ""
    if args.askpass:
        if not sys.stdin.isatty():
            raise Failure("--askpass: there is no terminal to ask at; set KVPAGE_PASSWORD in the environment")
        try:
            password = getpass(f"Password for {args.user or 'the default user'} at {shown(url)}: ")
        except EOFError:
            raise Failure("no password was given") from None
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
            help = f"the store's address; {URL} of the environment, or {DEFAULT_URL}, if not given"
            command.add_argument("--url", default="", help=help)
            help = "who asks; the password is KVPAGE_PASSWORD's or REDISCLI_AUTH's of the environment"
            command.add_argument("--user", metavar="NAME", default="", help=help)
            command.add_argument("--askpass", action="store_true", help="ask for the password at the terminal")
        return command

    add("status", status, "how the store is doing")
    add("ls", ls, "the requests, or the blocks of one").add_argument("req", metavar="REQ", nargs="?")
    add("stat", stat, "what is known of a page").add_argument("key", metavar="KEY", help="kv:REQ:LAYER:HEAD:PAGE:TYPE")
    verify_ = add("verify", verify, "hash a request's pages again; corrupt ones are removed")
    verify_.add_argument("req", metavar="REQ")
    verify_.add_argument("pages", metavar="PAGE", nargs="*", type=int)
    why_ = add("why", why, "why a read of a request, or of a page, would miss")
    why_.add_argument("req", metavar="REQ")
    why_.add_argument("name", metavar="LAYER HEAD PAGE TYPE", nargs="*", type=int)
    _add_snapshots(add)
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
        "--block-bytes", type=size, metavar="SIZE", default=64 << 20, help="of a block, such as 2mb; 64mb if not given"
    )
    replay_.add_argument("--json", type=Path, metavar="FILE", help="write the figures to it")
    replay_.add_argument("--plot", type=Path, metavar="FILE", help="draw them; the name's end says PNG, SVG or PDF")


def _add_snapshots(add: Callable[..., argparse.ArgumentParser]) -> None:
    def of_requests(command: Any) -> None:
        help = "the pages of this request alone; may be given several times; %%XX stands for a byte"
        command.add_argument("--request", metavar="REQ", action="append", default=[], help=help)

    dump_ = add("dump", dump, "write what the store holds into safetensors files; goes on where it was interrupted")
    dump_.add_argument("directory", metavar="DIRECTORY", type=Path)
    which = dump_.add_mutually_exclusive_group()
    of_requests(which)
    which.add_argument("--match", metavar="GLOB", default="*", help="the pages and strings whose keys match")
    dump_.add_argument("--update", action="store_true", help="bring a finished dump up to date")
    restore_ = add("restore", restore, "send a dump to a store, what is corrupt left out")
    restore_.add_argument("directory", metavar="DIRECTORY", type=Path)
    of_requests(restore_)
    how = restore_.add_mutually_exclusive_group()
    how.add_argument("--keep", action="store_true", help="keys that exist stay as they are: the default")
    how.add_argument("--replace", action="store_true", help="keys that exist are replaced")
    inspect_ = add("inspect", inspect, "what lies in a dump, or in a file of one", asks=False)
    inspect_.add_argument("path", metavar="DIRECTORY|FILE", type=Path)
    of_requests(inspect_)
    inspect_.add_argument("--verify", action="store_true", help="hash all of it")


# -- replay --------------------------------------------------------------------------------------------------------


def replay(store: redis.Redis, args: argparse.Namespace) -> bool:
    """A trace through policies, without any store."""
    from kvpage_server.replay.command import CAPACITIES, USUAL, run
    from kvpage_server.replay.report import Destination

    try:
        run(
            args.trace,
            policies=args.policy or USUAL,
            capacities=args.capacity or CAPACITIES,
            block_bytes=args.block_bytes,
            to=Destination(out, args.json, args.plot),
        )
    except ModuleNotFoundError as missing:
        raise Failure(f"--plot: {missing_extra(missing, 'bench')}") from None
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
        raise Failure(f"--plot: {missing_extra(missing, 'bench')}") from None
    return True


# -- status --------------------------------------------------------------------------------------------------------


def status(store: redis.Redis, args: argparse.Namespace) -> bool:
    """The store at a glance, from INFO."""
    info: dict[str, Any] = store.info("everything")
    if "kvpage_version" not in info:
        found = f"{info.get('redis_mode', 'some')} Redis {info.get('redis_version')}"
        raise Failure(f"{shown(args.url)} is {found}, not a kvpage-server")
    uptime = for_people(timedelta(seconds=info["uptime_in_seconds"]))
    out.print(f"[bold]kvpage-server {info['kvpage_version']}[/] at {shown(args.url)}, up {uptime}\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for title, line in _status_lines(info) if "used_memory" in info else _tenant_lines(store, info):
        table.add_row(title, line)
    out.print(table)
    return True


def _tenant_lines(store: redis.Redis, info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a user who may not use every key is told: nothing that depends on others."""
    limit = info["maxmemory"]
    yield "memory", f"limit {decimal(limit)}, {info['maxmemory_policy']}" if limit else "no limit"
    requests, keys = how_many(len(set(_requests(store))), "request"), how_many(store.dbsize(), "key")
    yield "store", f"{requests}, {keys} that you may use"
    yield "", "a user who may use every key is shown the rest"


def _status_lines(info: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    used, limit = info["used_memory"], info["maxmemory"]
    if limit and out.is_terminal:
        yield "", ProgressBar(total=limit, completed=min(used, limit), width=40)
    of_limit = f" of {decimal(limit)} ({used / limit:.0%}), {info['maxmemory_policy']}" if limit else ", no limit"
    yield "memory", decimal(used) + of_limit
    yield "", f"the process has {decimal(info['used_memory_rss'])}"
    keys = info.get("db0", {"keys": 0, "expires": 0})
    counts = how_many(info["requests"], "request"), how_many(info["blocks"], "block"), how_many(keys["keys"], "key")
    yield "store", ", ".join(counts)
    expired, evicted = info["expired_keys"], info["evicted_keys"]
    yield "", f"{how_many(keys['expires'], 'key')} will expire, {expired:,} did; evicted: {evicted:,}"
    yield "protected", f"{how_many(info['leased_or_pinned'], 'block')}, {decimal(info['leased_or_pinned_bytes'])}"
    hits, misses = info["keyspace_hits"], info["keyspace_misses"]
    ratio = f"{hits / (hits + misses):.1%} hits" if hits + misses else "none yet"
    yield "reads", f"{ratio} ({hits:,} of {hits + misses:,})" if hits + misses else ratio
    reasons = {name.removeprefix("page_misses_").replace("_", " "): n for name, n in info.items() if "_misses_" in name}
    yield "misses", ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"
    commands = how_many(info["total_commands_processed"], "command")
    yield "clients", f"{info['connected_clients']:,} connected, {commands} so far"
    received, sent = info["total_net_input_bytes"], info["total_net_output_bytes"]
    yield "network", f"{decimal(received)} received, {decimal(sent)} sent"


# -- ls ------------------------------------------------------------------------------------------------------------


def ls(store: redis.Redis, args: argparse.Namespace) -> bool:
    """The requests, or the blocks of one request."""
    return _ls_blocks(store, args.req) if args.req is not None else _ls_requests(store)


def _ls_requests(store: redis.Redis) -> bool:
    table = table_of("request", "blocks", "pages", "size", "in memory", numbers_from=1)
    req_ids = sorted(set(_requests(store)))
    for start in range(0, len(req_ids), _AT_ONCE):
        some = req_ids[start : start + _AT_ONCE]
        pipeline = store.pipeline(transaction=False)
        for req_id in some:
            _ask(pipeline, "KVPAGEINDEX", req_id, "WITHSIZES")
        for req_id, blocks in zip(some, pipeline.execute(), strict=True):
            pages, size, memory = (sum(block[name] for block in blocks) for name in (b"pages", b"bytes", b"memory"))
            table.add_row(readable(req_id), f"{len(blocks):,}", f"{pages:,}", decimal(size), decimal(memory))
    out.print(table if req_ids else "no request has a page")
    return True


def _requests(store: redis.Redis) -> Iterator[bytes]:
    for key in store.scan_iter(count=1000, _type="set"):
        yield key.removeprefix(b"kv:").removesuffix(b":index")


def _ls_blocks(store: redis.Redis, req_id: str) -> bool:
    blocks = _ask(store, "KVPAGEINDEX", req_id, "WITHSIZES")
    if not blocks:
        raise Failure(f"request {req_id} has no page; kvpage why {req_id} may say why")
    table = table_of("page", "complete", "planes", "layers", "heads", "pages", "size", "in memory", numbers_from=3)
    for block in blocks:
        planes = " ".join(KVType(plane).name for plane in block[b"planes"])
        counts = [f"{block[name]:,}" for name in (b"layers", b"heads", b"pages")]
        sizes = [decimal(block[name]) for name in (b"bytes", b"memory")]
        table.add_row(str(block[b"page"]), "yes" if block[b"complete"] else "no", planes, *counts, *sizes)
    out.print(table)
    return True


# -- stat, verify, why ---------------------------------------------------------------------------------------------


def stat(store: redis.Redis, args: argparse.Namespace) -> bool:
    """A page's header and what the store knows of it."""
    try:
        key = PageKey.parse(args.key.encode("utf-8", "surrogateescape"))
    except PageError as error:
        raise Failure(str(error)) from None
    name = (key.req_id, key.layer, key.head, key.page, key.kv_type)
    found = _ask(store, "KVPAGESTAT", *name)
    if found is None:
        raise Failure(f"{args.key} is not there; kvpage why {' '.join(args.key.split(':')[1:])} may say why")
    page = {field.decode(): value for field, value in found.items()}
    dtype, plane = DType(page["dtype"]).name.lower(), KVType(page["type"]).name
    matrix = f"{how_many(page['page_size'], 'token')} x {page['head_dim']} {dtype}"
    left, lease = page["ttl_left_ms"], page["lease_left_ms"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for row in (
        ("holds", f"{plane}, {matrix}, {how_many(page['bytes'], 'byte')}"),
        ("where", f"layer {page['layer']}, head {page['head']}, page {page['page']}"),
        ("checksum", page["checksum"].decode()),
        ("created", when(page["created_ms"])),
        ("lives", "for ever" if left < 0 else f"{for_people(timedelta(milliseconds=left))} more, of {page['ttl']} s"),
        ("leased", f"for {for_people(timedelta(milliseconds=lease))} more" if lease else "no"),
        ("pinned", "yes" if page["pinned"] else "no"),
        ("tier", page["tier"].decode()),
    ):
        table.add_row(*row)
    out.print(table)
    return True


def verify(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Whether a request's pages are what was stored."""
    with out.status("hashing"):
        found = _ask(store, "KVPAGEVERIFY", args.req, *args.pages)
    checked, corrupt = found[b"checked"], found[b"corrupt"]
    if not (checked or corrupt or found[b"unchecked"]):
        raise Failure(f"request {args.req} has no such page; kvpage why {args.req} may say why")
    if unchecked := found[b"unchecked"]:
        out.print(f"{how_many(unchecked, 'page')} written without a checksum")
    if not corrupt:
        out.print(f"{how_many(checked, 'page')} checked, all intact")
        return True
    out.print(f"[red]corrupt, and removed: {len(corrupt):,} of {how_many(checked, 'page')}[/]")
    for key in corrupt:
        out.print(Text("  ") + readable(key))
    return False


def why(store: redis.Redis, args: argparse.Namespace) -> bool:
    """Why a read would miss."""
    if args.name and len(args.name) != 4:
        raise Failure(f"a page is named by LAYER HEAD PAGE TYPE, got {len(args.name)} of the four")
    for line in lines_of_why(store, os.fsencode(args.req), *args.name):
        out.print(escape(line))
    return True


# -- words ---------------------------------------------------------------------------------------------------------


def _ask(store: redis.Redis, *words: Any) -> Any:
    return store.execute_command(*words)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
