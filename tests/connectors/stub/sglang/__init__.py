"""Interfaces of SGLang 0.5.23 that the backend implements or calls, for mypy and for tests without SGLang."""
