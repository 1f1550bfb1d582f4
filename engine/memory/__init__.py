"""Contexts in the memory of this process: blocks, their conversion to mlx-lm's caches and back, and shared prefixes."""
