"""The engine behind HTTP, for OpenAI's clients: requests are checked, answers streamed, agents managed.

One thread runs the engine (`worker`); everything else runs on the event loop. `openai.schema` declares requests, and
`openai.errors` the replies to invalid ones.

Contains: endpoints, tenants, connections, and the thread. Excludes: the computation and storage of contexts.
"""
