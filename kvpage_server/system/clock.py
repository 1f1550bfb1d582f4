"""The clock for durations, which nobody can set.

Leases, idle times and pauses last as long as they should when the wall clock is set. Times to live, time stamps and all
that is written to disk use the wall clock, `page.unix_ms`.
"""

from __future__ import annotations

import time


def monotonic_ms() -> int:
    """Milliseconds since some moment in the past. Another process may count from another moment."""
    return time.monotonic_ns() // 1_000_000
