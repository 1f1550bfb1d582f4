"""Persistent memory: state that survives across the steps of a graph, declared, sliced, grown, and stored as pages."""

from engine.persistent.builder import GraphBuilder
from engine.persistent.graph import Graph
from engine.persistent.model import Model
from engine.persistent.parser import parse, parse_file
from engine.persistent.simulator import Device, Executor, Simulator
from engine.persistent.store import PersistentStore

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
