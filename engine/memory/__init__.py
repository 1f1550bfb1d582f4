"""Contexts in memory: blocks, how they become mlx-lm's caches and back, their names, and those that prompts share.

May lie here: what holds or names keys and values in this process. May not come in: servers, files, or the engines.
"""
