"""Contexts on a page server: the connection, what lies where, and how blocks are written, planned and fetched.

May lie here: what `PageTier` is made of. May not come in: other tiers, or the engines.
"""
