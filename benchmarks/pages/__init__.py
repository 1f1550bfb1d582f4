"""`python -m benchmarks pages`: the cost of pages and blocks on the wire, compared with Valkey 9.1 and redis-server 7.

`command.KINDS` names the kinds of rows of the table. Each has a function of a plan, which starts the servers it needs.
"""

from benchmarks.pages.command import main

__all__ = ["main"]
