"""The commands `kvpage dump`, `kvpage restore` and `kvpage inspect`, and the inspection of a dump without a server."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kvpage_server.address import shown
from kvpage_server.client.raw_commands import integer
from kvpage_server.page import KVType, PageKey
from kvpage_server.snapshot import format
from kvpage_server.snapshot.dump import Selection, dump
from kvpage_server.snapshot.format import (
    FOREVER,
    NOT_WRITTEN,
    BadFile,
    DumpError,
    Entry,
    Failures,
    FileContents,
    PageTensor,
    Summary,
    intact,
    opened,
    size_of,
    text_of,
)
from kvpage_server.snapshot.restore import restore
from kvpage_server.snapshot.store import Amount, RunningStore
from kvpage_server.system.terminal import for_people, out, print_json, readable, table_of, when
from kvpage_server.system.text import as_size, name_shown, plural

# -- Contents of a dump, without a server ------------------------------------------------------------------------------


@dataclass(slots=True)
class Holding:
    """Summary of the pages of one request in a dump, or of all strings."""

    blocks: set[int] = field(default_factory=set)
    count: int = 0  # pages or strings
    nbytes: int = 0
    kinds: set[str] = field(default_factory=set)  # names of element types
    soonest_ms: int = FOREVER  # the shortest TTL left of a page or string

    def add(self, entry: Entry) -> None:
        self.count += len(entry.checksums)
        self.nbytes += len(entry.checksums) * entry.body_size
        if isinstance(entry, PageTensor):
            self.blocks.add(entry.first.page)
            self.kinds.add(_dtype_text(entry))
        left = [ms for ms in (*entry.ttl_left_ms, self.soonest_ms) if ms != FOREVER]
        self.soonest_ms = min(left, default=FOREVER)


@dataclass(slots=True)
class Inspected:
    """Result of an inspection."""

    summary: Summary | None
    sizes: list[int] = field(default_factory=list)  # bytes of each file
    requests: dict[bytes, Holding] = field(default_factory=lambda: defaultdict(Holding))
    strings: Holding = field(default_factory=Holding)
    planes: list[PageTensor] = field(default_factory=list)  # tensors of the selected requests
    corrupt: Failures = field(default_factory=Failures)
    finished: bool = True  # whether the dump is finished; True for a single file


Done = Callable[[int], None]  # called with the number of newly processed bytes


def inspect(
    path: Path, requests: Collection[bytes] = (), *, verify: bool = False, done: Done = lambda count: None
) -> Inspected:
    """Summarise all files in a dump's directory, or one file. With `verify`, hash the data and compare checksums.

    With `requests`, only pages of these request ids are summarised, and no strings. Damage is listed in `corrupt`, and
    does not stop the inspection. `done` is called with the bytes of each processed file. Raises DumpError for a
    directory without a dump, OSError.
    """
    found, files = Inspected(None), [path]
    if path.is_dir():
        try:
            found.summary = format.read_summary(path)
        except BadFile as error:
            found.corrupt.add(str(error))
        found.finished = found.summary is not None
        files = format.files_of(path, found.summary)
    else:
        path.stat()
    for file, contents in format.read_all(files, found.summary):
        try:
            if isinstance(contents, BadFile):
                raise contents
            for bad in contents.bad:
                found.corrupt.add(f"{bad}, in {file.name}")
            _add(found, contents, frozenset(requests))
            if verify:
                for key in _corrupt(contents):
                    found.corrupt.add(f"{key} in {file.name}: {NOT_WRITTEN}")
        except BadFile as error:
            found.corrupt.add(f"{file.name}: {error}")
        else:
            done(contents.size)
    return found


def _add(found: Inspected, contents: FileContents, requests: frozenset[bytes]) -> None:
    found.sizes.append(contents.size)
    for entry, _, _ in contents.spans:
        if not isinstance(entry, PageTensor):
            if not requests:
                found.strings.add(entry)
        elif not requests or entry.first.req_id in requests:
            found.requests[entry.first.req_id].add(entry)
            if requests:
                found.planes.append(entry)


def _corrupt(contents: FileContents) -> Iterator[str]:
    """Yield the keys of a file's pages and strings that do not match their checksums, as text."""
    with opened(contents) as file:
        for span in contents.spans:
            entry = span.entry
            for number, is_intact in enumerate(intact(file, contents, span)):
                if not is_intact:
                    yield text_of(bytes(entry.key(number)) if isinstance(entry, PageTensor) else entry.key)


_MOST_LISTED = 100  # failures in the output


def run_dump(server: redis.Redis, args: argparse.Namespace) -> bool:
    """Run `kvpage dump`. Return whether all selected keys were dumped, and each named request has a page. Raises
    DumpError. With several servers, the caller reports requests without a page: they stay in `args.nowhere`.
    """
    if "kvpage_version" not in server.info("server"):
        raise DumpError("only a kvpage-server can be dumped, this is another Redis")
    selection = Selection(_requests(args), os.fsencode(args.match))
    pages = {req_id: int(server.scard(b"kv:%b:index" % req_id)) for req_id in selection.requests}
    absent = {req_id for req_id, count in pages.items() if not count}
    if (nowhere := getattr(args, "nowhere", None)) is not None:
        nowhere &= absent
    elif absent and len(absent) == len(pages):
        raise DumpError("no request that --request names has a page")
    complete = not absent or nowhere is not None
    # the number of keys, for the progress bar; None if counting them needs a scan of all keys
    keys = sum(pages.values()) if pages else server.dbsize() if selection.match == b"*" else None
    started = time.monotonic()
    with RunningStore(args.url) as store, _bar("dumping", keys) as done:
        server_url, update, code = shown(args.url), args.update, args.code
        dumped = dump(store, args.directory, selection, update=update, code=code, server=server_url, done=done)
    if args.json:
        in_files = {"stored_bytes": dumped.stored, "files": dumped.files, "kept_files": dumped.kept}
        corrupt = {"corrupt": dumped.corrupt.texts}
        print_json({"url": shown(args.url)} | _counts(dumped.amount) | in_files | corrupt | _absent(absent))
        return complete and not dumped.corrupt.count
    kept = f", {dumped.kept:,} of them as they were" if dumped.kept else ""
    files, took = plural(dumped.files, "file"), time.monotonic() - started
    coded = f", coded as {as_size(dumped.stored)}" if dumped.stored < dumped.amount.nbytes else ""
    out.print(f"{_amount_text(dumped.amount)}{coded} in {files}{kept}, {took:.1f} s")
    _print_absent(() if complete else absent)
    return _print_failures("are not what was stored, and were not dumped", dumped.corrupt) and complete


def run_restore(server: redis.Redis, args: argparse.Namespace) -> bool:
    """Run `kvpage restore`. Return whether the dump is finished and has each named request, and no key was damaged,
    refused, without room, or evicted again. Raises DumpError.
    """
    before = _evictions(server)
    nbytes = size_of(args.directory)
    started = time.monotonic()
    with RunningStore(args.url) as store, _bar("restoring", nbytes, in_bytes=True) as done:
        restored = restore(
            store,
            args.directory,
            _requests(args),
            replace=args.replace,
            done=done,
            evicted=lambda: _evicted_since(before, _evictions(server))[0],
        )
    _check_any(args, restored.absent, restored.corrupt)
    evicted, limits = _evicted_since(before, _evictions(server))
    if args.json:
        names = {name: getattr(restored, name).texts for name in ("corrupt", "no_room", "refused")}
        counts = {"there": restored.there, "expired": restored.expired, "evicted": evicted, "lost": restored.lost}
        rest = names | _absent(restored.absent) | {"finished": restored.finished}
        print_json({"url": shown(args.url)} | _counts(restored.amount) | counts | rest)
        failures = restored.corrupt.count, restored.no_room.count, restored.refused.count, restored.lost
        return restored.finished and not restored.absent and not any(failures)
    out.print(f"{_amount_text(restored.amount)} restored, {time.monotonic() - started:.1f} s")
    if restored.there:
        out.print(f"{plural(restored.there, 'key')} there already, left unchanged")
    if restored.expired:
        out.print(f"{plural(restored.expired, 'key')} had expired by the end of the dump")
    if evicted:
        of_dump = f", {restored.lost:,} of them from the dump" if restored.lost else ""
        may_be = f"the dump may be larger than {' and than '.join(limits)}"
        out.print(f"[red]{plural(evicted, 'key')} evicted meanwhile{of_dump}: {may_be}[/]")
    if not restored.finished:
        out.print("[red]the dump was never finished: this is what there was of it[/]")
    _print_absent(restored.absent)
    fitted = _print_failures("did not fit into the store, and were not restored", restored.no_room)
    taken = _print_failures("were refused by the server, and were not restored", restored.refused)
    return (
        _print_failures("are corrupt, and were not restored", restored.corrupt)
        and fitted
        and taken
        and restored.finished
        and not restored.absent
        and not restored.lost
    )


# Limits by the suffix of INFO's fields.
_LIMITS = {"memory": "maxmemory", "disk": "maxdisk", "quota": "a quota", "filesystem": "the file system"}


def _evictions(server: redis.Redis) -> dict[str, int]:
    """Return the counters of evictions in INFO by their fields: `evicted_keys`, and one for each policy and limit."""
    fields = server.info("stats") | server.info("kvpage")
    counts = [name for name in fields if name == "evicted_keys" or name.startswith("evictions_")]
    return {name: integer(fields[name]) for name in counts}


def _evicted_since(before: dict[str, int], now: dict[str, int]) -> tuple[int, list[str]]:
    """Return the number of keys that were evicted between two results of `_evictions`, and the limits that were
    reached.

    A server without numbers by limit, such as Redis, has only the limit maxmemory.
    """
    grown = {name: number - before.get(name, 0) for name, number in now.items() if number > before.get(name, 0)}
    limits = {_LIMITS[name.rpartition("_")[2]] for name in grown if name != "evicted_keys"}
    return grown.get("evicted_keys", 0), sorted(limits) or ["maxmemory"]


def run_inspect(args: argparse.Namespace) -> bool:
    """Run `kvpage inspect`. Return whether the dump is finished and has each named request, and all files are readable
    and, with --verify, undamaged. Raises DumpError.
    """
    with _bar("hashing", None, in_bytes=True) as done:
        found = inspect(args.path, requests := _requests(args), verify=args.verify, done=done)
    absent = set(requests).difference(found.requests)
    _check_any(args, absent, found.corrupt)
    complete = found.finished and not absent and not found.corrupt.count
    if args.json:
        print_json(_inspected(found, args.path) | _absent(absent))
        return complete
    _show_head(args.path, found)
    if requests:
        _show_planes(found.planes)
    else:
        _show_requests(found)
    if args.verify and not found.corrupt.count:
        out.print("all of it is intact" if found.finished else "none of its files is corrupt, but some may be missing")
    _print_absent(absent)
    _print_failures("are corrupt", found.corrupt)
    return complete


def _check_any(args: argparse.Namespace, absent: Collection[bytes], corrupt: Failures) -> None:
    """Raise DumpError if an undamaged dump has no page of any request that --request names."""
    if args.request and set(args.request) <= set(absent) and not corrupt.count:
        raise DumpError(
            f"{getattr(args, 'directory', None) or args.path} has no page of the requests that --request names"
        )


def _absent(requests: Collection[bytes]) -> dict[str, list[str]]:
    return {"absent": [name_shown(req_id) for req_id in sorted(requests)]}


def _print_absent(requests: Collection[bytes]) -> None:
    for req_id in sorted(requests):
        out.print(Text.assemble("request ", readable(req_id), " has no page", style="red"))


def _counts(what: Amount) -> dict[str, Any]:
    return {"pages": what.pages, "strings": what.strings, "bytes": what.nbytes}


def _inspected(found: Inspected, path: Path) -> dict[str, Any]:
    held = found.requests.values()
    return {
        "path": str(path),
        "files": len(found.sizes),
        "file_bytes": sum(found.sizes),
        "requests": len(found.requests),
        "pages": sum(holding.count for holding in held),
        "strings": found.strings.count,
        "bytes": sum(holding.nbytes for holding in held) + found.strings.nbytes,
        "corrupt": found.corrupt.texts,
        "finished": found.finished,
    }


def _show_head(path: Path, found: Inspected) -> None:
    if found.summary is not None:
        out.print(
            f"a dump of {escape(readable(found.summary.selection).plain)}, {when(found.summary.dumped_ms)}", end=""
        )
    else:
        out.print("a dump that was never finished" if path.is_dir() else "a file of a dump", end="")
    out.print(f": {plural(len(found.sizes), 'file')}, {as_size(sum(found.sizes))}")


def _show_requests(found: Inspected) -> None:
    shown = table_of("request", "holds", "lives", "blocks", "pages", "size", numbers_from=3)
    for req_id, held in sorted(found.requests.items()):
        shown.add_row(readable(req_id), *_row(held, f"{len(held.blocks):,}"))
    if found.strings.count:
        shown.add_row("[italic]plain strings[/]", *_row(found.strings, ""))
    if shown.row_count:
        out.print(shown)


def _row(held: Holding, blocks: str) -> list[str]:
    return [" ".join(sorted(held.kinds)), _ttl_text(held.soonest_ms), blocks, f"{held.count:,}", as_size(held.nbytes)]


def _show_planes(planes: list[PageTensor]) -> None:
    shown = table_of("tensor", "plane", "holds", "lives", "shape", "size", numbers_from=4)
    for pages in sorted(planes, key=lambda pages: _sort_key(pages.first)):
        _, page_size, head_dim, _ = pages.geometry
        matrix = f"{plural(page_size, 'token')} x {head_dim} {_dtype_text(pages)}"
        left = min((ms for ms in pages.ttl_left_ms if ms != FOREVER), default=FOREVER)
        shape = " x ".join(map(str, pages.shape))
        size = as_size(pages.body_size * len(pages.checksums))
        shown.add_row(readable(pages.name), KVType(pages.first.kv_type).name, matrix, _ttl_text(left), shape, size)
    if shown.row_count:
        out.print(shown)


def _dtype_text(pages: PageTensor) -> str:
    return pages.geometry.dtype.name.lower() + (", coded" if pages.code_size else "")


def _sort_key(key: PageKey) -> tuple[bytes, int, int, int, int]:
    return key.req_id, key.page, key.layer, key.head, key.kv_type


def _ttl_text(left_ms: int) -> str:
    return "for ever" if left_ms == FOREVER else for_people(left_ms / 1000)


def _amount_text(what: Amount) -> str:
    return f"{plural(what.pages, 'page')} and {plural(what.strings, 'string')}, {as_size(what.nbytes)}"


def _print_failures(fate: str, failures: Failures) -> bool:
    """Print failures, one on each line, below the line "N `fate`:", in the singular for one. Return whether there are
    no failures.
    """
    if failures.count:
        verbs = {"are": "is", "were": "was"} if failures.count == 1 else {}
        shown = " ".join(verbs.get(word, word) for word in fate.split(" "))
        out.print(f"[red]{failures.count:,} {shown}:[/]")
        for text in failures.texts[:_MOST_LISTED]:
            out.print(Text("  ") + readable(text))
        if failures.count > _MOST_LISTED:
            out.print(f"  and {failures.count - _MOST_LISTED:,} more")
    return not failures.count


def _requests(args: argparse.Namespace) -> tuple[bytes, ...]:
    return tuple(args.request)


@contextmanager
def _bar(title: str, total: int | None, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr if that is a terminal. Yield a function that advances it by a count."""
    console = Console(stderr=True)
    counted = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)
