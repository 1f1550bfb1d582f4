"""Parts of the batch engine: the request, its blocks, and the check for a changed model.

Contains: a request from `submit` to its completion. Excludes: servers, files, and earlier contexts of agents.
"""
