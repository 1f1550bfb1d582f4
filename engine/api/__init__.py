"""The engine behind HTTP, for OpenAI's clients: requests are checked, answers streamed, agents managed.

One thread runs the engine (`worker`); everything else runs on the event loop. `openai.schema` declares requests, and
`openai.errors` what the client is told if one is wrong.

May lie here: endpoints, tenants, connections, and the thread. May not come in: what computes or stores a context.
"""
