"""`python -m benchmarks pages`: the cost of pages and blocks on the wire, compared with Valkey 9.1 and redis-server 7.

A module here is one kind of row of the table. It has `findings(plan)`, which starts the servers it needs.
"""

from benchmarks.pages.command import main

__all__ = ["main"]
