"""Persistent memory while it runs: tables, their entries side by side, and how a change is taken back.

May lie here: what outlives a step. May not come in: graphs, or a store.
"""
