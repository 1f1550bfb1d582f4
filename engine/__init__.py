"""A batch engine on MLX that stores its agents' contexts on a page server. The only package that imports MLX.

Programs use the modules `batch_engine`, `agent_engine`, `pool` and `spec`. The subpackages have their parts.
"""

from .platform import keep_freed, prefer_openblas

keep_freed()
prefer_openblas()  # before the first import of mlx
