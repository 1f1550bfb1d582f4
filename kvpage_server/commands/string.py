"""The string family: plain values, and page blobs seen as the strings they are.

GET of a page is its blob, header and body. SET of a valid blob under the key that its header names is a page write; any
other SET is a plain string.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpage_server.commands.arguments import OUT_OF_MEMORY, SYNTAX_ERROR, integer, plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command
from kvpage_server.page import HEADER_SIZE, MAGIC, PageError, PageHeader, PageKey, decode_page, unix_ms
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import OK, Reply, ReplyError
from kvpage_server.store.arena import Slot
from kvpage_server.store.memory import Entry, Keyspace, OutOfMemory, PageName, Text


def string_of(keyspace: Keyspace, entry: Entry | None) -> Reply:
    """A value as GET replies it: borrowed when it is a long one."""
    if entry is None:
        return None
    if isinstance(entry, Text):
        return entry.data
    if keyspace.is_page(entry):
        return (b"$%d\r\n%b" % (HEADER_SIZE + entry.size, bytes(entry.header)), entry.tail)
    return (entry,)


def length_of(keyspace: Keyspace, entry: Entry) -> int:
    """Bytes of the string that GET would reply."""
    return entry.size + (HEADER_SIZE if keyspace.is_page(entry) else 0)


def store_string(client: Client, key: bytes, value: Argument, expires: int) -> None:
    """SET's write: a page when it is one, a plain string otherwise. Raises ReplyError when memory is full."""
    try:
        client.keyspace.make_room()
    except OutOfMemory:
        raise ReplyError(OUT_OF_MEMORY) from None
    if not _store_blob(client.keyspace, key, value, expires):
        client.keyspace.set_string(key, value if isinstance(value, Slot) else plain(value), expires)


def _store_blob(keyspace: Keyspace, key: bytes, value: Argument, expires: int) -> bool:
    """Store `value` as the page that `key` names, if its header says it is that page."""
    blob = value if isinstance(value, bytes) else value.body
    if len(blob) < HEADER_SIZE or blob[:4] != MAGIC:
        return False
    try:
        name = PageKey.parse(key)
        header = PageHeader.parse(blob)
    except PageError:
        return False
    if not header.names(name) or header.body_size != len(blob) - HEADER_SIZE:
        return False
    try:
        _, body = decode_page(blob)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None
    slot = keyspace.arena.allocate(len(body))
    slot.body[:] = body
    parts = PageName(key, name.req_id, name.layer, name.head, name.page, name.kv_type)
    keyspace.set_page(parts, bytes(header), slot, expires)
    return True


@dataclass(slots=True)
class SetOptions:
    """What follows SET's key and value."""

    expires: int = 0  # unix milliseconds
    keep_ttl: bool = False
    only_if: bool | None = None  # True: exists (XX), False: does not (NX)
    get: bool = False


_UNIT = {b"EX": 1000, b"PX": 1, b"EXAT": 1000, b"PXAT": 1}


def read_expiry(option: bytes, raw: Argument, name: str) -> int:
    """The unix milliseconds of an EX, PX, EXAT or PXAT option."""
    value = integer(raw)
    expires = value * _UNIT[option] + (0 if option.endswith(b"AT") else unix_ms())
    if value <= 0 or expires >= 2**63:
        raise ReplyError(f"ERR invalid expire time in '{name}' command")
    return expires


def _set_options(args: list[Argument]) -> SetOptions:
    options = SetOptions()
    rest = [plain(arg) for arg in reversed(args)]
    while rest:
        word = rest.pop().upper()
        timed = options.expires or options.keep_ttl
        if word in _UNIT and rest and not timed:
            options.expires = read_expiry(word, rest.pop(), "set")
        elif word == b"KEEPTTL" and not timed:
            options.keep_ttl = True
        elif word in (b"NX", b"XX") and options.only_if in (None, word == b"XX"):
            options.only_if = word == b"XX"
        elif word == b"GET":
            options.get = True
        else:
            raise ReplyError(SYNTAX_ERROR)
    return options


@command(
    "set",
    -3,
    "write denyoom",
    keys=(1, 1, 1),
    group="string",
    usage="key value [NX | XX] [GET] [EX seconds | PX milliseconds | EXAT unix-time-seconds | "
    "PXAT unix-time-milliseconds | KEEPTTL]",
    summary="Sets the string value of a key; a page blob under its own key becomes that page.",
)
def set_(client: Client, args: list[Argument]) -> Reply:
    """Write a value, under conditions, with an expiry."""
    key, options, keyspace = plain(args[0]), _set_options(args[2:]), client.keyspace
    old = keyspace.find(key)
    reply: Reply = string_of(keyspace, old) if options.get else OK
    if options.only_if is not None and options.only_if is not (old is not None):
        return reply if options.get else None
    expires = keyspace.expires_of(key) if options.keep_ttl else options.expires
    store_string(client, key, args[1], expires)
    return reply


@command("get", 2, "readonly fast", keys=(1, 1, 1), group="string", usage="key", summary="Returns the value of a key.")
def get(client: Client, args: list[Argument]) -> Reply:
    """A value, a page as its blob."""
    return string_of(client.keyspace, client.keyspace.read(plain(args[0])))
