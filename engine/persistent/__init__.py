"""Persistent memory: variables of a graph that keep their values from step to step. They are declared, sliced, grown,
and stored as pages.

Contains: the modules for programs, and the errors and dtypes that all parts share. Excludes: agents, and language
models.
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
