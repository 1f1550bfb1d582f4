"""The page family: pages, blocks, requests, their protection, reasons of misses, and the map of the memory."""

from kvpage_server.commands.families.pages import block, lease, mapped, page, request

__all__ = ["block", "lease", "mapped", "page", "request"]
