"""An example of each page, block and index command, as redis-cli shows it: for `docs/commands.md`, and run by tests.

Each is run on an empty server. A line after '> ' is typed, those below it are the answer; '...' stands for what differs
from run to run.
"""

from __future__ import annotations

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
29) "tier"
30) "memory"
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
