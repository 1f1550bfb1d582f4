"""Parts of the batch engine: requests, their blocks, and the model runner with its check for a changed model.

Contains: the processing of a request from `submit` to its completion. Excludes: servers, files, and earlier contexts of
agents.
"""
