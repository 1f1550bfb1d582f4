"""The OpenAI-compatible HTTP API: checks of requests, streams of answers, and agents.

One thread runs the engine (`worker`); everything else runs on the event loop. `openai.schema` declares the bodies of
requests, and `openai.errors` the replies to invalid ones. The computation and the storage of contexts are in other
packages.
"""
