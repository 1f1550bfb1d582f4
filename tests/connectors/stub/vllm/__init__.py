"""Interfaces of vLLM 0.32 that the connectors implement or call, for mypy and for tests without vLLM."""

__version__ = "0.32.0"
