"""Decoding: samplers, the text of an answer, and generators for prompts that mlx-lm cannot batch.

Contains: the parts of a model's step. Excludes: blocks, tiers, agents, and the engines.
"""
