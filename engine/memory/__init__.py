"""Contexts in memory: blocks, their conversion to mlx-lm's caches and back, their names, and shared prefixes.

Contains: keys and values in the memory of this process, and their names. Excludes: servers, files, and the engines.
"""
