"""The page family: pages, blocks, requests, what protects them, and why one is missing."""

from kvpage_server.commands.families.pages import block, lease, page, request, why

__all__ = ["block", "lease", "page", "page_query", "request", "why"]
