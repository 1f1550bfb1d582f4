"""The next victim on a disk is found immediately, for any number of evictions before it."""

from __future__ import annotations

import time

from kvpage_server.store.disk.usage import DiskUsage

ENOUGH = 1.5  # seconds of processor time, ten times the usual value


def test_a_disk_is_emptied_in_its_order_in_linear_time() -> None:
    usage, units = DiskUsage(), [b"%d" % number for number in range(100_000)]
    usage.found(units, (), 0)
    began = time.process_time()
    for unit in units:
        assert usage.first == unit
        usage.remove_unit(unit)
    assert time.process_time() - began < ENOUGH
