"""A batch engine on MLX that remembers its agents through the page server. The only package that imports MLX.

May lie here: what programs import (`batch_engine`, `agent_engine`, `pool`, `spec`) and what starts an engine. May not
come in: anything that is only a part of these; it has a folder, and the folder's docstring says which.
"""

from engine.platform import keep_freed, prefer_openblas

keep_freed()
prefer_openblas()  # has to come before the first import of mlx
