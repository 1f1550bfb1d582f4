"""Which variables may take values of several sizes.

A slice with variable ends, an auto_dim tensor and a table that grows have no size that is known beforehand. A variable
that takes one of those, or what was computed from one, is *elastic*: its declaration says its rank and dtype, and the
sizes it begins with. All others have exactly the sizes that they declare.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.persistent.compiler.variables import Variable
from engine.persistent.language.graph import Access, Graph, Index, Operation, Read, Slice, Transfer
from engine.persistent.state.table import Layout


def elastic_variables(graph: Graph, variables: Mapping[str, Variable]) -> frozenset[str]:
    flows: list[tuple[set[str], str]] = []  # from which to which
    elastic: set[str] = set()
    for block in graph.blocks:
        for statement in block.statements():
            match statement:
                case Read(access, to):
                    source = variables.get(access.name)
                    if source and source.section == "persistent" and not _is_known(access, source.layout):
                        elastic.add(to)
                case Transfer(source=source_access, to=to):
                    flows.append(({source_access.name}, to))
                case Operation(arguments=arguments, to=to):
                    flows.append(({argument.name for argument in arguments}, to))
    found = True
    while found:
        more = {to for sources, to in flows if sources & elastic} - elastic
        elastic |= more
        found = bool(more)
    return frozenset(elastic)


def selected_rank(access: Access, layout: Layout) -> int:
    """How many dimensions a read has: scalars drop an axis, but scalars alone of auto_dim give the whole tensor."""
    given = access.indices or ()
    table, auto = given[: len(layout.indices)], given[len(layout.indices) :]
    dropped = sum(not isinstance(index, Slice) for index in table)
    if any(isinstance(index, Slice) for index in auto):
        dropped += sum(not isinstance(index, Slice) for index in auto)
    return len(layout.indices) + len(layout.shape) - dropped


def _is_known(access: Access, layout: Layout) -> bool:
    """Whether the sizes of what is read are certain before it is read."""
    given = [*(access.indices or ()), *[Slice(None, None)] * len(layout.indices)][: len(layout.indices)]
    lengths = [_is_fixed(index, layout.limit(name)) for name, index in zip(layout.indices, given, strict=True)]
    return not layout.auto and all(lengths)


def _is_fixed(index: Index, limit: int | None) -> bool:
    if not isinstance(index, Slice):
        return True
    stop = limit if index.stop is None else index.stop
    return isinstance(index.start, int | None) and isinstance(stop, int) and (stop >= 0 or limit is not None)
