"""A batch engine on MLX that remembers its agents through the page server. The only package that imports MLX."""
