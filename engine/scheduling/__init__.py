"""What the batch engine needs to run a prompt: the request, its blocks, and a look at whether the model has changed.

May lie here: what a request has from `submit` to its completion. May not come in: servers, files, agents' histories.
"""
