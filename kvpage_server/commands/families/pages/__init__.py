"""The page family: pages, blocks, requests, their protection, and reasons of misses."""

from kvpage_server.commands.families.pages import block, lease, page, request, why

__all__ = ["block", "lease", "page", "request", "why"]
