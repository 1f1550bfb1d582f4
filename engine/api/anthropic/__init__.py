"""Requests, replies and errors of Anthropic's Messages API, and their conversion from and to those of a chat.

Like `openai`, it has no sockets, threads or tenants, and does not call the engine.
"""
