"""File formats that a stranger may have written: read with bounds, a piece at a time.

May lie here: readers and writers of bytes. May not come in: MLX, models, agents, or another part of the engine.
"""
