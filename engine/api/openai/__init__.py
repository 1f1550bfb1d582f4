"""Requests, replies and errors of OpenAI's API, as text and as tokens.

Contains: the API as OpenAI documents it. Excludes: sockets, threads, tenants, and the engine that answers.
"""
