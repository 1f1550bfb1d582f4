"""A batch engine on MLX that remembers its agents through the page server. The only package that imports MLX."""

from engine.blas import prefer_openblas
from engine.memory import keep_freed

keep_freed()
prefer_openblas()  # has to come before the first import of mlx
