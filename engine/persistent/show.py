"""Persistent memory as a table for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table as Printed

from engine.persistent.simulator import Executor


def show(executor: Executor, title: str) -> Printed:
    """A row a variable: its type, how large it is now, how many entries were written, their bytes or the value."""
    printed = Printed(title=title, title_justify="left")
    for heading in ("name", "type", "indices", "shape", "entries", "bytes", "value"):
        printed.add_column(heading, justify="right" if heading in ("entries", "bytes") else "left")
    variables = executor.simulator.variables
    for name, scalar in executor.memory.scalars.items():
        value = str(scalar.read().item())
        printed.add_row(name, variables[name].dtype.name, "", "", "", "", value)
    for name, table in executor.memory.tables.items():
        layout = table.layout
        row = (
            f"{layout.dtype.name}{list(layout.shape)}",
            ", ".join(f"{index}: {table.size(index)}" for index in layout.names),
            str([*table.sizes, *table.shape]),
            str(sum(1 for _ in table.entries())),
            f"{table.nbytes():,}",
        )
        printed.add_row(name, *map(escape, row), "")
    return printed
