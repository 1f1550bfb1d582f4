"""Persistent memory: state that survives across the steps of a graph, declared, sliced, grown, and stored as pages.

May lie here: what programs import, and the errors and dtypes that all parts share. May not come in: agents, or
language models.
"""

from engine.persistent.builder import GraphBuilder
from engine.persistent.graph import Graph
from engine.persistent.parser import parse, parse_file
from engine.persistent.simulator import Device, Executor, Model, Simulator
from engine.persistent.storage import PersistentStore

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
