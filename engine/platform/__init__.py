"""Settings of the process before MLX is imported.

May lie here: BLAS, memory allocator, open files. May not come in: anything that imports MLX, or another part of the
engine.
"""
