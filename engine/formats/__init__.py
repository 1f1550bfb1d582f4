"""Readers and writers of files that may come from strangers: with limits, a piece at a time.

May lie here: readers and writers of bytes. May not come in: MLX, models, agents, or another part of the engine.
"""
