"""How tokens are made: samplers, the text of an answer, and what runs prompts that mlx-lm's batches cannot.

May lie here: what a step of a model needs. May not come in: blocks, tiers, agents, or the engines.
"""
