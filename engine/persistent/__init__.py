"""Persistent memory: variables of a graph that keep their values from step to step.

A graph declares variables, and its statements read, slice, write and grow them. `Simulator` runs it, and
`PersistentStore` stores the variables as pages. It is independent of agents and language models.
"""

from .builder import GraphBuilder
from .graph import Graph
from .parser import parse, parse_file
from .simulator import Device, Executor, Model, Simulator
from .storage import PersistentStore

__all__ = [
    "Device",
    "Executor",
    "Graph",
    "GraphBuilder",
    "Model",
    "PersistentStore",
    "Simulator",
    "parse",
    "parse_file",
]
