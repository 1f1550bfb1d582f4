"""OpenAI's side of the API: its requests, replies and errors, as text and as tokens.

Contains: the API as OpenAI documents it. Excludes: sockets, threads, tenants, and the engine that answers.
"""
