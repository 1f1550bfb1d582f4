"""The engine behind HTTP, as OpenAI's clients speak it: requests checked, answers streamed, agents looked after.

One thread runs the engine (`worker`); the event loop has everything else. What a request may say is declared in
`openai.schema`, what it is told when that is wrong in `openai.errors`.

May lie here: endpoints, tenants, connections, and the thread. May not come in: what computes or stores a context.
"""
