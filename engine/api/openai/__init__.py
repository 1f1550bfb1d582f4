"""Requests, replies and errors of OpenAI's API, and their conversion between text and tokens.

It has no sockets, threads or tenants, and does not call the engine.
"""
