"""docs/commands.md, made from the command table: ``python -m kvpage_server.commands.reference > docs/commands.md``."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc

from kvpage_server.commands.reference.examples import EXAMPLES
from kvpage_server.commands.table.spec import TABLE, Spec, subcommands
from kvpage_server.page import MAX_HEAD, MAX_KV_TYPE, MAX_LAYER, MAX_PAGE, MAX_REQ_ID, MAX_TTL, MAX_U32, DType, KVType

_OPENING = f"""\
# Commands

<!-- Made from the command table by `python -m kvpage_server.commands.reference > docs/commands.md`; do not edit. -->

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

A block that is leased or pinned is not evicted. Leases and pins together can take half of `maxmemory` and half of what
`maxdisk` has for values, and within a quota at most half of that quota. They do not protect from deletion and
expiry. A lease lasts an hour at most. It can be prolonged, but not ended.
"""

_TITLES = {
    "page": "Pages and blocks",
    "set": "Index keys",
    "string": "Strings",
    "generic": "Keys",
    "transactions": "Transactions",
    "pubsub": "Publish and subscribe",
    "connection": "Connections",
    "cluster": "Redis Cluster",
    "server": "Server",
}
_ORDER = list(EXAMPLES)  # of the commands that are described in full, those of the page and set groups


def reference() -> str:
    parts = [_OPENING]
    for group, title in _TITLES.items():
        specs = [spec for spec in TABLE.values() if spec.group == group]
        in_full = group in ("page", "set")
        parts += [f"## {title}\n", *(_in_full(specs) if in_full else [_as_table(specs)])]
    forgotten = {spec.group for spec in TABLE.values()} - _TITLES.keys()
    assert not forgotten, f"groups without a title: {forgotten}"
    return "\n".join(parts)


def _call(spec: Spec) -> str:
    return f"{spec.name.upper().replace('|', ' ')} {spec.usage}".rstrip()


def _in_full(specs: list[Spec]) -> Iterator[str]:
    for spec in sorted(specs, key=lambda spec: _ORDER.index(spec.name)):
        yield f"### {spec.name.upper()}\n\n    {_call(spec)}\n\n{spec.summary} Costs {spec.complexity}.\n"
        yield f"Reply: {_lower_first(getdoc(spec.handler) or '')}\n"
        yield f"```\n{EXAMPLES[spec.name]}```\n"


def _lower_first(text: str) -> str:
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _as_table(specs: list[Spec]) -> str:
    useful = [spec for spec in specs if not subcommands(spec.name) or spec.arity == -1]  # no mere containers
    useful.sort(key=lambda spec: spec.name)
    rows = [
        f"| `{_escape(_call(spec))}` | {_escape(spec.summary)} | {_escape(spec.reply)} | {spec.complexity} |"
        for spec in useful
    ]
    return "\n".join(["| command | what it does | reply | cost |", "|---|---|---|---|", *rows, ""])


def _escape(text: str) -> str:
    return text.replace("|", "\\|")
