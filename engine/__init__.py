"""A batch engine on MLX that stores its agents' contexts on a page server. The only package that imports MLX.

Contains: the modules for programs (`batch_engine`, `agent_engine`, `pool`, `spec`) and the start of an engine.
Excludes: the parts of these modules. They are in subpackages, and the docstring of each names its contents.
"""

from .platform import keep_freed, prefer_openblas

keep_freed()
prefer_openblas()  # before the first import of mlx
