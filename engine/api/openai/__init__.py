"""OpenAI's side of the API: its requests, replies and errors, as text and as tokens.

May lie here: what its documentation describes. May not come in: sockets, threads, tenants, or the engine that answers.
"""
