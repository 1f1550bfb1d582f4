"""`kvpage-engine run`: it runs steps of a graph, and continues from the saved state of the instance."""

from __future__ import annotations

import argparse

import mlx.core as mx
import redis
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpage_server.system.program import reason_of, report_line

from .errors import InputError, NoInstanceError, PersistentError
from .parser import parse_file
from .simulator import Executor, Model, Simulator
from .storage import PersistentStore


def run(args: argparse.Namespace) -> int:
    """Resume or create the instance, run the steps, save it, and print its persistent memory. Return the exit code: 0,
    or 1 after an error.
    """
    try:
        store = PersistentStore(args.url)
        try:
            executor = _run(args, store)
        finally:
            store.close()
    except (PersistentError, redis.RedisError, OSError, ValueError) as error:
        report_line(f"kvpage-engine: {reason_of(error) if isinstance(error, OSError) else error}")
        return 1
    Console(soft_wrap=True).print(_table(executor, f"{args.instance} after step {executor.steps}"))
    return 0


def _run(args: argparse.Namespace, store: PersistentStore) -> Executor:
    sizes = dict(args.size)
    model = Model.load(args.model, sizes) if args.model else Model(sizes)
    simulator = Simulator(model, parse_file(args.graph), store=store)
    inputs = Model.load(args.inputs).tensors if args.inputs else {}
    try:
        executor = simulator.resume(args.instance, autosave=args.autosave)
    except NoInstanceError:
        executor = simulator.make_executor(args.instance, autosave=args.autosave)
    for _ in range(args.steps):
        executor.insert({name: _row(name, rows, executor.steps) for name, rows in inputs.items()})
        executor.step()
    executor.save()
    return executor


def _row(name: str, rows: mx.array, step: int) -> mx.array:
    if not rows.ndim or step >= len(rows):
        raise InputError(f"{name} has inputs for {len(rows) if rows.ndim else 0} steps, none for step {step}")
    return rows[step]


def _table(executor: Executor, title: str) -> Table:
    """Return persistent memory as a table for the terminal, with a row for each variable."""
    printed = Table(title=title, title_justify="left")
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
