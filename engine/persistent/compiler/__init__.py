"""From a graph to Python functions: declarations checked, sizes resolved, operations called.

May lie here: what is known before a step, and what one step holds. May not come in: a store.
"""
