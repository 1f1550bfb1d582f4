"""`python -m benchmarks pages`: what pages and blocks cost on the wire, beside Valkey 9.1 and redis-server 7.

A module here is one kind of row of the table. It has `findings(plan)`, which starts the servers it needs.
"""

from benchmarks.pages.command import main

__all__ = ["main"]
