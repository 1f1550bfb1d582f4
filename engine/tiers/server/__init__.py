"""Contexts on a page server: connection, lookup, writes, restore plans and fetches.

Contains: the parts of `PageTier`. Excludes: other tiers, and the engines.
"""
