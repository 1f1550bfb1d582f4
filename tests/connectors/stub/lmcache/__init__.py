"""Interfaces of LMCache 0.5.6 that the L2 adapter implements or calls, for mypy and for tests without LMCache."""

__version__ = "0.5.6"
