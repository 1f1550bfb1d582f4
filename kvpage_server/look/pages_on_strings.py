"""Page commands for a Valkey or Redis Cluster, which stores blocks and pages as strings.

A block is one string (client/cluster/commands.py), and so is a page that was written by itself. The cluster has no
leases and no reasons of misses, so replies omit them. A scan finds the blocks of a request. The blocks of an agent need
no scan, because their page id is 0, or 1 for a state.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import count, product
from typing import Any, TypeAlias

import redis

from kvpage_server.client.cluster.commands import (
    OPENING_SIZE,
    block_key,
    checked_block,
    head_size,
    ranges_of_page,
    shape_of,
)
from kvpage_server.client.page import BlockName
from kvpage_server.client.raw_commands import encoded
from kvpage_server.look.multi_store import MultiStore, Pipeline
from kvpage_server.observe.asking import Command, QueriedStore, ask
from kvpage_server.observe.memory_by_agent import exact_pattern, holdings_of_agent
from kvpage_server.page import HEADER_SIZE, PageError, PageHeader, PageKey, decode_page, index_key
from kvpage_server.system.text import name_shown

Answers: TypeAlias = list[Any]
# commands for strings that replace a page command, and the function that makes its reply from theirs
Translation: TypeAlias = tuple[list[Command], Callable[[Answers], Any]]
_AGENT_PAGE_IDS = (0, 1)  # page ids of an agent's blocks: tokens, and the state after them
_STAT_FIELDS = {"tier": b"memory", "pinned": None, "lease_left_ms": None}  # fields of KVPAGESTAT; leases are unknown
ABSENT = "absent"  # the reason for every miss, because strings have no records of their removal
_MAX_SCAN_CALLS = 1_000_000  # for the keys of one request


class PagesOnStrings:
    """A store that answers KVPAGEINDEX, KVPAGEWHY, KVPAGESTAT, KVPAGEVERIFY and scans of requests from strings.

    It sends other commands to the cluster.
    """

    def __init__(self, store: MultiStore) -> None:
        self._store = store
        self._blocks: dict[bytes, set[int]] = defaultdict(set)  # page ids of blocks, by request
        self._pages: dict[bytes, set[PageKey]] = defaultdict(set)  # pages that are strings, by request

    def execute_command(self, *words: Any) -> Any:
        """Return the reply to a page command, or pass another command to the cluster.

        KVPAGEINDEX, KVPAGEWHY and KVPAGEVERIFY scan for all strings of their request first. Raises ResponseError.
        """
        name = encoded(words[0])
        if name == b"KVPAGESTAT":
            return self._stat(PageKey(encoded(words[1]), *map(int, words[2:])))
        if name in (b"KVPAGEINDEX", b"KVPAGEWHY", b"KVPAGEVERIFY"):
            self._scan_request(encoded(words[1]))
        if name == b"KVPAGEVERIFY":
            return self._verify(encoded(words[1]), [*map(int, words[2:])])
        commands, read = self._translate([name, *map(encoded, words[1:])])
        return read([self._store.execute_command(*command) for command in commands])

    def pipeline(self, transaction: bool) -> Pipeline:
        """Return a pipeline that sends all commands for strings together."""
        return Pipeline(self.answers)

    def answers(self, commands: Sequence[Command]) -> Answers:
        """Return the replies to commands in their order. All commands for strings are in one pipeline."""
        asked = [self._translate(command) for command in commands]
        pipeline = self._store.pipeline(transaction=False)
        for some, _ in asked:
            for command in some:
                pipeline.execute_command(*command)
        received = iter(pipeline.execute(raise_on_error=False))
        return [read([next(received) for _ in some]) for some, read in asked]

    def _scan_request(self, req_id: bytes) -> None:
        """Scan for the strings of a request, to fill `_blocks` and `_pages`. Raises ResponseError."""
        cursor = b"0"
        for _ in range(_MAX_SCAN_CALLS):
            (answer,) = self.answers(
                [[b"SCAN", cursor, b"MATCH", b"kv:%b:*" % exact_pattern(req_id), b"COUNT", 1000, b"TYPE", b"set"]]
            )
            if isinstance(answer, redis.ResponseError):
                raise answer
            cursor, _ = answer
            if cursor == b"0":
                return

    def _translate(self, command: Command) -> Translation:
        """Return the commands for strings that replace a command, and the function that makes its reply from theirs."""
        if command[0] == b"SCAN" and b"MAXLEN" in command:  # an argument that Valkey does not have
            at = command.index(b"MAXLEN")
            command = [*command[:at], *command[at + 2 :]]
        name, req_id, *more = command
        assert isinstance(req_id, bytes)
        if name == b"SCAN" and more[-1] == b"set":
            if req_id == b"0":  # a new scan; the results of the last one may be outdated
                self._blocks.clear()
                self._pages.clear()
            return [[*command[:-1], b"string"]], self._read_scan
        if name == b"KVPAGEINDEX":
            asked, read = self._translate_index(req_id)
            return asked, (lambda received: _total(read(received))) if more == [b"TOTAL"] else read
        if name == b"KVPAGESTAT":
            return [
                [b"EXISTS", block_key((req_id, int(more[2])))]
            ], lambda received: _STAT_FIELDS if received == [1] else None
        if name == b"KVPAGEWHY" and more:
            return self._translate_why(PageKey(req_id, *map(int, more)))
        if name == b"KVPAGEWHY":
            asked, read = self._translate_index(req_id)
            return asked, lambda received: _why(read(received))
        return [command], lambda received: received[0]

    def _stat(self, key: PageKey) -> dict[str, Any] | None:
        """Return KVPAGESTAT's reply for a page that is stored as a string, or in its block's string; None if absent."""
        ask, place = self._store.execute_command, (bytes(key), 0, HEADER_SIZE - 1)
        block = block_key((key.req_id, key.page))
        ranges = ranges_of_page(key, shape_of(ask(b"GETRANGE", block, 0, OPENING_SIZE - 1)))
        if ranges:
            place = block, *ranges[0]
        found = ask(b"GETRANGE", *place)
        if not found:
            return None
        described = asdict(PageHeader.parse(found))
        del described["flags"]
        named = {
            "type": described.pop("kv_type"),
            "bytes": described.pop("body_size"),
            "checksum": b"%016x" % described["checksum"],
        }
        left = {"ttl_left_ms": ask(b"PTTL", place[0]), "url": self._store.home(place[0])}
        return described | named | _STAT_FIELDS | left

    def _verify(self, req_id: bytes, pages: Sequence[int]) -> dict[str, Any]:
        """Check the pages of a request, only those with an id in `pages` unless it is empty, and delete corrupt
        strings.

        Reads one string at a time. Return KVPAGEVERIFY's reply: the numbers of checked and unchecked pages, and the
        keys of corrupt pages.
        """
        checked, unchecked, corrupt = 0, 0, list[bytes]()
        blocks = [number for number in sorted(self._blocks[req_id]) if not pages or number in pages]
        for name in ((req_id, number) for number in blocks):
            if value := self._store.execute_command(b"GET", block_key(name)):
                intact, keys = _check_block(name, value)
                checked += len(keys)
                corrupt += [] if intact else self._delete(block_key(name), keys)
        for key in sorted(self._pages[req_id], key=bytes):
            if (not pages or key.page in pages) and (value := self._store.execute_command(b"GET", bytes(key))):
                hashed, intact = _check_page(key, value)
                checked, unchecked = checked + hashed, unchecked + (not hashed)
                corrupt += [] if intact else self._delete(bytes(key), [bytes(key)])
        return {"checked": checked, "unchecked": unchecked, "corrupt": corrupt}

    def _delete(self, key: bytes, pages: list[bytes]) -> list[bytes]:
        """Delete a string. Return `pages`, the keys of its pages."""
        self._store.execute_command(b"UNLINK", key)
        return pages

    def _read_scan(self, received: Answers) -> Any:
        """Return SCAN's reply with the requests' index keys in place of their strings' keys.

        Adds the pages and blocks of the strings to `_pages` and `_blocks`.
        """
        (answer,) = received
        if isinstance(answer, redis.ResponseError):
            return answer
        cursor, keys = answer
        found = set()
        for key in keys:
            req_id, _, rest = key.removeprefix(b"kv:").partition(b":")
            kind, _, number = rest.partition(b":")
            if kind == b"block" and number.isdigit():
                self._blocks[req_id].add(int(number))
            else:
                try:
                    self._pages[req_id].add(PageKey.parse(key))
                except PageError:
                    continue
            found.add(index_key(req_id))
        return [cursor, sorted(found)]

    def _translate_index(self, req_id: bytes) -> Translation:
        """Return the commands that replace KVPAGEINDEX, and the function that makes its reply from theirs.

        They read the first bytes of each known block, which describe its shape, and the length of each known string.
        """
        numbers = sorted({*_AGENT_PAGE_IDS, *self._blocks.get(req_id, ())})
        pages = sorted(self._pages.get(req_id, ()), key=bytes)
        asked: list[Command] = []
        for key in (block_key((req_id, number)) for number in numbers):
            asked += [[b"GETRANGE", key, 0, OPENING_SIZE - 1], [b"STRLEN", key]]
        asked += [[b"STRLEN", bytes(page)] for page in pages]

        def read(received: Answers) -> Any:
            if refusal := next((one for one in received if isinstance(one, redis.ResponseError)), None):
                return refusal
            openings, lengths = received[: 2 * len(numbers) : 2], received[1 : 2 * len(numbers) : 2]
            found = [*map(_index_row, numbers, openings, lengths)]
            found += _index_rows(pages, received[2 * len(numbers) :])
            return sorted(filter(None, found), key=lambda part: int(part["page"]))

        return asked, read

    def _translate_why(self, key: PageKey) -> Translation:
        """Return the commands that replace KVPAGEWHY of a page, and the function that makes its reply from theirs."""
        block = block_key((key.req_id, key.page))

        def read(received: Answers) -> Any:
            there, opening = received
            in_block = ranges_of_page(key, shape_of(opening)) is not None
            where = {"url": self._store.home(bytes(key))} if there == 1 else {}
            return where | {"reason": b"stored" if there == 1 or in_block else ABSENT.encode()}

        return [[b"EXISTS", bytes(key)], [b"GETRANGE", block, 0, OPENING_SIZE - 1]], read


def _check_block(name: BlockName, value: bytes) -> tuple[bool, list[bytes]]:
    """Return whether a block is intact, and the keys of its pages; the block's own key if its shape is unreadable."""
    shape, reason = checked_block(name[1], memoryview(value), verify=True)
    if shape is None:
        return False, [block_key(name)]
    pages = product(range(shape.layers), range(shape.heads), [plane.kv_type for plane in shape.planes])
    keys = [bytes(PageKey(name[0], layer, head, name[1], plane)) for layer, head, plane in pages]
    return reason is None, keys


def _check_page(key: PageKey, value: bytes) -> tuple[bool, bool]:
    """Return whether a page has a checksum, and whether it is intact."""
    try:
        header, _ = decode_page(value)
    except PageError:
        return True, False
    return header.checksum != 0, header.names(key)


def _why(parts: Any) -> Any:
    """Return KVPAGEWHY's reply for a request, from KVPAGEINDEX's reply `parts`. An error is returned unchanged.

    A request is stored if all blocks from 0 to its last one are complete.
    """
    if isinstance(parts, redis.ResponseError):
        return parts
    if not parts:
        return {b"reason": ABSENT.encode()}
    complete = {part["page"] for part in parts if part["complete"]}
    hole = next(number for number in count() if number not in complete)
    if hole > parts[-1]["page"]:
        return {b"reason": b"stored"}
    return {b"reason": b"hole", b"block": hole, b"cause": ABSENT.encode()}


def _index_row(number: int, opening: bytes, length: int) -> dict[str, Any] | None:
    """Return KVPAGEINDEX's row for a block, from its first bytes and its length in bytes; None if there is no block."""
    shape = shape_of(opening)
    if shape is None:
        return None
    planes = [int(plane.kv_type) for plane in shape.planes]
    described = {"page": number, "pages": shape.pages, "layers": shape.layers, "heads": shape.heads, "planes": planes}
    complete = length == head_size(shape) + shape.nbytes
    return described | {"complete": int(complete), "bytes": shape.nbytes, "memory": length}


def _total(parts: Any) -> Any:
    """Return KVPAGEINDEX's reply with TOTAL, from its reply without. An error is returned unchanged."""
    if isinstance(parts, redis.ResponseError) or not parts:
        return parts
    sums = {name: sum(part[name] for part in parts) for name in ("pages", "bytes", "memory")}
    complete = min(part["complete"] for part in parts)
    first = {name: parts[0][name] for name in ("page", "planes")}
    return [sums | first | {"blocks": len(parts), "complete": complete}]


def _index_rows(keys: Sequence[PageKey], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return KVPAGEINDEX's rows for pages that are strings of their own; `lengths` are the strings' bytes."""
    blocks: dict[int, list[tuple[PageKey, int]]] = defaultdict(list)
    for key, length in zip(keys, lengths, strict=True):
        if length > HEADER_SIZE:
            blocks[key.page].append((key, length))
    found = []
    for number, pages in blocks.items():
        layers, heads = (1 + max(getattr(key, name) for key, _ in pages) for name in ("layer", "head"))
        planes = sorted({int(key.kv_type) for key, _ in pages})
        described = {"page": number, "pages": len(pages), "layers": layers, "heads": heads, "planes": planes}
        size = sum(length for _, length in pages)
        whole = len(pages) == layers * heads * len(planes)
        found.append(described | {"complete": int(whole), "bytes": size - HEADER_SIZE * len(pages), "memory": size})
    return found


# -- Hints for the next command, which can be pasted into a shell ------------------------------------------------------


def shell_word(name: bytes) -> str:
    """Return a name as `kvpage` prints and takes it, quoted for a shell."""
    word = name_shown(name)
    return shlex.quote(word.replace("-", r"\x2d", 1) if word.startswith("-") else word)  # it is no option


def agent_hint(store: QueriedStore, name: bytes) -> str:
    """Return a message with the commands that show an agent; empty if no agent has this name."""
    holdings = ask(store, holdings_of_agent(name))
    if not holdings.agents and not holdings.unreadable:
        return ""
    word = shell_word(name)
    shows = f"kvpage stat {word} shows its blocks, kvpage verify {word} checks them"
    return f"{name_shown(name)} is an agent, and no request: {shows}"


def why_hint(store: QueriedStore, name: bytes, *page: int) -> str:
    """Return the hint to use `kvpage why`; empty if the store records no reasons."""
    if isinstance(store, PagesOnStrings):
        return ""
    return f"; kvpage why {' '.join([shell_word(name), *map(str, page)])} may say why"
