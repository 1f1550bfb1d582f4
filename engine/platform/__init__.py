"""What the engine asks of the machine before MLX is imported: a BLAS, the memory allocator, open files.

May lie here: settings of the process. May not come in: anything that imports MLX, or another part of the engine.
"""
