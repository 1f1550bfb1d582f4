"""Smaller step sizes of the server, so that a small world has commands of many steps.

A quota is then counted in steps, many values leave memory one by one, and several jobs load values from disk. Some
seeds have some of these, drawn by a chance of their own. The pages of a batch that become visible in one step are few
where the program has such batches (`programs/batches.py`): as many with either page core, whose own numbers differ.
There, and where it has prefixes with states (`programs/protections.py`), a client's turn ends after each step of a
reply, so that others have theirs between two steps.
"""

from __future__ import annotations

import random
import sys
from importlib import import_module

from tests.simulation.programs import batches, coded, protections

_PAGES = "kvpage_server.commands.families.pages."
_STORE = "kvpage_server.store."
_SMALLER: list[tuple[str, str, list[int]]] = [
    (_PAGES + "page", "FROM_DISK", [1, 4]),
    (_PAGES + "request", "_DELETED_PAGES_PER_STEP", [2]),
    (_PAGES + "request", "_KEYS", [3]),
    (_PAGES + "request", "HASHED_BYTES_PER_STEP", [100]),
    ("kvpage_server.commands.dispatch.checks", "_MOST_AHEAD", [500]),
    ("kvpage_server.commands.notifying.channels", "_FEW", [1]),
    (_STORE + "evict", "KEYS_PER_STEP", [1, 5]),
    (_STORE + "eviction.leases", "_LEASES_PER_STEP", [1]),
    (_STORE + "eviction.leases", "_LEAST_STALE", [0, 3]),
    (_STORE + "eviction.order", "_UNITS_PER_STEP", [1, 7]),
    (_STORE + "eviction.ghosts", "MOST_ROWS", [4]),
    (_STORE + "disk.write_behind", "_VALUES_PER_FREE", [1]),
    (_STORE + "disk.readers", "_RECORDS_PER_TRANSACTION", [1]),
    (_STORE + "disk.fetching", "_COPIED", [50, 600]),
    (_STORE + "disk.fetching", "_VALUES_PER_READ", [1, 4]),
    (_STORE + "disk.fetching", "_PAGES_PER_STEP", [1, 5]),
    (_STORE + "disk.fetching", "_MOST_CODED", [1, 9_000]),
    (_STORE + "disk.borrowed_reads", "MOST", [2]),
    (_STORE + "disk.tier", "_VALUES_PER_STEP", [1, 4]),
    (_STORE + "evict", "_PATTERNS_PER_STEP", [30]),
    (_STORE + "keyspace", "BLOCK_PAGES_PER_STEP", [2]),
    ("kvpage_server.net.session", "MOST_COMMANDS", [1, 4]),
]


def make_smaller(seed: int) -> None:
    """Give this process the constants of a seed. Other modules may have taken them over by name."""
    if pages := batches.at_once(seed):
        vars(import_module(_PAGES + "page")).update(PAGES_PER_STEP=pages, _DECIDED_PAGES_PER_STEP=pages)
    if pages or protections.has_lengths(seed):
        for name in ("run_queue", "session"):
            vars(import_module(f"kvpage_server.net.{name}"))["TURN"] = 0
    if coded.page_code(seed) != "off":  # short pages are coded in memory, after less time
        vars(import_module(_STORE + "disk.fetching")).update(_LEAST_CODED=64, IDLE=1)
    rng = random.Random(f"smaller {seed}")
    if rng.random() < 0.6:
        return
    for module, name, values in _SMALLER:
        if rng.random() < 0.4:
            usual, small = getattr(import_module(module), name), rng.choice(values)
            theirs = [vars(one) for known, one in sys.modules.items() if known.startswith("kvpage_server.")]
            for names in theirs:
                if names.get(name) == usual and (not name.startswith("_") or names["__name__"] == module):
                    names[name] = small
