"""Decoding: chat templates, samplers, the text of an answer, and generators for prompts that mlx-lm cannot batch."""
