"""A batch engine on MLX that remembers its agents through the page server. The only package that imports MLX."""

from engine.blas import prefer_openblas

prefer_openblas()  # has to come before the first import of mlx
