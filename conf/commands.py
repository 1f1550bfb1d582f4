"""Generator of docs/commands.md, from the command table and from the examples below, which the tests run."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc

import kvpage_server.commands.families  # noqa: F401  # fills the table
from kvpage_server.commands.specs import TABLE, Spec, subcommands
from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE, MAX_LAYER, MAX_PAGE, MAX_REQ_ID, MAX_TTL, MAX_U32, DType, KVType

# -- examples ----------------------------------------------------------------------------------------------------------
#
# An example of each page, block and index command, as redis-cli shows it.
#
# Each runs on an empty server. A line after '> ' is the input, the lines below it are the reply; '...' replaces text
# that differs between runs.

_TWO_PAGES = """\
> KVPAGEMSET 2 req 0 0 0 0 3 1 4 0 keys req 0 0 0 1 3 1 4 0 vals
OK
"""

EXAMPLES = {
    "kvpageset": """\
> KVPAGESET test_req_001 5 8 42 0 1 128 64 3600 "BLOB_DATA"
OK
> TTL kv:test_req_001:5:8:42:0
(integer) 3600
""",
    "kvpageget": """\
> KVPAGESET test_req_001 5 8 42 0 1 128 64 3600 "BLOB_DATA"
OK
> KVPAGEGET test_req_001 5 8 42 0
"BLOB_DATA"
> KVPAGEGET test_req_001 5 8 42 1
(nil)
""",
    "kvpagemset": f"""\
{_TWO_PAGES}> KVPAGEMSET 2 req 0 0 1 0 3 1 4 0 more req 0 0 1 7 3 1 4 0 oops
(error) ERR page 2 of 2: kv_type must be an integer between 0 and 5, got '7'
""",
    "kvpagemget": f"""\
{_TWO_PAGES}> KVPAGEMGET 3 req 0 0 0 0 req 0 0 0 1 req 9 9 9 0
1) "keys"
2) "vals"
3) (nil)
""",
    "kvpageexists": """\
> KVPAGESET test_req_001 5 8 42 0 1 128 64 3600 "BLOB_DATA"
OK
> KVPAGEEXISTS test_req_001 5 8 42 0
(integer) 1
""",
    "kvpagemexists": f"""\
{_TWO_PAGES}> KVPAGEMEXISTS 2 req 0 0 0 1 req 0 0 1 0
1) (integer) 1
2) (integer) 0
""",
    "kvpagestat": """\
> KVPAGESET test_req_001 5 8 42 0 1 128 64 3600 "BLOB_DATA"
OK
> KVPAGESTAT test_req_001 5 8 42 0
 1) "dtype"
 2) (integer) 1
 3) "page_size"
 4) (integer) 128
 5) "head_dim"
 6) (integer) 64
 7) "layer"
 8) (integer) 5
 9) "head"
10) (integer) 8
11) "page"
12) (integer) 42
13) "type"
14) (integer) 0
15) "bytes"
16) (integer) 9
17) "checksum"
18) "6eb8ae2d4003f5e4"
19) "created_ms"
20) (integer) ...
21) "ttl"
22) (integer) 3600
23) "ttl_left_ms"
24) (integer) ...
25) "lease_left_ms"
26) (integer) 0
27) "pinned"
28) (integer) 0
29) "kept_until_ms"
30) (integer) 0
31) "kept_by"
32) ""
33) "tier"
34) "memory"
35) "coded_size"
36) (integer) 0
""",
    "kvpagedel": f"""\
{_TWO_PAGES}> KVPAGESET req 0 0 1 0 3 1 4 0 more
OK
> KVPAGEDEL req 1
(integer) 1
> KVPAGEDEL req
(integer) 2
""",
    "kvpageindex": f"""\
{_TWO_PAGES}> KVPAGEINDEX req WITHSIZES
1)  1) "page"
    2) (integer) 0
    3) "pages"
    4) (integer) 2
    5) "layers"
    6) (integer) 1
    7) "heads"
    8) (integer) 1
    9) "planes"
   10) 1) (integer) 0
       2) (integer) 1
   11) "complete"
   12) (integer) 1
   13) "bytes"
   14) (integer) 8
   15) "memory"
   16) (integer) ...
   17) "pinned"
   18) (integer) 0
   19) "kept_until_ms"
   20) (integer) 0
   21) "kept_by"
   22) ""
""",
    "kvpageverify": f"""\
{_TWO_PAGES}> KVPAGEVERIFY req
1) "checked"
2) (integer) 2
3) "unchecked"
4) (integer) 0
5) "corrupt"
6) (empty array)
""",
    "kvpageprefix": f"""\
{_TWO_PAGES}> KVPAGEPREFIX 2 5000 2 req 0 req 1
(integer) 1
> KVPAGESET state 0 0 0 0 3 1 4 0 body
OK
> KVPAGEPREFIX 2 5000 2 req 0 req 1 LENGTHS 2 state 0 1 other 0 2
1) (integer) 1
""",
    "kvpagelease": f"""\
{_TWO_PAGES}> KVPAGELEASE req 30000
(integer) 1
""",
    "kvpagepin": f"""\
{_TWO_PAGES}> KVPAGEPIN req
(integer) 1
""",
    "kvpageunpin": f"""\
{_TWO_PAGES}> KVPAGEPIN req
(integer) 1
> KVPAGEUNPIN req
(integer) 1
> KVPAGEUNPIN req
(integer) 0
""",
    "kvpagekeep": f"""\
{_TWO_PAGES}> KVPAGEKEEP alice 2 3600 kv:req:0:0:0:0
1) (integer) 1
2) (integer) ...
3) ""
""",
    "kvmap|attach": """\
> KVMAP ATTACH
(error) ERR KVMAP needs a connection to the server's unix socket (unixsocket)
""",
    "kvmap|blockmget": """\
> KVMAP BLOCKMGET 1 req 0
(error) ERR KVMAP needs a connection to the server's unix socket (unixsocket)
""",
    "kvmap|area": """\
> KVMAP AREA 8388608
(error) ERR KVMAP needs a connection to the server's unix socket (unixsocket)
""",
    "kvmap|copy": """\
> KVMAP COPY 0 1 req 0
(error) ERR KVMAP needs a connection to the server's unix socket (unixsocket)
""",
    "kvmap|mget": """\
> KVMAP MGET key
(error) ERR KVMAP needs a connection to the server's unix socket (unixsocket)
""",
    "kvmap|release": """\
> KVMAP RELEASE 17592186044417
(error) ERR ticket 17592186044417 is of another epoch: the server was restarted
""",
    "kvmap|socket": """\
> KVMAP SOCKET
(nil)
""",
    "kvpagewhy": f"""\
{_TWO_PAGES}> KVPAGEDEL req 0
(integer) 2
> KVPAGEWHY req 0 0 0 0
1) "reason"
2) "deleted"
3) "at"
4) (integer) ...
> KVPAGESET req 0 0 1 0 3 1 4 0 more
OK
> KVPAGEWHY req
1) "reason"
2) "hole"
3) "block"
4) (integer) 0
5) "cause"
6) "deleted"
7) "at"
8) (integer) ...
""",
    "kvblockset": """\
> KVBLOCKSET req 0 1 2 1 3600 2 0 3 2 1 3 2 k0k1v0v1
OK
> KVPAGEGET req 0 1 0 1
"v1"
""",
    "kvblockget": f"""\
{_TWO_PAGES}> KVBLOCKGET req 0
"keysvals"
""",
    "kvblockmget": """\
> KVBLOCKSET req 0 1 2 1 3600 2 0 3 2 1 3 2 k0k1v0v1
OK
> KVBLOCKMGET 2 req 0 req 1
1) "k0k1v0v1"
2) (nil)
> KVBLOCKMGET 2 req 0 req 1 SHAPE 1:1:2:0:3:4
1) ""
2) (nil)
""",
    "kvblocksetcoded": """\
> KVBLOCKSETCODED req 0 1 2 1 3600 2 0 3 2 1 3 2 0000000000000000 k0k1v0v1
(error) ERR a coded array has more than 16 bytes, got 8
""",
    "kvblockmgetcoded": """\
> KVBLOCKSET req 0 1 2 1 3600 2 0 3 2 1 3 2 k0k1v0v1
OK
> KVBLOCKMGETCODED 2 req 0 req 1
1) "k0k1v0v1"
2) (nil)
""",
    "kvblockexists": """\
> KVPAGEMSET 2 req 0 0 0 0 3 1 2 0 k0 req 0 1 0 1 3 1 2 0 v1
OK
> KVBLOCKEXISTS req 0
(integer) 0
> KVPAGEMSET 2 req 0 1 0 0 3 1 2 0 k1 req 0 0 0 1 3 1 2 0 v0
OK
> KVBLOCKEXISTS req 0
(integer) 1
""",
    "smembers": f"""\
{_TWO_PAGES}> SMEMBERS kv:req:index
1) "kv:req:0:0:0:0"
2) "kv:req:0:0:0:1"
""",
    "scard": f"""\
{_TWO_PAGES}> SCARD kv:req:index
(integer) 2
""",
    "sismember": f"""\
{_TWO_PAGES}> SISMEMBER kv:req:index kv:req:0:0:0:1
(integer) 1
""",
    "sscan": f"""\
{_TWO_PAGES}> SSCAN kv:req:index 0 MATCH *:1
1) "0"
2) 1) "kv:req:0:0:0:1"
""",
}


# -- docs/commands.md --------------------------------------------------------------------------------------------------

_OPENING = f"""\
# Commands

<!-- Made from the command table by `python -m conf.commands > docs/commands.md`; do not edit. -->

Any Redis client can send these. Errors begin with a code (`ERR`, `WRONGTYPE`, `OOM`, ...), name the wrong argument, and
say what is allowed. Where a reply is a map, RESP2 has an array of names and values instead.

## Arguments of pages and blocks

| argument | meaning | allowed |
|---|---|---|
| `req` | the request, agent or content hash | 1 to {MAX_REQ_ID} bytes; no `:`, space or control character (0-31, 127) |
| `layer`, `head` | which layer and head computed it | 0 to {MAX_LAYER}, 0 to {MAX_HEAD} |
| `page` | which run of tokens, counted from the start of the request | 0 to {MAX_PAGE} |
| `type` | which plane of the layer | 0 to {MAX_KV_TYPE}: {", ".join(f"{t.value} {t.name}" for t in KVType)} |
| `dtype` | the elements | {", ".join(f"{d.value} {d.name.lower()}" for d in DType)} |
| `page_size`, `head_dim` | rows (tokens) and columns of the page | 1 to {MAX_U32} |
| `ttl` | seconds to live, 0 for ever | 0 to {MAX_TTL} |
| `body` | the elements, row by row, little-endian | |

All pages with the same `req` and `page` are a *block*. A block is evicted as a whole. The `KVBLOCK` commands read and
write it as a whole.

A page is also a Redis string. Its key is `kv:{{req}}:{{layer}}:{{head}}:{{page}}:{{type}}`, and its value is a 64-byte
header and the body. `GET`, `DEL`, `EXISTS`, `TTL`, `EXPIRE`, `SCAN` and similar commands work on it. `SET` of such a
value under its own key writes the page.

`kv:{{req}}:index` is a read-only set of the page keys of a request. `KEYS` and `SCAN` do not list it. `SCAN` with
`TYPE set` lists only these keys, so it lists the requests.

A block that is leased or pinned, or has a lifetime (`KVPAGEKEEP`), is not evicted. All of them together can take half
of `maxmemory` and half of what `maxdisk` has for values, and within a quota at most half of that quota, when they are
[made](eviction.md#lifetimes). They do not protect from deletion and expiry. A lease lasts an hour at most, a lifetime a
day. Both can be prolonged, but not ended. A lifetime survives a restart of the server.
"""

_TITLES = {
    "page": "Pages and blocks",
    "map": "Maps of the server's memory",
    "set": "Index keys",
    "string": "Strings",
    "generic": "Keys",
    "transactions": "Transactions",
    "pubsub": "Publish and subscribe",
    "connection": "Connections",
    "cluster": "Redis Cluster",
    "server": "Server",
}
_ORDER = list(EXAMPLES)  # the order of the commands in the page, map and set groups
_MAPS = """\
A client on the same machine can read values in the server's memory, without moving their bytes through a connection.
It connects to the server's unix socket (`unixsocket`) and maps the memory (`KVMAP ATTACH`). Then it asks where values
are, which gives it *tickets*, copies them, and releases the tickets. Until then, the bytes stay as they are, even if
the value is overwritten, deleted or evicted. A ticket ends with its connection. Values with tickets count for
`maxmemory-clients`: at most half of it. `PageClient` reads blocks and large pages so, if its URL is one of a unix
socket, or of TCP at 127.0.0.1 and the server has a unix socket there (`KVMAP SOCKET`). Every client can also use the
other commands for the same values.

The user needs the right to read every key, because the memory has the values of all users.
[Security](security.md) says what a process can do with it. For other users, the server copies blocks into memory of
their connection alone (`KVMAP AREA`, `KVMAP COPY`), which takes less time than to send them. `PageClient` does so by
itself. Linux from 5.1 on has what this needs. With vm.overcommit_memory 2, memory is not shared, and clients use the
connection.
"""


def reference() -> str:
    """Return the text of docs/commands.md."""
    parts = [_OPENING]
    for group, title in _TITLES.items():
        specs = [spec for spec in TABLE.values() if spec.group == group]
        in_full = group in ("page", "map", "set")
        parts += [f"## {title}\n", *([_MAPS] if group == "map" else [])]
        parts += _in_full(specs) if in_full else [_as_table(specs)]
    forgotten = {spec.group for spec in TABLE.values()} - _TITLES.keys()
    assert not forgotten, f"groups without a title: {forgotten}"
    return "\n".join(parts)


def _call(spec: Spec) -> str:
    """Return the usage line of a command: its name in upper case and its arguments."""
    return f"{spec.name.upper().replace('|', ' ')} {spec.usage}".rstrip()


def _in_full(specs: list[Spec]) -> Iterator[str]:
    """Yield the sections of commands, in the order of `EXAMPLES`: call, summary, cost, reply and example.

    The reply is the docstring of the command's function. The docstrings begin with "Return", which is left out.
    """
    for spec in sorted((spec for spec in specs if spec.name in EXAMPLES), key=lambda spec: _ORDER.index(spec.name)):
        title = spec.name.upper().replace("|", " ")
        yield f"### {title}\n\n    {_call(spec)}\n\n{spec.summary} Costs {spec.complexity}.\n"
        yield f"Reply: {_lower_first((getdoc(spec.handler) or '').removeprefix('Return '))}\n"
        yield f"```\n{EXAMPLES[spec.name]}```\n"


def _lower_first(text: str) -> str:
    """Return a text with a lower-case first letter, unless the second letter is upper-case as in an abbreviation."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _as_table(specs: list[Spec]) -> str:
    """Return a Markdown table of commands by name, without containers that only have subcommands."""
    useful = [spec for spec in specs if not subcommands(spec.name) or spec.arity == -1]  # without containers
    useful.sort(key=lambda spec: spec.name)
    rows = [
        f"| `{_escape(_call(spec))}` | {_escape(spec.summary)} | {_escape(spec.reply)} | {spec.complexity} |"
        for spec in useful
    ]
    return "\n".join(["| command | what it does | reply | cost |", "|---|---|---|---|", *rows, ""])


def _escape(text: str) -> str:
    """Return a text with its bars escaped, for a cell of a Markdown table."""
    return text.replace("|", "\\|")


# -- ``python -m conf.commands`` prints docs/commands.md --------------------------------------------

if __name__ == "__main__":
    print(reference(), end="")
