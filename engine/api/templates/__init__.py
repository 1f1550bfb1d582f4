"""Chat templates: rendered in a process of their own, which bounds their time and memory.

May lie here: the input of a template, its process, and the tokens of its text. May not come in: requests, replies, or
the engine.
"""
